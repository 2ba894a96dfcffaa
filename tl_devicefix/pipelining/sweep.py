"""Runs of one model on the same tokens, each with its own hooks.

A run starts at the first block that it may change, from the residual stream of the unpatched run.
Several runs may be one batch.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import operator
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers.utils.logging as hf_logging
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint

from tl_devicefix.adapters import Adapter, adapter_of
from tl_devicefix.around import innermost
from tl_devicefix.dispatch.carrying import (
    BlockOutput,
    Skipping,
    change_stream,
    move,
    run_blocks,
    stream_of,
)
from tl_devicefix.dispatch.mixing import tensor_bytes
from tl_devicefix.dispatch.naming import each_module
from tl_devicefix.dispatch.views import hooked_points
from tl_devicefix.errors import note, shown
from tl_devicefix.fusing.listening import hooks_of, relay_hooks
from tl_devicefix.monkeypatch.patch import package_of
from tl_devicefix.pipelining.batches import Batch, Hooks, Tokens, check_repeatable
from tl_devicefix.pipelining.launching import launch_all, may_launch_ahead
from tl_devicefix.pipelining.pipeline_map import (
    STEADY_LIBRARIES,
    ModelSnapshot,
    checking_at_end,
    is_users_hook,
    n_in_flight,
    refuse_arguments,
    run_all,
)
from tl_devicefix.placement.devices import CPU
from tl_devicefix.placement.elsewhere import is_elsewhere
from tl_devicefix.placement.memory import is_out_of_memory
from tl_devicefix.placement.placement import placement_of
from tl_devicefix.types import Model

MAX_KEPT_BYTES = 2**29
"""The most bytes of unpatched residual streams that a sweep keeps, besides the one in use."""

_Start = tuple[int, list[Hooks], int, BlockOutput | None]
"""The first run's number, the runs' hooks, the block where they start, and its input."""


def sweep(
    model: Model,
    tokens: Tokens,
    runs: Iterable[Hooks],
    *,
    batch_size: int = 1,
    progress: bool = False,
    **arguments: Any,
) -> Generator[Any, None, None]:
    """Yield `model.run_with_hooks(tokens, fwd_hooks=run, **arguments)` for each run, in order.

        runs = ([(f"blocks.{layer}.hook_resid_pre", ablate)] for layer in range(80))
        for logits in tl_devicefix.sweep(model, tokens, runs, batch_size=16):
            ...

    The results are the same and come sooner. Each run starts at the first block that its hooks
    change, from the residual stream of the unpatched run, so a sweep of all layers runs half the
    blocks. On n devices, up to n + 1 forwards have been launched when you get the first result, and
    each device computes a different one; a hook that reads a value (`.item()`, `print`) waits for
    its run, and so do later runs.

    A run starts earlier if an earlier block has

    - another hook, permanent or not, PyTorch's too;
    - a module of no known library, such as an SAE;
    - with autograd on, a parameter that needs a gradient (so use `torch.no_grad()`).

    It starts at block 0

    - if the embedding has any of these;
    - if you pass a KV cache, or an argument that `sweep` does not know;
    - for Bridges in training mode, or of an architecture whose blocks may pass more than the
      residual stream to each other.

    **Batches.** With `batch_size=16`, sixteen runs are one forward with sixteen times the rows; it
    starts at the first block that any of them changes. A hook sees its own run's rows, and may edit
    them in place, return a tensor of their shape, or return None. The hooks of all runs are called
    at one hook point before the next, so what hooks share, such as a dict, must be the run's own;
    `hook.ctx` is a copy for the run. Permanent hooks, and modules that are not TransformerLens's,
    see the whole batch once. Results equal those of `batch_size=1` up to rounding, not bit for bit;
    with dropout, a batch draws other random numbers. A batch takes the memory of a forward of that
    many prompts. Its results are parts of one tensor and one graph: clone a result to keep it
    alone, and differentiate them together.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        tokens: as its `run_with_hooks` takes them. Do not change them, or the model (weights,
            buffers, modules, settings, hooks), until the last run has ended.
        runs: lists of (name, hook). A list of runs is checked and copied at the start; anything
            else is read no further than needed. Hooks may read the model. Across hosts, or with
            offloaded blocks on several devices, each run has its own thread, and hooks may neither
            run nor hook the model, draw torch's random numbers, nor call `backward`.
        batch_size: how many runs are one forward.
        progress: show a bar.
        arguments: of the forward: `return_type`, `stop_at_layer`, `attention_mask`...

    Yields:
        What `run_with_hooks` returns for each run: by default logits `[batch, pos, d_vocab]`.

    Raises:
        TypeError: for a model of neither class, `tokens` of several batches, `runs` that cannot
            be iterated over, and an argument that does not exist.
        ValueError: for a run that is not a list of hooks, a hook point that the model lacks, a
            variable of the generator `runs` that changes before the hooks that refer to it have
            run, and `reset_hooks_end=False`. In batches, also for an argument that cannot be
            repeated, a hook point whose first dimension is not the batch, and a hook that returns
            another shape.
        RuntimeError: if a parameter, or a hook on one of the model's hook points, was changed
            between two runs, or if `runs` is a generator, after the last one; if a hook does what
            it may not where each run has a thread.
    """
    adapter_of(model)  # raises for anything but a model
    texts = tokens if isinstance(tokens, list) else [tokens]
    if not isinstance(tokens, torch.Tensor) and not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"tokens must be a tensor, a text or a list of texts, but is {shown(tokens)}: for "
            "several batches, call sweep for each"
        )
    refuse_arguments(sweep, model.run_with_hooks, model, arguments)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an int of 1 or more, but is {shown(batch_size)}")
    if arguments.pop("reset_hooks_end", True) is not True:
        raise ValueError("sweep removes the hooks of each run: leave out reset_hooks_end")
    if batch_size > 1:
        check_repeatable(arguments)
        if len(texts) == 1 and not isinstance(tokens, torch.Tensor):
            # A Bridge pads several texts, which gives one text that is repeated another mask.
            given = {"padding_side", "prepend_bos"} & arguments.keys()
            tokens = model.to_tokens(tokens, **{name: arguments[name] for name in given})
    return _sweep(model, tokens, runs, batch_size, progress, arguments)


def _sweep(
    model: Model,
    tokens: Tokens,
    runs: Iterable[Hooks],
    batch_size: int,
    progress: bool,
    arguments: dict[str, Any],
) -> Generator[Any, None, None]:
    placement = placement_of(model)
    if placement is not None and isinstance(tokens, torch.Tensor):
        tokens = tokens.to(placement.home)  # once: the host waits for a copy from the CPU
    # A Bridge rebuilds this dict on each access.
    # TransformerLens 3.9's has modules in place of hook points, too.
    points = {k: point for k, point in model.hook_dict.items() if isinstance(point, HookPoint)}
    hooked = hooked_points(points.values())
    first_block = _FirstBlock(model, points, tokens, arguments)
    checked: Iterable[Hooks] = map(partial(_checked, points), itertools.count(), runs)
    last_first = first_block.of(())  # the last block at which a run may start
    if isinstance(runs, (list, tuple)):
        checked = list(checked)
        firsts = list(map(first_block.of, checked))
        groups = (firsts[i : i + batch_size] for i in range(0, len(firsts), batch_size))
        last_first = max(map(min, groups), default=0)
    streams = _ResidualStreams(model, tokens, arguments, last_first)
    skipping_by_model: dict[nn.Module, Skipping] = {}  # by the model, or a run's view of it

    n_ahead = n_in_flight(model, None)
    # Remote and offloaded blocks keep a thread waiting, so with these each run has a thread.
    waits = placement is not None and (
        any(map(is_elsewhere, placement.devices)) or CPU in placement.memories
    )

    # The caller's thread iterates over this, so the unpatched blocks run there.
    def starts() -> Iterator[_Start]:
        total = operator.length_hint(runs) or None
        bar = iter(hf_logging.tqdm(checked, desc="Sweep", total=total, disable=not progress))
        variables = _Variables(runs, n_ahead if waits else 1)
        for number in itertools.count(0, batch_size):
            group: list[Hooks] = []
            for run in itertools.islice(bar, batch_size):
                variables.add(number + len(group), run)
                group.append(run)
            variables.check()
            if not group:
                return
            first = min(map(first_block.of, group))
            stream = streams.before(first) if first else None
            yield number, group, first, stream

    def run_from(view: Model, start: _Start) -> list[Any]:
        number, group, first, stream = start
        if view not in skipping_by_model:
            skipping_by_model[view] = Skipping(getattr(view, "blocks", ()))
        n_runs = len(group)
        try:
            with skipping_by_model[view].until(first, stream, n_runs):
                if n_runs > 1:
                    return Batch(tokens, group, points, arguments).run(view)
                run = view.run_with_hooks
                names = [name for name, _ in group[0] if isinstance(name, str)]
                if first and view is model and len(names) == len(group[0]):
                    within = _WithPoints(model, points, names, hooked)
                    run = types.MethodType(type(view).run_with_hooks, within)
                return [run(tokens, fwd_hooks=list(group[0]), **arguments)]
        except Exception as error:
            last = f" to {number + n_runs - 1}" if n_runs > 1 else ""
            note(error, f"this error is from run {number}{last} of the sweep")
            if n_runs > 1 and is_out_of_memory(error):
                note(error, f"{n_runs} runs are one batch: lower batch_size={batch_size}")
            raise

    snapshot, number = ModelSnapshot(model), 0
    last = len(runs) - 1 if isinstance(runs, (list, tuple)) else None
    if waits or placement is None or n_ahead == 1 or not may_launch_ahead(model, placement.home):
        results = run_all(model, run_from, starts(), n_ahead if waits else 1)
    else:
        results = launch_all(model, placement.home, run_from, starts(), n_ahead)

    def check_all() -> None:
        if number - 1 != last:  # otherwise it was checked before the last result
            snapshot.check(number, is_last=True)

    with contextlib.closing(results), checking_at_end(check_all):
        for group_results in results:
            for result in group_results:
                snapshot.check(number, is_last=number == last)
                number += 1
                yield result


class _WithPoints:
    """A model for a `run_with_hooks` that finds only some of its hook points.

    A Bridge builds the dict of all hook points, and of their aliases, twice in each run, and a
    HookedTransformer looks at each for hooks to remove. For 80 blocks, this takes much of a run
    that skips most of them. Hooks get the model itself.

    `names` are those that the run hooks, of all `points`. `hooked` had hooks before: the first run
    removes what an earlier run left.
    """

    def __init__(
        self,
        model: Model,
        points: dict[str, HookPoint],
        names: list[str],
        hooked: list[HookPoint],
    ) -> None:
        canonical = [points[name].name or name for name in names]
        used = {name: points[name] for name in (*names, *canonical) if name in points}
        vars(self).update(hook_dict=used, mod_dict=used, _model=model)
        vars(self)["hook_points"] = lambda: [*used.values(), *hooked]

    def __getattr__(self, name: str) -> object:
        if name in ("hooks", "reset_hooks", "remove_all_hook_fns"):  # of a HookedTransformer
            return types.MethodType(getattr(type(self._model), name), self)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._model, name, value)


def _checked(points: Mapping[str, HookPoint], number: int, run: Hooks) -> Hooks:
    """Return the hooks of a run, checked: TransformerLens 3's Bridge ignores unknown names."""
    if isinstance(run, tuple) and len(run) == 2 and callable(run[1]):
        raise ValueError(
            f"run {number} is a tuple (name, function): put it into a list, "
            "[[(name, function)], ...]"
        )
    hooks = list(run) if isinstance(run, Iterable) else [run]
    for item in hooks:
        if not isinstance(item, (tuple, list)) or len(item) != 2 or not callable(item[1]):
            raise ValueError(
                f"run {number} must be a list of (name, function), but has {shown(item)} in "
                f"{shown(run)}"
            )
        if isinstance(item[0], str) and item[0] not in points:
            raise ValueError(
                f"this model has no hook point {item[0]!r}: take a name of model.hook_dict"
            )
    return hooks


