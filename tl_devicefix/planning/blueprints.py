"""A model that is yet to be made, of either class: its config, and how it is made without values.

Each class has its own: `hooked_transformer/blueprint.py`, `transformer_bridge/blueprint.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from tl_devicefix.adapters import Adapter, adapters
from tl_devicefix.misspelt import refuse_unknown
from tl_devicefix.placement.placement import ComponentSize, Placement


class Generation(Protocol):
    """Generation with a KV cache; only its first and last steps are run."""

    def prompt(self) -> None:
        """Run the prompt, which fills the KV cache."""

    def skip_to(self, length: int) -> None:
        """Make the KV cache as long as if this many tokens had been run."""

    def last_token(self) -> None:
        """Run one token more."""


class Blueprint(Protocol):
    """A model at its full size."""

    name: str
    dtype: torch.dtype
    n_ctx: int
    n_layers: int

    def sizes(self) -> tuple[ComponentSize, ...]:
        """The sizes of its components, in the order they run."""

    def make(self, placement: Placement, tokenizer: Any = None) -> Any:
        """The model, on the devices of a `simulate(..., values=False)`."""

    def room_to_load(self, placement: Placement) -> int:
        """Bytes that loading takes on a device beside the weights."""

    def generation(self, model: Any, batch_size: int, seq_len: int) -> Generation:
        """Generating from prompts of `seq_len` tokens."""


def blueprint(
    config_or_model_name: Any,
    dtype: torch.dtype | str | None,
    options: dict[str, Any],
    cls: Any = None,
) -> Blueprint:
    """The model that would be loaded with these arguments; see `dry_run`.

    The dtype is float32 by default, or that of a HookedTransformerConfig.
    """
    adapter = adapter_to_load(config_or_model_name, cls)
    model: Blueprint = adapter.read_blueprint(config_or_model_name, dtype, options, cls)
    n_ctx = options.get("n_ctx")
    if n_ctx is not None and any(size.name == "pos_embed" for size in model.sizes()):
        own = blueprint(config_or_model_name, dtype, {**options, "n_ctx": None}, cls).n_ctx
        if n_ctx != own:
            raise ValueError(
                f"n_ctx is {n_ctx}, but this model has {own} learnt position embeddings: leave "
                "n_ctx out"
            )
    return model


def check_options(
    function: Callable[..., Any], config_or_model_name: Any, options: Iterable[str], cls: Any = None
) -> None:
    """Check the names of the options that `estimate` or `dry_run` was called with."""
    adapter = adapter_to_load(config_or_model_name, cls)
    names = adapter.option_names(config_or_model_name)
    own = [name for name in inspect.signature(function).parameters if name != "options"]
    where = "" if names else " beside a config, which says all"
    where = " for a TransformerBridge" if adapter.NAME == "TransformerBridge" else where
    refuse_unknown(function.__name__, options, [*own, *names], where)


def adapter_to_load(config_or_model_name: Any, cls: Any = None) -> Adapter:
    """The adapter of the class that a model would be of; for `cls` see `dry_run`."""
    installed = adapters()
    if cls is None:
        is_of_transformers = hasattr(config_or_model_name, "model_type")
        usual = installed.get("TransformerBridge" if is_of_transformers else "HookedTransformer")
        return usual or next(iter(installed.values()))
    for name, adapter in installed.items():
        may_be_subclass = name == "HookedTransformer" and isinstance(cls, type)
        if cls is adapter.model_class or (may_be_subclass and issubclass(cls, adapter.model_class)):
            return adapter
    raise ValueError(f"cls must be {' or '.join(installed)}, but is {cls!r}")
