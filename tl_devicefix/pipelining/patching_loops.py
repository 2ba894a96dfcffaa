"""`transformer_lens.patching`: its loop gets the model's outputs from a sweep.

TransformerLens's own function runs, with its progress, metrics and shapes; only the model that it
is given is another, which hands out the sweep's results in turn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformer_lens import patching
from transformer_lens.patching import utils

from tl_devicefix.adapters import is_model
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.pipelining.sweep import Hooks, is_sequential, sweep

transformer_lens_patch = patching.generic_activation_patch
# TransformerLens 2.16 counts as many heads of keys and values as of queries.
_KNOWS_GROUPS = "n_key_value_heads" in transformer_lens_patch.__code__.co_names


_TAKES = "model corrupted_tokens clean_cache patching_metric"
_OPTIONS = "patch_setter activation_name index_axis_names index_df"
_WHY = "each run starts at the block that it patches; several are under way on several devices"


@patches(None, takes=f"{_TAKES} {_OPTIONS}", why=_WHY)
@functools.wraps(transformer_lens_patch)
def generic_activation_patch(
    model: Any,
    corrupted_tokens: torch.Tensor,
    clean_cache: Any,
    patching_metric: Any,
    patch_setter: Callable[..., Any],
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
    **others: Any,
) -> Any:
    """See TransformerLens's. Each run starts at the block that it patches."""
    call = functools.partial(
        transformer_lens_patch,
        patching_metric=patching_metric,
        patch_setter=patch_setter,
        activation_name=activation_name,
        index_axis_names=index_axis_names,
        index_df=index_df,
        return_index_df=return_index_df,
        **others,
    )
    if is_sequential() or not is_model(model):
        return call(model, corrupted_tokens, clean_cache)

    def runs() -> Iterator[Hooks]:
        if others.get("baseline"):
            yield []
        for index in _indices(model, corrupted_tokens, activation_name, index_axis_names, index_df):
            name = utils.get_act_name(activation_name, layer=index[0])
            yield [(name, _patching(patch_setter, index, clean_cache[name]))]

    with contextlib.closing(_Swept(model, corrupted_tokens, runs())) as swept:
        # `runs` alone reads the clean cache.
        return call(swept, corrupted_tokens, defaultdict(lambda: None))


def _indices(
    model: Any,
    tokens: torch.Tensor,
    activation_name: str,
    axes: Sequence[str] | None,
    index_df: Any,
) -> Iterator[list[Any]]:
    """The indices that TransformerLens patches, in its order: the layer, and where in it."""
    if index_df is not None:
        for _, row in index_df.iterrows():
            yield row.to_list()
        return
    heads = model.cfg.n_heads
    if _KNOWS_GROUPS and activation_name in ("k", "v") and model.cfg.n_key_value_heads is not None:
        heads = model.cfg.n_key_value_heads
    sizes = {"layer": model.cfg.n_layers, "head": heads, "head_index": heads}
    lengths = [sizes.get(axis, tokens.shape[-1]) for axis in axes or ()]
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


# The `get_act_patch_*` that TransformerLens makes of `generic_activation_patch`.
for _name, _installed in vars(patching).items():
    if isinstance(_installed, functools.partial) and _installed.func is transformer_lens_patch:
        _partial = functools.partial(
            generic_activation_patch, *_installed.args, **_installed.keywords
        )
        _partial.__doc__ = _installed.__doc__  # type: ignore[misc]
        patches(None, _name, takes=_TAKES, why=_WHY)(_partial)