class _Variables:
    """The variables of a generator of runs that hooks refer to, while these have not run.

    A loop calls the hooks of a run before the generator goes on and changes its variables. Here,
    `n_groups` of runs may be read before the first of them has ended.
    """

    def __init__(self, runs: Iterable[Hooks], n_groups: int) -> None:
        self._names = runs.gi_code.co_cellvars if inspect.isgenerator(runs) else ()
        # Of each group: the run's number, and a variable's name, cell and value
        self._groups = deque[list[tuple[int, str, types.CellType, object]]]([[]], n_groups)

    def add(self, number: int, hooks: Hooks) -> None:
        """Note the variables that the hooks of a run refer to, also by a function within them."""
        if not self._names:
            return
        functions: list[object] = [getattr(part, "func", part) for item in hooks for part in item]
        for function in functions:  # the list grows in the loop
            if not isinstance(function, types.FunctionType):
                continue
            cells = function.__closure__ or ()
            values = [*map(_contents_of, cells), *(function.__defaults__ or ())]
            new = (it for it in values if type(it) is types.FunctionType and it not in functions)
            functions += new
            for name, cell, value in zip(function.__code__.co_freevars, cells, values):
                if name in self._names:
                    self._groups[-1].append((number, name, cell, value))

    def check(self) -> None:
        """Raise if one has another value now; runs that are added later are the next group."""
        for number, name, cell, value in itertools.chain.from_iterable(self._groups):
            if _contents_of(cell) is not value:
                raise ValueError(
                    f"a hook of run {number} refers to {name}, which changed before the run began: "
                    f"give the hook its value, such as lambda activation, hook, {name}={name}: ..."
                )
        self._groups.append([])


