"""Runs of one model on the same tokens, each with hooks of its own; `transformer_lens.patching`.

A run starts at the first block that it may change, from the residual stream of the unpatched run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import transformers.utils.logging as hf_logging
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint
from transformer_lens.patching import utils

from tl_devicefix.adapters import Adapter, adapter_of, is_model
from tl_devicefix.dispatch.carrying import BlockOutput, change_stream, move, output_of, skipping
from tl_devicefix.fusing.listening import HOOKS
from tl_devicefix.misspelt import check_iterable, shown, which_hook_point
from tl_devicefix.monkeypatch.patch import LIBRARIES, package_of, patches
from tl_devicefix.pipelining.pipeline_map import (
    ONE_AT_A_TIME,
    WeightsSnapshot,
    pipeline_map,
    refuse_arguments,
)
from tl_devicefix.placement.placement import placement_of
from tl_devicefix.types import Model

T = TypeVar("T")
Hooks = Sequence[tuple[str | Callable[..., Any], Callable[..., Any]]]
"""Pairs of a hook point's name, or a function of names, and the hook, as `run_with_hooks` takes."""
Tokens = torch.Tensor | str | list[str]


def sweep(
    model: Model, tokens: Tokens, runs: Iterable[Hooks], *, progress: bool = False, **arguments: Any
) -> Generator[Any, None, None]:
    """Yield `model.run_with_hooks(tokens, fwd_hooks=run, **arguments)` for each run, in order.

        runs = ([(f"blocks.{layer}.hook_resid_pre", ablate)] for layer in range(80))
        for logits in tl_devicefix.sweep(model, tokens, runs):
            ...

    The results are the same, bit for bit, and come sooner. Each run starts at the first block
    that its hooks change, from the residual stream of the unpatched run. On several devices,
    several runs are under way. A sweep over all layers in turn runs half of the blocks. A run
    starts no later than at a block that has other hooks (permanent or not, PyTorch's too), or a
    module that is not TransformerLens's, such as an SAE. It starts at the first block

    - if there is one on the embedding;
    - if autograd is on and a parameter of a skipped block needs a gradient (so use
      `torch.no_grad()`);
    - if you pass a KV cache or another argument that a run changes;
    - for Bridges in training mode, or of an architecture whose blocks may pass more than the
      residual stream to each other.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        tokens: as its `run_with_hooks` takes them. They and the model (weights, buffers, modules,
            settings, hooks) may not change until the last run has ended.
        runs: lists of (name, hook), read no further than needed. Hooks may read the model, but
            neither run nor hook it.
        progress: show a bar.
        arguments: of the forward: `return_type`, `stop_at_layer`, `attention_mask`...

    Yields:
        What `run_with_hooks` returns for each run: by default logits `[batch, pos, d_vocab]`.

    Raises:
        TypeError: for a model of neither class, `runs` that are no iterable, and an argument that
            does not exist.
        ValueError: for a run that is no list of hooks, or a hook point that the model lacks.
        RuntimeError: if a parameter, or a hook on one of the model's hook points, was changed
            between two runs; if a hook runs or hooks the model.
    """
    adapter_of(model)  # raises for anything but a model
    check_iterable("runs", runs)
    refuse_arguments(sweep, model.run_with_hooks, model, arguments)
    runs = _checked(runs, model, progress)

    first_block = _FirstBlock(model, tokens, arguments)
    streams = _ResidualStreams(model, tokens, arguments)

    # The caller's thread reads this, so the unpatched run goes on there, not in a run in flight.
    def starts() -> Iterator[tuple[Hooks, int, BlockOutput | None]]:
        for run in runs:
            first = first_block.of(run)
            yield run, first, streams.before(first) if first else None

    def run_from(view: Model, start: tuple[Hooks, int, BlockOutput | None]) -> object:
        hooks, first, residual_stream = start
        with skipping(getattr(view, "blocks", ()), first, residual_stream):
            return view.run_with_hooks(tokens, fwd_hooks=list(hooks), **arguments)

    return pipeline_map(model, run_from, starts())


def _checked(runs: Iterable[Hooks], model: Model, progress: bool) -> Iterator[Hooks]:
    """Yield the hooks of each run, checked."""
    # Here, because TransformerLens 3's Bridge ignores unknown names; and once, because a Bridge
    # makes this dict at each look.
    points = model.hook_dict
    for run in hf_logging.tqdm(runs, desc="Sweep", disable=not progress):
        hooks = list(run)
        for item in hooks:
            if not isinstance(item, (tuple, list)) or len(item) != 2 or not callable(item[1]):
                raise ValueError(
                    f"a run must be a list of (name, function), but {shown(item)} in {shown(run)} "
                    "is none"
                )
            if isinstance(item[0], str) and item[0] not in points:
                raise ValueError(
                    f"this model has no hook point {item[0]!r}: take a name of model.hook_dict"
                    f"{which_hook_point(item[0], points)}"
                )
        yield hooks


