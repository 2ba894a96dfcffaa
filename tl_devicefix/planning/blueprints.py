"""Which class's blueprint is that of a model: HookedTransformer's or TransformerBridge's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tl_devicefix.misspelt import refuse_unknown
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer
from tl_devicefix.placement.blueprint import Blueprint


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
    if is_of_bridge(config_or_model_name, cls):
        from tl_devicefix.transformer_bridge.blueprint import BridgeBlueprint

        return BridgeBlueprint.read(config_or_model_name, dtype, options)
    from tl_devicefix.hooked_transformer.blueprint import HookedBlueprint

    return HookedBlueprint.read(config_or_model_name, dtype, options, cls)


def check_options(
    function: Callable[..., Any],
    config_or_model_name: Any,
    options: Iterable[str],
    cls: Any = None,
) -> None:
    """Check that what a function was called with beside its own arguments is known.

    Args:
        function: `estimate` or `dry_run`.
        config_or_model_name: as for `plan`.
        options: the names.
        cls: the model's class, as for `blueprint`.

    Raises:
        TypeError: naming the first that does not exist, and what may be meant.
        ValueError: if the class is no class of models.
    """
    of_bridge = is_of_bridge(config_or_model_name, cls)
    known = _option_names(config_or_model_name, of_bridge)
    own = [name for name in inspect.signature(function).parameters if name != "options"]
    where = "" if known else " beside a config, which says all"
    where = " for a TransformerBridge" if of_bridge else where
    refuse_unknown(function.__name__, options, [*own, *known], where)


def _option_names(config_or_model_name: Any, of_bridge: bool) -> Sequence[str]:
    """What `options` may name."""
    if of_bridge:
        from tl_devicefix.transformer_bridge.blueprint import OPTIONS

        return OPTIONS
    from tl_devicefix.hooked_transformer.blueprint import option_names

    return option_names(config_or_model_name)


def is_of_bridge(config_or_model_name: Any, cls: Any = None) -> bool:
    """Whether a model is a TransformerBridge's.

    Args:
        config_or_model_name: as for `plan`.
        cls: its class, as for `blueprint`.

    Raises:
        ValueError: if the class is no class of models.
    """
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