def _contents_of(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned
        return None


# Arguments of a forward on which the residual stream depends.
_INPUTS = ("attention_mask", "padding_side", "position_ids", "prepend_bos")
# Arguments with which a run may start at any block. A KV cache is not one: each run changes it.
_KNOWN = {*_INPUTS, "labels", "loss_per_token", "return_type", "stop_at_layer"}
_KNOWN |= {"clear_contexts", "remove_batch_dim"}

# Modules of `STEADY_LIBRARIES` that do not do the same in each run.
_UNSTEADY = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)


class _FirstBlock:
    """Finds the first block that a run may change; block 0 if in doubt.

    Blocks below it

    - have no hook of the user's, neither the run's nor another;
    - contain nothing that may behave differently in another run;
    - record nothing for autograd.
    """

    def __init__(
        self,
        model: Model,
        points: dict[str, HookPoint],
        tokens: Tokens,
        arguments: dict[str, Any],
    ) -> None:
        self._model, self._points = model, points
        self._inputs = (tokens, *arguments.values())
        self._adapter = adapter_of(model)
        self._n_steady: dict[bool, int] = {}  # by grad mode, which may change between runs
        self._last = 0
        if set(arguments) <= _KNOWN and _is_known(model, self._adapter):
            self._last = len(range(len(model.blocks))[: arguments.get("stop_at_layer")])

    def of(self, hooks: Hooks) -> int:
        """Return the first block that these hooks may change; if none, the number of blocks."""
        first = min([self._last, *self._layers(hooks)] if self._last else [0])
        if first == 0 or _has_any_global_hook() or any(map(_needs_gradient, self._inputs)):
            return 0
        grad = torch.is_grad_enabled()
        if grad not in self._n_steady:  # once: hooks on the model do not change meanwhile
            self._n_steady[grad] = self._steady_blocks()
        return min(first, self._n_steady[grad])

    def _layers(self, hooks: Hooks) -> Iterator[int]:
        """Yield the first block that could see the effect of each hook."""
        for names, _ in hooks:
            for name in [names] if isinstance(names, str) else filter(names, self._points):
                yield _layer(self._model, name)
                # Use the hook point's own name too: a Bridge has aliases.
                yield _layer(self._model, getattr(self._points.get(name), "name", None) or name)

    def _steady_blocks(self) -> int:
        """Return how many blocks, from the first on, do the same in each run."""
        if any(map(self._may_differ, _beside_blocks(self._model))):
            return 0
        steady, seen = len(self._model.blocks), set[HookPoint]()
        for index, block in enumerate(self._model.blocks):
            modules = list(each_module(block))
            points = [module for module in modules if isinstance(module, HookPoint)]
            if not seen.isdisjoint(points):  # a block or a part is used twice
                return 0
            seen.update(points)
            if index < steady and any(map(self._may_differ, modules)):
                steady = index
        return steady

    def _may_differ(self, module: nn.Module) -> bool:
        """Return True if a module has a user's hook, or may behave differently in another run."""
        attributes = vars(module)
        if any(hooks := hooks_of(attributes)):
            relays = set(relay_hooks(module))
            others = (hook for each in hooks for key, hook in each.items() if key not in relays)
            if any(is_users_hook(isinstance(module, HookPoint), hook) for hook in others):
                return True
        if type(module) is HookPoint:
            return "forward" in attributes
        if any(map(_needs_gradient, module._parameters.values())):
            return True
        if module is self._model:  # `_is_known` has checked it, and allows a user's subclass
            return False
        is_compiled = attributes.get("_compiled_call_impl") is not None
        if is_compiled or package_of(type(module)) not in STEADY_LIBRARIES:
            return True
        # An instance's own forward is from an `Around`, from accelerate, or from the user.
        own = innermost(attributes.get("forward"))
        if own is not None and "_hf_hook" not in attributes:
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


