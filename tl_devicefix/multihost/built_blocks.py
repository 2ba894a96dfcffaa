"""Blocks as a rank builds and runs them, for `blocks.py`.

Rank 0 describes a block, or the layer of a Bridge's: a pickle without tensors and hooks, of classes
and functions that all ranks have. Each command names the block's tensors, as its own are on meta.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attention.kv_cache import CacheOfBlock
from tl_devicefix.monkeypatch.exchanged import is_of_packages
from tl_devicefix.multihost.commands import exchanged
from tl_devicefix.simulation.geometry import Geometry, geometry_of

Arguments = list[Any]
"""Of a call: the block's own tensors, a dict of its inputs, and the attributes of its part of a KV
cache. A tensor in it is named by how many come before it."""
OURS = "_tl_devicefix"
_KEPT = {"training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
_NOT_KEPT = vars(nn.Module()).keys() - _KEPT


class _Unknown(Exception):
    """A block has something in it that other ranks may not have."""


class _Pickler(pickle.Pickler):
    """Describes a block without its tensors, and without what listens in it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.n_tensors = 0
        self.classes: set[type] = set()

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.Tensor):
            self.n_tensors += 1
            return "tensor"
        return "device" if isinstance(obj, torch.device) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) or (callable(obj) and hasattr(obj, "__qualname__")):
            if not is_of_packages(obj):
                raise _Unknown
            if isinstance(obj, type):
                self.classes.add(obj)
        elif isinstance(obj, HookPoint):
            return type(obj), ()
        elif isinstance(obj, nn.Module):
            if obj._compiled_call_impl is not None:
                raise _Unknown
            attributes = {
                name: value
                for name, value in vars(obj).items()
                if name not in _NOT_KEPT
                and (not name.startswith(OURS) or type(value) is str)  # marks, as "sdpa"
            }
            return _blank_module, (type(obj),), attributes, None, None, _set_attributes
        return NotImplemented


def _blank_module(cls: type[nn.Module]) -> nn.Module:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)


class _Unpickler(pickle.Unpickler):
    """Builds a block whose tensors are on meta."""

    def __init__(self, description: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(description))
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        return self._device if pid == "device" else torch.empty(0, device="meta")


def description(block: nn.Module) -> tuple[bytes | None, set[type]]:
    """Of what a rank builds a block, and the classes in it; None if other ranks cannot."""
    pickler = _Pickler(file := io.BytesIO())
    try:
        pickler.dump(block)
    except Exception:  # noqa: BLE001  # whatever somebody has put into it
        return None, set()
    # Each call fills a module's own tensors in, but no others.
    is_whole = pickler.n_tensors == len(slots_in(containers(block)))
    return file.getvalue() if is_whole else None, pickler.classes


def components(block: nn.Module) -> list[Any]:
    """A block and the modules in it, but for hook points."""
    return [module for module in block.modules() if type(module) is not HookPoint]


