"""Blocks that a rank runs whole: one command, where each of their operations would be one.

The rank holds a copy of the block, whose weights are the very storages that the block has there.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tl_devicefix.multihost.caching import Key, Layout
from tl_devicefix.multihost.classes import exchanged_functions
from tl_devicefix.multihost.commands import Stored
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.pickling import Unpickler, pickled
from tl_devicefix.multihost.snapshots import Snapshot, has_forward_within, tensors_of
from tl_devicefix.multihost.trials import Trial, laid_out, tried
from tl_devicefix.simulation.geometry import Geometry, geometry_of
from tl_devicefix.simulation.machine import Machine
from tl_devicefix.simulation.tensor import SimTensor, wrap

_log = logging.getLogger(__name__)


class OutsideBlocks:
    """Of a mode for torch functions: it changes nothing that is computed within a block.

    Whatever else it does there, it need not: blocks run whole within it.
    """


class HeldCopy:
    """A copy of a block, which its rank has: one for all blocks that are the same, as of views.

    Args:
        machine: to which the devices of all ranks belong.
        device: where the block is.
        told: the block, as bytes.
        kept: its tensors, if they are rank 0's.

    Attributes:
        far: the devices of all ranks.
    """

    def __init__(
        self, machine: Machine, device: torch.device, told: bytes, kept: list[torch.Tensor]
    ) -> None:
        self.far = cast(FarDevices, machine.asynchronous)
        self._copies: dict[tuple[int, ...], Any] = {}
        self._machine, self._device = machine, device
        self._told, self._kept = told, kept
        self._trials: dict[Any, Trial | None] = {}
        self._layouts: dict[Any, Layout | None] = {}
        if self.rank:
            self._owner = self.far.owner(self.rank)
            self.far.hold(device.index, self._owner.number, told)

    def copy(self, points: tuple[int, ...] = ()) -> Any:
        """The copy of which these hook points are noted, if it is rank 0's.

        Another one for others: what listens in one thread must not be there for another's.
        """
        if points not in self._copies:
            here = self.far.places[self._device.index].device
            made = Unpickler(self._told, self._kept.__getitem__, here).load()
            self._copies.setdefault(points, made)
        return self._copies[points]

    @property
    def number(self) -> int:
        """By which another rank has it."""
        return self._owner.number

    @property
    def rank(self) -> int:
        """Whose device it is on."""
        return self.far.places[self._device.index].rank

    def wrapped(self, made: torch.Tensor) -> SimTensor:
        """What was computed there, on its device."""
        return wrap(made, self._machine, self._device)

    def trial(
        self,
        given: dict[str, Any],
        entry: tuple[Any, ...] | None,
        wanted: tuple[Key, ...],
        outputs: list[Geometry],
    ) -> Trial | None:
        """What it uses; None if it may not be run whole.

        Args:
            given: its arguments, as they are there.
            entry: class, keys, values of a KV cache's entry, and whether it is frozen.
            wanted: what asks for gradients.
            outputs: what it is to give.
        """
        key = tuple(map(_kind, given.values())), tuple(given), entry and entry[3], wanted
        if key not in self._trials:
            blanks = {name: _blank(each) for name, each in given.items()}
            past = None if entry is None else tuple(map(_blank, entry))
            self._trials[key] = tried(self._without_values, blanks, past, wanted, outputs)
        return self._trials[key]

    def layout(self, given: dict[str, Any], points: tuple[int, ...]) -> Layout | None:
        """How what it gives, and what hook points are called with, will lie; None if unknown.

        Args:
            given: its arguments, as they are there.
            points: which of its hook points.
        """
        of = (geometry_of(e) if isinstance(e, torch.Tensor) else e for e in given.values())
        key = points, tuple(given), tuple(of)
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            blanks = {name: _blank(each) for name, each in given.items()}
            self._layouts[key] = laid_out(self._without_values(), blanks, points)
        return self._layouts[key]

    def _without_values(self) -> nn.Module:
        def blank(there: Stored | int) -> torch.Tensor:
            if isinstance(there, int):
                return _blank(self._kept[there])
            return torch.empty_strided(there.shape, there.stride, dtype=there.dtype, device="meta")

        made: nn.Module = Unpickler(self._told, blank, torch.device("meta")).load()
        return made


_MOST_LAYOUTS = 64
"""Of a block: of so many lengths of a prompt."""


def _kind(value: Any) -> Any:
    """What there is to know of an argument but its length."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.shape[:1]
    return type(value)