class _ResidualStreams:
    """The outputs of a model's blocks in the unpatched run, computed when they are asked for.

    It keeps them, so that each block is computed once, in whatever order they are asked for. If all
    outputs take more than `MAX_KEPT_BYTES`, it keeps those of every second block, or every third,
    and so on, besides the one in use. Then a run may recompute the blocks after the last kept one.

    A forward costs more than its blocks, so the first one goes on to the last layer that will, or
    may, be asked for.
    """

    def __init__(self, model: Model, tokens: Tokens, arguments: dict[str, Any], last: int) -> None:
        self._model, self._tokens, self._last = model, tokens, last
        self._inputs = {name: value for name, value in arguments.items() if name in _INPUTS}
        self._blocks = list(getattr(model, "blocks", ()))
        self._skipping = Skipping(self._blocks)
        # Block -> the stream that it takes: [batch, pos, d_model]
        self._kept: dict[int, BlockOutput] = {}
        self._stride = 1
        self._asked = 0  # the block whose input is kept until the next one is asked for

    def before(self, layer: int) -> BlockOutput:
        """Return the output of block `layer - 1`, on the device of the next block, if any."""
        if layer not in self._kept:
            stop = max(layer, self._last) if self._stride == 1 else layer
            self._go_on(max(filter(layer.__gt__, self._kept), default=0), layer, stop)
        if self._asked != layer and self._asked % self._stride:
            del self._kept[self._asked]
        self._asked = layer
        self._kept[layer] = self._at_block(self._kept[layer], layer)
        return self._kept[layer]

    def _go_on(self, start: int, asked: int, stop: int) -> None:
        def keep(index: int, output: BlockOutput) -> None:
            layer, size = start + index + 1, tensor_bytes(stream_of(output))
            self._stride = max(1, math.ceil(len(self._blocks) * size / MAX_KEPT_BYTES))
            if layer == asked or layer % self._stride == 0:
                self._kept[layer] = output

        with self._skipping.until(start, self._kept.get(start)):
            run_blocks(
                self._blocks[start:stop],
                lambda: self._model.forward(self._tokens, **self._inputs),
                keep,
            )

    def _at_block(self, output: BlockOutput, layer: int) -> BlockOutput:
        placement = placement_of(self._model)
        if placement is None or layer == len(self._blocks):
            return output
        # Move it here, not in each run: all runs that start at this block read it.
        device = placement.read_at(f"blocks.{layer}")
        return change_stream(output, lambda stream: move(stream, device))
