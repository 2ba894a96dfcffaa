"""`transformer_lens.patching` through `sweep`.

TransformerLens's own function runs, with its progress bar, metrics and shapes. It gets a stand-in
for the model, which returns the sweep's results in turn.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from packaging.version import Version
from transformer_lens.hook_points import HookPoint
from transformer_lens.patching import utils

from tl_devicefix.adapters import is_model
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.pipelining.batches import Hooks
from tl_devicefix.pipelining.sweep import sweep
from tl_devicefix.types import Model

T = TypeVar("T")
_batch_size = 1


class batch_sweeps:
    """Have `transformer_lens.patching` run its sweeps in batches of this many runs.

        with tl_devicefix.batch_sweeps(16):
            patching.get_act_patch_resid_pre(model, corrupted_tokens, clean_cache, metric)

        tl_devicefix.batch_sweeps(16)  # from here on, in all threads

    This applies to `generic_activation_patch` and to each `get_act_patch_*` that calls it. Your
    metric is called for each run, with that run's logits. Results equal those of single runs up to
    rounding, and a batch takes the memory of a forward of that many prompts. For your own sweeps,
    pass `batch_size` to `sweep`.

    Args:
        batch_size: how many runs are one forward. The default is 1.
    """

    def __init__(self, batch_size: int) -> None:
        global _batch_size
        self._batch_size = batch_size
        self._before, _batch_size = _batch_size, batch_size

    def __repr__(self) -> str:
        return f"batch_sweeps({self._batch_size})"

    def __enter__(self) -> None:
        global _batch_size
        _batch_size = self._batch_size

    def __exit__(self, *_: object) -> None:
        global _batch_size
        _batch_size = self._before


@patches(
    None,
    takes="model corrupted_tokens clean_cache patching_metric patch_setter activation_name "
    "index_axis_names index_df",
    why="each run starts at the block that it patches; several devices compute different runs",
)
def generic_activation_patch(original: Callable[..., T], *args: object, **kwargs: object) -> T:
    """See TransformerLens's function. Each run starts at the block that it patches."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    asked = SimpleNamespace(**call.arguments)
    if not is_model(asked.model):  # such as a stand-in in a test
        return original(*args, **kwargs)

    def runs() -> Iterator[Hooks]:
        if getattr(asked, "baseline", False):
            yield []
        for index in _indices(asked):
            name = utils.get_act_name(asked.activation_name, layer=index[0])
            clean = asked.clean_cache[name]
            hook = functools.partial(
                _patch, patch_setter=asked.patch_setter, index=index, clean=clean
            )
            yield [(name, hook)]

    started, swept = itertools.tee(runs())
    results = sweep(asked.model, asked.corrupted_tokens, started, batch_size=_batch_size)
    with contextlib.closing(results):
        # `runs` alone reads the clean cache.
        stand_ins = {"model": _Swept(asked.model, swept, results), "clean_cache": defaultdict(list)}
        call.arguments |= stand_ins
        return original(*call.args, **call.kwargs)


def _indices(asked: SimpleNamespace) -> Iterator[list[int]]:
    """Yield the indices to patch in TransformerLens's order; a layer comes first in each."""
    if asked.index_df is not None:
        for _, row in asked.index_df.iterrows():
            yield row.to_list()
        return
    cfg, length = asked.model.cfg, asked.corrupted_tokens.shape[-1]
    heads = cfg.n_heads
    # 2.16 patches as many key and value heads as query heads.
    if installed() >= Version("2.17.dev0") and asked.activation_name in ("k", "v"):
        heads = cfg.n_key_value_heads or heads
    sizes = {"layer": cfg.n_layers, "head": heads, "head_index": heads}
    lengths = [sizes.get(axis, length) for axis in asked.index_axis_names or ()]
    yield from map(list, itertools.product(*map(range, lengths)))


def _patch(
    activation: torch.Tensor,
    hook: HookPoint,
    patch_setter: Callable[..., T],
    index: list[int],
    clean: torch.Tensor,
) -> T:
    """Patch an activation at an index, like TransformerLens's hook."""
    if activation.requires_grad:  # a patch_setter may edit it in place
        activation = activation.clone()
    return patch_setter(activation, index, clean)


def _patched(hooks: Hooks) -> list[tuple[object, object]]:
    """Return the hook point and the index of each patching hook."""
    return [(name, getattr(hook, "keywords", {}).get("index")) for name, hook in hooks]


class _Swept:
    """Stands in for the model in TransformerLens's loop; its outputs are the sweep's results."""

    def __init__(
        self, model: Model, runs: Iterator[Hooks], results: Iterator[torch.Tensor]
    ) -> None:
        self._model, self._runs, self._results = model, runs, results

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # TransformerLens checks the model with isinstance
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run_with_hooks(self, tokens: torch.Tensor, fwd_hooks: Hooks) -> torch.Tensor:
        """Return the logits of the sweep's next run, which must be the run with these hooks.

        Raises:
            RuntimeError: if that run patched another hook point or index.
        """
        result = next(self._results)
        asked, given = _patched(fwd_hooks), _patched(next(self._runs))
        if asked != given:
            raise RuntimeError(
                f"TransformerLens patches {asked} here, but the sweep has patched {given}: call "
                "this function within `with tl_devicefix.disabled():`"
            )
        return result