def _blank(value: Any) -> Any:
    """A tensor without values; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class HeldBlock(NamedTuple):
    """A block, as its rank has a copy of it.

    Attributes:
        copy: its copy; None if it may not be run whole as it is.
        far: the devices of all ranks.
        device: where both are.
        seen: what was set in the block when it was copied.
        points: to which of its hook points caching hooks listen now.
    """

    copy: HeldCopy | None
    far: FarDevices
    device: torch.device
    seen: Snapshot
    points: tuple[int, ...] = ()

    @property
    def there(self) -> HeldCopy:
        """Its copy, of one that `held` gives."""
        assert self.copy is not None
        return self.copy


_held: WeakKeyDictionary[nn.Module, HeldBlock] = WeakKeyDictionary()
_copies: WeakValueDictionary[Any, HeldCopy] = WeakValueDictionary()
_holding = threading.Lock()
_told: set[tuple[str, ...]] = set()


def held(block: nn.Module, residual: Any) -> HeldBlock | None:
    """A block's copy where the block is; None if it must be run here, operation by operation.

    Args:
        block: whose copy is made now, unless there is one that is still right.
        residual: what it is given.
    """
    if type(residual) is not SimTensor or _is_looked_into():
        return None
    if "forward" in vars(block):  # no class's; and it may hold the block, which would never be gone
        return None
    machine = residual._allocation.machine
    far = machine.asynchronous
    if not isinstance(far, FarDevices) or not far.whole_blocks or _are_functions_exchanged():
        return None
    found = _still_held(block, machine)
    if found is None:
        with _holding:  # runs in flight are threads, of which one is enough to copy it
            found = _still_held(block, machine) or _hold(block, machine, residual.device)
    if found is None or found.copy is None or found.device != residual.device:
        return None
    points = found.seen.listened()
    return None if points is None else found._replace(points=points) if points else found


def forget(module: nn.Module) -> None:
    """Let the copies of all blocks within go, with the weights they hold, as those go elsewhere."""
    for each in module.modules() if _held else ():
        _held.pop(each, None)


def _forget_what_changed() -> None:
    """Let copies go that are of no use any more, and with them weights that were exchanged."""
    for reference in _held.keyrefs():
        block = reference()
        if block is None:
            continue
        found = _held.get(block)
        if found is not None and not found.seen.holds():
            _held.pop(block, None)


def _still_held(block: nn.Module, machine: Machine) -> HeldBlock | None:
    found = _held.get(block)
    is_held = found is not None and found.far is machine.asynchronous and found.seen.holds()
    return found if is_held else None


def _is_looked_into() -> bool:
    """Whether there is something around that sees, or changes, each operation."""
    return (
        bool(_has_any_global_hook())
        or _len_torch_dispatch_stack() > 0
        or not all(isinstance(each, OutsideBlocks) for each in _function_modes())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )


def _are_functions_exchanged() -> bool:
    """Whether a block would use functions here that its rank has not, which the user is told."""
    names = exchanged_functions()
    if names and names not in _told:
        _told.add(names)
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        _log.warning(
            f"{names[0]}{more} was exchanged, of which other ranks know nothing: until it is put "
            "back, blocks run operation by operation, which takes longer"
        )
    return bool(names)


def _function_modes() -> list[Any]:
    there = range(torch._C._len_torch_function_stack())
    return [torch._C._get_function_stack_at(each) for each in there]


def _hold(block: nn.Module, machine: Machine, device: torch.device) -> HeldBlock | None:
    if has_forward_within(block):
        return None
    tensors = tensors_of(block)
    if not all(type(each) is SimTensor and each.device == device for each in tensors):
        return None
    far: Any = machine.asynchronous
    there, seen = None, Snapshot(block)
    if seen.listened() is None:
        return None
    told = pickled(block, far) if seen.classes.are_as_imported() else None
    if told is not None:
        key = far, device, told[0], tuple(map(id, told[1]))
        there = _copies.get(key) or HeldCopy(machine, device, *told)
        _copies[key] = there
    found = _held[block] = HeldBlock(there, far, device, seen)
    machine.on_full = _forget_what_changed
    return found
