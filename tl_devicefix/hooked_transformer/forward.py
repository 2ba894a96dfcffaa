"""Wrap `HookedTransformer.forward` and `generate`: results at home, masks shared by blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformer_lens import HookedTransformer

from tl_devicefix.dispatch import forward as running
from tl_devicefix.dispatch.scheduler import current_run
from tl_devicefix.dispatch.views import hooked_points
from tl_devicefix.fusing.one_forward import one_forward
from tl_devicefix.hooked_transformer.moving import placement_by, remember
from tl_devicefix.monkeypatch.patch import patches

if TYPE_CHECKING:  # TransformerLens 2 has it elsewhere
    from transformer_lens.utilities import LocallyOverridenDefaults

Original = Callable[..., Any]


@patches(
    "HookedTransformer",
    takes="self input return_type start_at_layer stop_at_layer",
    why="what leaves the model is at home",
)
def forward(original: Original, self: HookedTransformer, *args: Any, **kwargs: Any) -> object:
    """Wrap `HookedTransformer.forward`: results are at home; blocks share masks and positions.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    with one_forward():
        return running.run_forward(original, self, *args, **kwargs)


@patches(None, takes="input w b", why="attention that you call by hand runs on its own device")
def simple_attn_linear(
    original: Callable[..., torch.Tensor], input: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Move the input to the weights' device; TransformerLens moves the weights instead."""
    return original(input.to(w.device), w, b)


@patches(
    "HookedTransformer",
    "generate",
    takes="self input return_type",
    why="texts of unequal length are generated one by one: padding would be attended to",
    until="3.0",
)
def generate_one_by_one(
    original: Original, self: HookedTransformer, input: object = "", *args: object, **kwargs: Any
) -> object:
    """Wrap `HookedTransformer.generate`, and generate texts of unequal length one by one.

    A tensor of tokens, already padded, goes to TransformerLens's own method.
    """
    # TransformerLens 2 and 3.0 drop the padding mask, so only the longest text would be right.
    if isinstance(input, list) and kwargs.get("return_type", "input") in ("input", "str"):
        prepends = {name: kwargs[name] for name in ("prepend_bos",) if name in kwargs}
        lengths = {self.to_tokens(text, **prepends).shape[1] for text in input}
        if len(lengths) > 1:
            return [original(self, text, *args, **kwargs) for text in input]
    return original(self, input, *args, **kwargs)


@patches(
    "LocallyOverridenDefaults",
    "__enter__",
    takes="self",
    why="runs in flight do not change what others read",
    until="3",
)
def override_defaults(original: Original, self: LocallyOverridenDefaults) -> object:
    """Wrap `LocallyOverridenDefaults.__enter__`, which changes a model's config while it lasts.

    A run in flight changes a copy: other runs read the model's own at the same time.
    """
    model, prepend_bos = self.model, self.overrides.get("prepend_bos")
    # A missing argument is None, or some other string in TransformerLens 2.
    if (
        current_run() is not None
        and prepend_bos in (True, False)
        and prepend_bos != model.cfg.default_prepend_bos
    ):
        placement = placement_by(model.cfg)
        model.cfg = copy.copy(model.cfg)
        if placement is not None:  # it is looked up by config, which is new
            remember(model.cfg, placement)
    return original(self)


@patches(
    "HookedTransformer",
    takes="self direction including_permanent level",
    why="hook points without hooks are skipped; visiting all takes a third of a forward",
)
def remove_all_hook_fns(
    self: HookedTransformer,
    direction: Literal["fwd", "bwd", "both"] = "both",
    including_permanent: bool = False,
    level: int | None = None,
) -> None:
    """Replace `HookedRootModule.remove_all_hook_fns`, and skip hook points without hooks."""
    # TransformerLens visits all hook points after each `run_with_hooks` and `run_with_cache`.
    # Always visit the first: its `remove_hooks` checks the direction.
    points = list(self.hook_points())
    for point in points[:1] + hooked_points(points):
        point.remove_hooks(direction, including_permanent, level)
