"""`transformer_lens.patching`: its loop gets the model's outputs from a sweep.

TransformerLens's own function runs, with its progress, metrics and shapes; only the model that it
is given is another, which hands out the sweep's results in turn.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformer_lens.patching import utils

from tl_devicefix.adapters import is_model
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.pipelining.sweep import Hooks, sweep


@patches(
    None,
    takes="model corrupted_tokens clean_cache patching_metric patch_setter activation_name "
    "index_axis_names index_df",
    why="each run starts at the block that it patches; several are under way on several devices",
)
def generic_activation_patch(original: Any, *args: Any, **kwargs: Any) -> Any:
    """See TransformerLens's, and its `get_act_patch_*`. Each run starts at the block it patches."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    asked = SimpleNamespace(**call.arguments)
    if not is_model(asked.model):
        return original(*args, **kwargs)
    # TransformerLens 2.16 counts as many heads of keys and values as of queries.
    knows_groups = "n_key_value_heads" in original.__code__.co_names

    def runs() -> Iterator[Hooks]:
        if getattr(asked, "baseline", False):
            yield []
        for index in _indices(asked, knows_groups):
            name = utils.get_act_name(asked.activation_name, layer=index[0])
            yield [(name, _patching(asked.patch_setter, index, asked.clean_cache[name]))]

    with contextlib.closing(_Swept(asked.model, asked.corrupted_tokens, runs())) as swept:
        # `runs` alone reads the clean cache.
        call.arguments |= {"model": swept, "clean_cache": defaultdict(lambda: None)}
        return original(*call.args, **call.kwargs)


def _indices(asked: SimpleNamespace, knows_groups: bool) -> Iterator[list[Any]]:
    """The indices that TransformerLens patches, in its order: the layer, and where in it."""
    if asked.index_df is not None:
        for _, row in asked.index_df.iterrows():
            yield row.to_list()
        return
    cfg, length = asked.model.cfg, asked.corrupted_tokens.shape[-1]
    heads = cfg.n_heads
    if knows_groups and asked.activation_name in ("k", "v"):
        heads = cfg.n_key_value_heads or heads
    sizes = {"layer": cfg.n_layers, "head": heads, "head_index": heads}
    lengths = [sizes.get(axis, length) for axis in asked.index_axis_names or ()]
    yield from map(list, itertools.product(*map(range, lengths)))


def _patching(patch_setter: Callable[..., Any], index: list[Any], clean: Any) -> Any:
    """The hook that TransformerLens makes for one index."""

    def hook(activation: torch.Tensor, hook: Any) -> Any:
        if activation.requires_grad:  # which TransformerLens 2 changes in place
            activation = activation.clone()
        return patch_setter(activation, index, clean)

    return hook


class _Swept:
    """A model as TransformerLens's loop uses it, whose outputs are the next results of a sweep."""

    def __init__(self, model: Any, tokens: torch.Tensor, runs: Iterator[Hooks]) -> None:
        self._model = model
        self._results: Any = sweep(model, tokens, runs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # TransformerLens asks whether it is a module
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run_with_hooks(self, tokens: torch.Tensor, fwd_hooks: Hooks) -> torch.Tensor:
        """The logits of the next run, which has these hooks."""
        return next(self._results)

    def close(self) -> None:
        """End the sweep."""
        self._results.close()
