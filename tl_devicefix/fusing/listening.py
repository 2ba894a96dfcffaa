"""Detect hooks and replaced modules in a block, mostly by comparing two integers.

torch numbers the handles of all hooks, and calls `_count` when a module is assigned to another. If
neither the next number nor our count of assignments within fused blocks has changed, no hook was
added and no module was replaced. Removing a hook changes neither, so modules that had hooks are
always checked. `note_hook` notes where the last hooks were added, so that other blocks skip them.
"""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from operator import itemgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook, register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
hooks_of = itemgetter(*HOOKS)
"""The dicts of hooks in a module's `__dict__`. Look them up each time: users may assign others."""

IN_VIEW = "_tl_devicefix_in_view"
"""The attribute that marks modules of a run's view: fusing them would affect later runs."""

RECORDING = "transformers.utils.output_capturing"
"""The module of the hooks by which transformers records requested outputs (hidden states)."""


def records(hook: object) -> bool:
    """Return True for a hook by which transformers records outputs of layers."""
    return getattr(hook, "__module__", None) == RECORDING


def relay_hooks(point: nn.Module) -> Iterator[int]:
    """Yield the ids of a hook point's hooks that only pass the value on to another hook point."""
    for handle in point.fwd_hooks if isinstance(point, HookPoint) else ():
        user_hook = getattr(handle, "user_hook", None)  # TransformerLens 2 has none
        hook = inspect.unwrap(user_hook) if user_hook else None
        if getattr(hook, "__module__", None) == "transformer_lens.model_bridge.component_setup":
            yield handle.hook.id


_assignments = count(1)  # `next` is atomic, `+= 1` is not
_n_assigned = 0
_watched: WeakSet[nn.Module] = WeakSet()
"""The modules of all fused blocks. Assigning to another module counts only in a run's view."""


def _count(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if IN_VIEW in vars(module) or module in _watched:
        count_assignment()


def count_assignment() -> None:
    """Make all fused blocks check their modules again."""
    global _n_assigned
    _n_assigned = next(_assignments)


_handles: list[RemovableHandle] = []
"""The handle of `_count`, which torch calls while blocks are fused."""


def _count_assignments() -> None:
    if not _handles:
        _handles.append(register_module_module_registration_hook(_count))


_N_NOTED = 64
_noted = [(-1, 0)] * _N_NOTED
"""The last hooks on hook points, each at its number modulo 64: the number, and the id of the hook
point's `__dict__`."""


def note_hook(module: nn.Module) -> None:
    """Note where a hook was just added, so that other blocks need not look for it."""
    number = RemovableHandle.next_id - 1
    # If the number is not there, another thread has added a hook since, and nothing is noted.
    if any(number in hooks for hooks in hooks_of(vars(module))):
        _noted[number % _N_NOTED] = number, id(vars(module))


def count_hook() -> None:
    """Make all fused blocks look for hooks again."""
    RemovableHandle(OrderedDict())  # takes the next number


def is_counting() -> bool:
    """Return True if torch calls `_count` for each module that is assigned."""
    return bool(_handles)


def stop_counting() -> None:
    """Remove `_count` from torch; fused blocks check their modules in their next forward."""
    while _handles:
        _handles.pop().remove()
    count_assignment()


class Listeners:
    """Finds the modules of a fused block that have hooks.

    Args:
        block: the fused block. Assigning a module within it makes this object out of date.
        named: the modules, each with the name that `look` returns for it. Several may share a name.
        are_harmless: returns True for a dict of hooks that need not be called.
    """

    def __init__(
        self,
        block: nn.Module,
        named: Sequence[tuple[str, nn.Module]],
        are_harmless: Callable[[dict[int, Any]], bool] = operator.not_,
    ) -> None:
        _count_assignments()
        self._n_assigned = _n_assigned
        _watched.update(block.modules())
        self._each_name = [name for name, _ in named]
        self._attributes = [module.__dict__ for _, module in named]
        self.names = frozenset(self._each_name)
        self._are_harmless = are_harmless
        # The next hook's number when we looked last, the names of the modules that had hooks, and
        # for each name a module's attributes. One tuple, as several threads may run a model.
        self._seen: tuple[int, frozenset[str], list[dict[str, Any]]] = -1, frozenset(), []

    def is_current(self) -> bool:
        """Return True if no module was assigned to another since this object was created."""
        return self._n_assigned == _n_assigned

    def look(self) -> frozenset[str]:
        """Return the names of the modules that have hooks now."""
        as_of, hooked, listened = self._seen
        is_new = as_of != RemovableHandle.next_id and not self._are_elsewhere(as_of)
        # Removing a hook changes no number, so modules that had hooks are checked each time.
        if is_new or (hooked and not all(map(any, map(hooks_of, listened)))):
            self._seen = _, hooked, _ = self._now()
        return hooked

    def refuse_others(self, hooked: frozenset[str]) -> None:
        """Raise if a module that is not in `hooked` has hooks by now: they would not be called."""
        if not self.look() <= hooked:
            raise RuntimeError(
                "a hook added a hook to its own block, which is fused and does not call it in this "
                "forward: add it before, or call unfuse_blocks"
            )

    def _are_elsewhere(self, as_of: int) -> bool:
        """Return True if all hooks from this number on were noted, and are outside the block."""
        now = RemovableHandle.next_id
        if as_of < 0 or now - as_of > _N_NOTED:
            return False
        places = set()
        for number in range(as_of, now):
            noted, place = _noted[number % _N_NOTED]
            if noted != number:
                return False
            places.add(place)
        if not places.isdisjoint(map(id, self._attributes)):
            return False
        self._seen = now, *self._seen[1:]
        return True

    def _now(self) -> tuple[int, frozenset[str], list[dict[str, Any]]]:
        as_of = RemovableHandle.next_id  # first: another thread may add hooks meanwhile
        if _has_any_global_hook():
            return -1, self.names, []  # -1: look again, its removal is not seen
        if not any(chain.from_iterable(map(hooks_of, self._attributes))):
            return as_of, frozenset(), []
        named = zip(self._each_name, self._attributes, strict=True)
        hooked = [(name, of_one) for name, of_one in named if self._has_hooks(of_one)]
        return as_of, frozenset(name for name, _ in hooked), [of_one for _, of_one in hooked]

    def _has_hooks(self, attributes: dict[str, Any]) -> bool:
        return any(hooks and not self._are_harmless(hooks) for hooks in hooks_of(attributes))


def other_shape(point: HookPoint) -> RuntimeError:
    """Return the error for a hook after which SDPA would pair queries and keys in another way."""
    return RuntimeError(
        f"a hook on {point.name} returned another shape: expand what it returns to the shape of "
        "its activation"
    )


def unsupported_mode() -> str | None:
    """Return the state of torch that fused blocks do not support, if any."""
    if _has_any_global_hook():
        return "torch has hooks for every module"
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap, grad, jvp and so on
        return "torch.func transforms it"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode autograd is on"
    if torch.compiler.is_compiling():
        return "it is compiled"
    return None