# Arguments of a forward on which the residual stream depends.
_INPUTS = ("attention_mask", "padding_side", "position_ids", "prepend_bos")
# Arguments with which a run may start at any block; not a KV cache, because each run changes it.
_KNOWN = {*_INPUTS, "labels", "loss_per_token", "return_type", "stop_at_layer"}
_KNOWN |= {"clear_contexts", "remove_batch_dim"}

# Their modules do the same in each run, but for `_UNSTEADY`. A Bridge's layers are transformers'.
_LIBRARIES = (*LIBRARIES, "bitsandbytes", "peft")
_UNSTEADY = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)


class _FirstBlock:
    """Finds the first block that a run may change; block 0 if in doubt.

    Blocks below it

    - have no hook, of the run or of anyone else;
    - contain nothing that may act differently in another run;
    - are on the way of no gradient.
    """

    def __init__(self, model: Model, tokens: Tokens, arguments: dict[str, Any]) -> None:
        self._model = model
        self._inputs = (tokens, *arguments.values())
        self._adapter = adapter_of(model)
        self._n_steady: dict[bool, int] = {}  # by grad mode, which may change between runs
        self._last = 0
        if set(arguments) <= _KNOWN and _is_known(model, self._adapter):
            self._last = len(range(len(model.blocks))[: arguments.get("stop_at_layer")])

    def of(self, hooks: Hooks) -> int:
        """Return the first block that a run with these hooks may change; if none, their number."""
        first = min([self._last, *_layers(self._model, hooks)] if self._last else [0])
        if first == 0 or _has_any_global_hook() or any(map(_needs_gradient, self._inputs)):
            return 0
        grad = torch.is_grad_enabled()
        if grad not in self._n_steady:  # once, because hooks on the model do not change meanwhile
            self._n_steady[grad] = self._steady_blocks()
        return min(first, self._n_steady[grad])

    def _steady_blocks(self) -> int:
        """Return the number of blocks from the first on that do the same in each run."""
        if any(map(self._may_differ, _beside_blocks(self._model))):
            return 0
        for index, block in enumerate(self._model.blocks):
            if any(map(self._may_differ, block.modules())):
                return index
        return len(self._model.blocks)

    def _may_differ(self, module: nn.Module) -> bool:
        """Return True if a module may act differently in another run, or somebody watches it."""
        attributes = vars(module)
        hooks = (hook for name in HOOKS for hook in attributes[name].values())
        if any(_is_of_user(module, hook) for hook in hooks):
            return True
        if any(map(_needs_gradient, module._parameters.values())):
            return True
        if module is self._model:  # `_is_known` has checked it, and allows a user's subclass
            return False
        if package_of(type(module)) not in _LIBRARIES or attributes.get("_compiled_call_impl"):
            return True
        # An instance's own forward is by an `Around`, by accelerate, or by the user.
        by_library = package_of(type(attributes.get("forward"))) == "tl_devicefix"
        if "forward" in attributes and not by_library and "_hf_hook" not in attributes:
            return True
        return module.training and (self._adapter.has_dropout or isinstance(module, _UNSTEADY))


def _needs_gradient(value: object) -> bool:
    """Return True if autograd is recording what is done with a tensor."""
    return isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


def _is_known(model: Model, adapter: Adapter) -> bool:
    """Return True if blocks run as in TransformerLens, and pass on the residual stream alone."""
    if not adapter.passes_stream_alone(model):
        return False
    base = next(cls for cls in type(model).__mro__ if package_of(cls) == "transformer_lens")
    return not any(
        name in vars(model) or getattr(type(model), name) is not getattr(base, name)
        for name in adapter.run_methods
    )


def _layers(model: Model, hooks: Hooks) -> Iterator[int]:
    """Yield the first block that could see the effect of each hook."""
    points = model.hook_dict
    for names, _ in hooks:
        for name in [names] if isinstance(names, str) else filter(names, points):
            yield _layer(model, name)
            # Also by the hook point's own name, because a Bridge has aliases for names.
            yield _layer(model, getattr(points.get(name), "name", None) or name)


def _layer(model: Model, name: str) -> int:
    part, _, rest = name.partition(".")
    if part in ("ln_final", "unembed"):
        return len(model.blocks)
    index = rest.partition(".")[0]
    return int(index) if part == "blocks" and index.isdecimal() else 0


def _beside_blocks(model: Model) -> Iterator[nn.Module]:
    """Yield the modules that run before the first block, or around all blocks."""
    seen = {*model.blocks, *(getattr(model, name, None) for name in ("ln_final", "unembed"))}
    for root in (model, getattr(model, "original_model", None) or model):
        for _, module in nn.Module.named_modules(root, seen):
            yield module


