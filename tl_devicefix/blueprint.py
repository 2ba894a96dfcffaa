"""A model that is yet to be made, of either class: what planning, estimating and rehearsing need.

HookedTransformer's is in `hooked_blueprint.py`, TransformerBridge's in `bridge/blueprint.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from tl_devicefix.components import ComponentSize
from tl_devicefix.placement import Placement
from tl_devicefix.versions import has_bridge, has_hooked_transformer


class Generation(ABC):
    """Generating with a KV cache, of which only the first and the last step are taken."""

    @abstractmethod
    def prompt(self) -> None:
        """Run the prompt, which fills the KV cache."""

    @abstractmethod
    def skip_to(self, length: int) -> None:
        """Have the KV cache as long as if this many tokens had been run."""

    @abstractmethod
    def last_token(self) -> None:
        """Run one token more."""


class Blueprint(ABC):
    """A model at its full size: its config, and how it is made without values."""

    name: str
    dtype: torch.dtype
    n_ctx: int
    n_layers: int

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> Blueprint:
        """The same model with weights of another dtype."""

    @abstractmethod
    def sizes(self) -> tuple[ComponentSize, ...]:
        """What its components weigh, in the order they run."""

    @abstractmethod
    def make(self, placement: Placement, tokenizer: Any = None) -> Any:
        """The model, on the devices of a `simulate(..., values=False)`."""

    @abstractmethod
    def room_to_load(self, placement: Placement) -> int:
        """Bytes that loading takes on a device beside the weights."""

    @abstractmethod
    def largest_stack(self, model: Any) -> int:
        """Bytes that the largest stacked weight (`model.W_in`) of a model takes, as it is made."""

    @abstractmethod
    def generation(self, model: Any, batch: int, ctx: int) -> Generation:
        """Generating from prompts of `ctx` tokens."""


def blueprint(
    config_or_model_name: Any,
    dtype: torch.dtype | str | None,
    options: dict[str, Any],
    cls: Any = None,
) -> Blueprint:
    """The model that would be loaded with these arguments.

    Args:
        config_or_model_name: as for `plan`.
        dtype: of the weights; by default float32, or that of a HookedTransformerConfig.
        options: what the config depends on, as loading takes it.
        cls: the model's class. By default HookedTransformer, but for a transformers config, and
            with TransformerLens 4, TransformerBridge.

    Raises:
        ValueError: if the config cannot be had, or the class is another.
    """
    if _is_of_bridge(config_or_model_name, cls):
        from tl_devicefix.bridge.blueprint import BridgeBlueprint

        return BridgeBlueprint.read(config_or_model_name, dtype, options)
    from tl_devicefix.hooked_blueprint import HookedBlueprint

    return HookedBlueprint.read(config_or_model_name, dtype, options, cls)


def option_names(config_or_model_name: Any) -> Sequence[str]:
    """What `options` may name, for the class that is made by default."""
    if _is_of_bridge(config_or_model_name, None):
        from tl_devicefix.bridge.blueprint import OPTIONS

        return OPTIONS
    from tl_devicefix.hooked_blueprint import option_names

    return option_names(config_or_model_name)


def _is_of_bridge(config_or_model_name: Any, cls: Any) -> bool:
    if cls is None:
        return not has_hooked_transformer() or hasattr(config_or_model_name, "model_type")
    if has_bridge():
        from transformer_lens.model_bridge import TransformerBridge

        if cls is TransformerBridge:
            return True
    if has_hooked_transformer():
        from transformer_lens import HookedTransformer

        if isinstance(cls, type) and issubclass(cls, HookedTransformer):
            return False
    classes = (["HookedTransformer or a subclass of it"] if has_hooked_transformer() else []) + (
        ["TransformerBridge"] if has_bridge() else []
    )
    raise ValueError(f"cls={cls!r} is no class of models here: give {', or '.join(classes)}")