def containers(block: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a block and its components have their tensors, in order."""
    return [kind for module in components(block) for kind in (module._parameters, module._buffers)]


def slots_in(containers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Where in the dicts there is a tensor."""
    return [
        (items, name) for items in containers for name, item in items.items() if item is not None
    ]


class Trial(NamedTuple):
    """What running a block has shown.

    Attributes:
        output: how its output lies.
        new: shapes and dtypes of the keys and values that it has appended to its cache.
    """

    output: Geometry
    new: list[tuple[tuple[int, ...], torch.dtype]]


class Built:
    """A block that a rank has built of a description, for tensors of a device."""

    def __init__(self, description: bytes, device: torch.device) -> None:
        self._description, self._device = description, device
        self._blocks = [self._build()]

    def _build(self) -> Any:
        return _Unpickler(self._description, self._device).load()

    def run(self, arguments: Arguments, cache: CacheOfBlock | None) -> list[torch.Tensor]:
        """Run the block; return its output, and the keys and values that its cache has now."""
        tensors, inputs, attributes = arguments
        with self._with(tensors) as block:
            return _run(block, inputs, cache, attributes)

    def try_out(
        self, arguments: Arguments, cache: CacheOfBlock | None
    ) -> tuple[Trial | None, bool]:
        """Run the block and report; None if it cannot be run by one command.

        Also whether these very arguments have raised an error, so that others may fare better.
        """
        tensors, (inputs, attributes) = arguments[0], exchanged(arguments[1:], torch.clone)
        new: list[tuple[tuple[int, ...], torch.dtype]] = []
        with self._with(tensors) as block, self._random_numbers_kept() as state:
            buffers = _with_copies_of_buffers(block)
            before = _all_in(block), state()
            try:
                outputs = _run(block, inputs, cache, attributes, new)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # noqa: BLE001  # of an operation, which then fails by itself too
                return None, True
            after = _all_in(block), state()
            is_as_before = (
                len(before[0]) == len(after[0])
                and all(map(is_, before[0], after[0]))
                and torch.equal(before[1], after[1])
                and all(items[name] is copied for items, name, copied, _ in buffers)
                and all(torch.equal(copied, value) for *_, copied, value in buffers)
            )
        is_one = isinstance(outputs[0], torch.Tensor) and len(new) == (0 if cache is None else 2)
        return (Trial(geometry_of(outputs[0]), new) if is_as_before and is_one else None), False

    @contextlib.contextmanager
    def _random_numbers_kept(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Put the device's random numbers back; gives what tells their state."""
        kind, index = self._device.type, self._device.index
        if kind == "cpu":
            with torch.random.fork_rng([]):
                yield torch.get_rng_state
        else:
            with torch.random.fork_rng([index], device_type=kind):
                yield functools.partial(torch.get_device_module(kind).get_rng_state, index)

    @contextlib.contextmanager
    def _with(self, tensors: Sequence[torch.Tensor]) -> Iterator[nn.Module]:
        """The block, with these tensors."""
        try:
            block = self._blocks.pop()
        except IndexError:  # another thread runs it
            block = self._build()
        slots = slots_in(containers(block))
        blanks = [container[name] for container, name in slots]
        try:
            for (container, name), tensor in zip(slots, tensors, strict=True):
                container[name] = tensor
            yield block
        finally:
            for (container, name), blank in zip(slots, blanks):
                container[name] = blank
            self._blocks.append(block)


def _with_copies_of_buffers(block: nn.Module) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Put copies in the place of buffers; returns where, the copies, and what they are of."""
    slots = slots_in([module._buffers for module in components(block)])
    copied = [(items, name, items[name].clone(), items[name]) for items, name in slots]
    for items, name, copy, _ in copied:
        items[name] = copy
    return copied


def _all_in(block: nn.Module) -> list[Any]:
    """What modules have, but for what this package notes there."""
    items = (item for module in block.modules() for item in vars(module).items())
    return [value for name, value in items if not name.startswith(OURS)]


def _run(
    block: nn.Module,
    inputs: dict[str, Any],
    cache: CacheOfBlock | None,
    attributes: dict[str, Any],
    new: list[Any] | None = None,
) -> list[torch.Tensor]:
    if cache is None:
        return [block(**inputs)]
    entry = entry_with(cache.classes[0], attributes)
    grow = getattr(entry, cache.grow)

    def note_and_grow(keys: torch.Tensor, values: torch.Tensor, *args: Any) -> Any:
        assert new is not None
        new.extend((tuple(item.shape), item.dtype) for item in (keys, values))
        return grow(keys, values, *args)

    if new is not None:
        vars(entry)[cache.grow] = note_and_grow
    argument = entry if cache.as_argument is None else cache.as_argument(entry)
    output = block(**inputs, **{cache.argument: argument})
    return [output, *(tensor for _, tensor in changed(entry, cache, attributes))]


def entry_with(cls: Any, attributes: dict[str, Any]) -> Any:
    """A part of a KV cache, with these attributes."""
    entry = object.__new__(cls)
    vars(entry).update(attributes)
    return entry


def changed(entry: Any, cache: CacheOfBlock, attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and tensors of keys and values that are others now."""
    tensors = ((name, getattr(entry, name)) for name in cache.names)
    return [(name, tensor) for name, tensor in tensors if tensor is not attributes[name]]


class Graph:
    """A forward of a block, and its graph, for gradients of some of its arguments' tensors.

    Attributes:
        outputs: of the forward, as `Built.run` returns them.
    """

    def __init__(
        self, built: Built, arguments: Arguments, cache: CacheOfBlock | None, which: Sequence[int]
    ) -> None:
        numbers, self._leaves = itertools.count(), dict[int, torch.Tensor]()

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            if (number := next(numbers)) in which:
                tensor = self._leaves[number] = tensor.detach().requires_grad_()
            return tensor

        own = exchanged(arguments, leaf)
        with torch.enable_grad():
            self._outputs = built.run(own, cache)
        # What others have of it may be changed in place.
        self.outputs = [
            output.detach() if _is_a_sum(output) else output.detach().clone()
            for output in self._outputs
        ]

    def backward(
        self, gradients: Sequence[torch.Tensor | None], which: Sequence[int], keeps: bool = False
    ) -> list[torch.Tensor]:
        """Gradients of some of the leaves; it keeps the graph for another backward."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(self._outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        return list(
            torch.autograd.grad(
                [output for output, _ in pairs],
                [self._leaves[number] for number in which],
                [gradient for _, gradient in pairs],
                retain_graph=keeps,
                materialize_grads=True,
            )
        )


def _is_a_sum(output: torch.Tensor) -> bool:
    """Whether an output's gradient does not need the output."""
    return output.grad_fn is not None and output.grad_fn.name() == "AddBackward0"