def _is_of_user(module: nn.Module, hook: object) -> bool:
    """Return True if a PyTorch hook is neither this package's nor a library's own."""
    package = package_of(hook)
    if package == "tl_devicefix":
        return False
    # On a hook point, TransformerLens's own functions call a user's.
    return isinstance(module, HookPoint) or package not in _LIBRARIES


class _ResidualStreams:
    """The outputs of a model's blocks in the unpatched run, computed when they are asked for.

    It goes on from the last one, so runs in the order of their layers compute each block once. Each
    output is on the device of the block that takes it.
    """

    def __init__(self, model: Model, tokens: Tokens, arguments: dict[str, Any]) -> None:
        self._model, self._tokens = model, tokens
        self._inputs = {name: value for name, value in arguments.items() if name in _INPUTS}
        self._layer = 0
        self._last: BlockOutput | None = None  # the block before's: [batch, pos, d_model]
        self._weights: WeightsSnapshot | None = None

    def before(self, layer: int) -> BlockOutput | None:
        """Return the output of the block before `layer` (1 or more), in that block's own form."""
        if self._weights is None:
            self._weights = WeightsSnapshot(self._model)
        elif (name := self._weights.changed()) is not None:
            raise RuntimeError(
                f"{name} was changed between two runs of a sweep, which share what the blocks "
                f"before their hooks return: change a copy of it in a hook, or {ONE_AT_A_TIME}"
            )
        if layer < self._layer:
            self._layer, self._last = 0, None
        if layer > self._layer:
            self._layer, self._last = layer, self._go_on(layer)
        return self._last

    def _go_on(self, stop: int) -> BlockOutput:
        blocks = self._model.blocks
        with skipping(blocks, self._layer, self._last):
            output = output_of(
                blocks[stop - 1], lambda: self._model.forward(self._tokens, **self._inputs)
            )
        placement = placement_of(self._model)
        if placement is None or stop == len(blocks):
            return output
        # Moved here, and not in each run, because all runs that start at this block read it.
        device = placement.read_at(f"blocks.{stop}")
        return change_stream(output, lambda stream: move(stream, device))


# --------------------------------------------------------------------------------------------
# `transformer_lens.patching`: TransformerLens's own function runs, with its progress, metrics and
# shapes; only the model that it is given is another, which hands out the sweep's results in turn.


@patches(
    None,
    takes="model corrupted_tokens clean_cache patching_metric patch_setter activation_name "
    "index_axis_names index_df",
    why="each run starts at the block that it patches; several are under way on several devices",
)
def generic_activation_patch(original: Callable[..., T], *args: object, **kwargs: object) -> T:
    """See TransformerLens's, and its `get_act_patch_*`. Each run starts at the block it patches."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    asked = SimpleNamespace(**call.arguments)
    if not is_model(asked.model):  # such as a stand-in in a test
        return original(*args, **kwargs)
    # TransformerLens 2.16 counts as many heads of keys and values as of queries.
    knows_groups = "n_key_value_heads" in original.__code__.co_names

    def runs() -> Iterator[Hooks]:
        if getattr(asked, "baseline", False):
            yield []
        for index in _indices(asked, knows_groups):
            name = utils.get_act_name(asked.activation_name, layer=index[0])
            clean = asked.clean_cache[name]
            hook = functools.partial(
                _patch, patch_setter=asked.patch_setter, index=index, clean=clean
            )
            yield [(name, hook)]

    started, swept = itertools.tee(runs())
    with contextlib.closing(sweep(asked.model, asked.corrupted_tokens, started)) as results:
        # `runs` alone reads the clean cache.
        stand_ins = {"model": _Swept(asked.model, swept, results), "clean_cache": defaultdict(list)}
        call.arguments |= stand_ins
        return original(*call.args, **call.kwargs)


def _indices(asked: SimpleNamespace, knows_groups: bool) -> Iterator[list[int]]:
    """Yield TransformerLens's patching indices in its order: the layer, and the place in it."""
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


def _patch(
    activation: torch.Tensor,
    hook: HookPoint,
    patch_setter: Callable[..., T],
    index: list[int],
    clean: torch.Tensor,
) -> T:
    """Patch an activation at an index, like TransformerLens's hook."""
    if activation.requires_grad:  # because TransformerLens 2 changes it in place
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
    def __class__(self) -> type:  # because TransformerLens asks if it is a module
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run_with_hooks(self, tokens: torch.Tensor, fwd_hooks: Hooks) -> torch.Tensor:
        """Return the logits of the next run, whose hooks have to patch what these patch.

        Raises:
            RuntimeError: if they patch another place, because results are taken in order.
        """
        result = next(self._results)
        asked, given = _patched(fwd_hooks), _patched(next(self._runs))
        if asked != given:
            raise RuntimeError(
                f"TransformerLens patches {asked} here, but the sweep has patched {given}: call "
                "this function within `with tl_devicefix.disabled():`"
            )
        return result
