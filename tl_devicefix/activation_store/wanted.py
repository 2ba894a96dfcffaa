"""Which activations are wanted, by the names of a model's hook points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tl_devicefix.misspelt import did_you_mean

Wanted = list[str] | Callable[[str], bool] | None
"""As `run_with_cache` takes it."""


def wanted_of(names_filter: Any, model: Any) -> Wanted:
    """What is wanted, of which TransformerLens would leave out silently what there is not.

    Args:
        names_filter: None for all, a function of a name, a name, or several.
        model: whose hook points these are.

    Raises:
        TypeError: for something else.
        ValueError: for no name at all, or one that the model has not.
    """
    if names_filter is None or callable(names_filter):
        return names_filter
    if not isinstance(names_filter, Iterable):
        raise TypeError(
            "names_filter must be a name, names, or a function of a name, but is a "
            f"{type(names_filter).__name__}"
        )
    names = [names_filter] if isinstance(names_filter, str) else list(names_filter)
    if not names:
        raise ValueError("names_filter has no names: give some, or None for all of the model's")
    points = model.hook_dict
    for name in names:
        if name not in points:
            raise ValueError(
                f"names_filter has {name!r}, which is no hook point of this model"
                f"{did_you_mean(name, points, 0.5)}: give names of model.hook_dict, or a "
                'function such as lambda name: name.endswith("hook_resid_post")'
            )
    return names


def refuse_missing(wanted: Wanted, found: Iterable[str], stop_at_layer: int | None) -> None:
    """Refuse names of which a forward has given nothing.

    Args:
        wanted: as `wanted_of` has it; a function may be for names that are not computed.
        found: names of what the first forward has given.
        stop_at_layer: where the forward was stopped.

    Raises:
        ValueError: naming the first.
    """
    for name in wanted if isinstance(wanted, list) else ():
        if name not in found:
            otherwise = (
                "switch it on (set_use_attn_result for hook_result)"
                if stop_at_layer is None
                else f"stop later than at stop_at_layer={stop_at_layer}"
            )
            raise ValueError(
                f"the forward gives no tensor at {name}: leave it out of names_filter, or "
                f"{otherwise}"
            )
