"""`mix_devices`: torch functions that mix the devices in use, for a whole script."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode

from tl_devicefix.dispatch.joining import Joining, bytes_of
from tl_devicefix.dispatch.torch_while_mixing import ChangedTorch
from tl_devicefix.dispatch.users_lines import line_of_user
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.gathering_device import listen
from tl_devicefix.placement.in_use import devices_in_use, home_of
from tl_devicefix.placement.memory import gib


class Copied(NamedTuple):
    """What one line of a script had copied: "script.py:12", bytes, and in how many copies."""

    line: str
    nbytes: int
    times: int


class mix_devices:
    """Let torch functions mix tensors of the devices in use: from now on, or within a `with`.

    ``tl_devicefix.mix_devices()`` takes effect at once and stays, as ``torch.set_grad_enabled``
    does; ``tl_devicefix.mix_devices(False)`` ends it. With ``with``, it is as before at the end,
    whatever calls were made within.

    A function that torch refuses, as its tensors are on several devices, gets them brought
    together: what is changed in place (or by ``out=``), and what is indexed, stays where it is;
    other results lie at home, unless one operand is larger than all the others together and on
    another device (not the host): then there. Gradients go back to where each operand is.

    The devices in use are those of the models that are placed (the host if blocks are offloaded),
    and that of `gather_on`, which is then home. A tensor of any other device, such as the CPU, is
    left alone, and torch says so. A gradient given to `backward` or `torch.autograd.grad` goes to
    its output's device. PyTorch's own hooks on gradients (`Tensor.register_hook`,
    `register_full_backward_hook`, ...) mix if they were registered within it, in whichever thread
    autograd runs them. `torch.testing.assert_close` compares values wherever they are.

    It holds in this thread: enter it in each thread that mixes (and again where another thread has
    placed the first model since). Code that torch compiles is left as it is. Until a second device
    comes in use, it does nothing, and costs nothing.

    Args:
        mode: False switches it off, also within a `with` of its own.
        report: print what was copied, and for which lines, at the end: of the `with`, or
            of the program.

    >>> with mix_devices(report=True):  # doctest: +SKIP
    ...     stream = torch.stack(kept)  # which hooks of several blocks kept
    """

    def __init__(self, mode: bool = True, *, report: bool = False) -> None:
        self.mode = mode
        self._report = report
        self._lines: dict[str, list[int]] = {}
        _thread.add(self)
        if report:
            atexit.register(self._end)

    def __enter__(self) -> mix_devices:
        _thread.enter(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _thread.leave(self)
        if self not in _thread.held():
            self._end()

    @property
    def copied(self) -> list[Copied]:
        """What was copied so far, by the lines that had it copied, most bytes first."""
        lines = (Copied(line, *counts) for line, counts in self._lines.items())
        return sorted(lines, key=lambda each: each.nbytes, reverse=True)

    def __repr__(self) -> str:
        lines = self.copied
        everything = Copied("all", sum(c.nbytes for c in lines), sum(c.times for c in lines))
        rows = [f"{gib(c.nbytes):>12} {c.times:>7} x  {c.line}" for c in (everything, *lines)]
        return "\n".join(["mix_devices copied", *rows])

    def _count(self, line: str, nbytes: int) -> None:
        counts = self._lines.setdefault(line, [0, 0])
        counts[0] += nbytes
        counts[1] += 1

    def _end(self) -> None:
        """Print the report."""
        if self._report:
            atexit.unregister(self._end)
            print(self)


class _Entry(NamedTuple):
    """One that is on in a thread: by a call, or entered by a `with`."""

    mode: bool
    reference: weakref.ref[mix_devices]
    entered: bool


class _Thread(threading.local):
    """What is on in a thread: the last says whether devices mix."""

    def __init__(self) -> None:
        self._stack: list[_Entry] = []
        self._mode: _Mixing | None = None
        self._torch: ChangedTorch | None = None

    @property
    def is_mixing(self) -> bool:
        """Whether devices mix in this thread."""
        return bool(self._stack) and self._stack[-1].mode

    def held(self) -> list[mix_devices]:
        """Those that someone holds, as every `with` does: they count what is copied."""
        held = (entry.reference() for entry in self._stack)
        return list(dict.fromkeys(each for each in held if each is not None))

    def add(self, each: mix_devices) -> None:
        """Let a call be the last."""
        # Of calls that nobody can take back any more, one after the other, the last is enough.
        while len(self._stack) > 1 and not any(entry.reference() for entry in self._stack[-2:]):
            del self._stack[-2]
        self._push(each, entered=False)

    def enter(self, each: mix_devices) -> None:
        """Let one be the last until it is left, and no longer by its call."""
        self._stack = [e for e in self._stack if e.entered or e.reference() is not each]
        self._push(each, entered=True)

    def leave(self, each: mix_devices) -> None:
        """Remove one, wherever it is (a generator may leave its own late), and calls within it."""
        entered = [i for i, e in enumerate(self._stack) if e.reference() is each and e.entered]
        if entered:
            del self._stack[entered[-1]]
            while entered[-1] < len(self._stack) and not self._stack[entered[-1]].entered:
                del self._stack[entered[-1]]
        self.follow()

    def _push(self, each: mix_devices, entered: bool) -> None:
        self._stack.append(_Entry(each.mode, weakref.ref(each), entered))
        self.follow()

    def follow(self) -> None:
        """Have the mode on if there is something to mix: it costs time at each torch function."""
        wanted = self.is_mixing and len(devices_in_use()) > 1
        if wanted and self._mode is None:
            self._mode = _Mixing()
            self._torch = ChangedTorch(lambda: _thread.is_mixing)
            _push_at_bottom(self._mode)
        elif not wanted and self._mode is not None:
            _take_out(self._mode)
            self._mode = self._torch = None


class _Mixing(Joining):
    """The mode of a thread within `mix_devices`."""

    def devices(self) -> frozenset[torch.device]:
        """Those in use; none in code that torch compiles."""
        return frozenset() if torch.compiler.is_compiling() else devices_in_use()

    def target(self, tensors: list[torch.Tensor], devices: frozenset[torch.device]) -> torch.device:
        """Home, or where an operand is that is larger than all the others together."""
        home = home_of(devices)
        sizes = {id(tensor): bytes_of(tensor) for tensor in tensors if tensor.device in devices}
        largest = max(tensors, key=lambda tensor: sizes.get(id(tensor), -1))
        if largest.device not in (home, HOST) and 2 * sizes[id(largest)] > sum(sizes.values()):
            return largest.device
        return home

    def copied(self, nbytes: int) -> None:
        """Count it for the line that mixes."""
        line = line_of_user(sys._getframe(1))
        for each in _thread.held():
            each._count(line, nbytes)


_thread = _Thread()
listen(lambda: _thread.follow())


def _push_at_bottom(mode: TorchFunctionMode) -> None:
    """Put a mode under those that are on: leaving one of these takes the topmost off.

    Above that of `torch.set_default_device`, which has to be at the very bottom, for this reason.
    """
    above = _popped()
    if above and above[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _push_mode(above.pop())
    _push_mode(mode)
    _push_all(above)


def _take_out(mode: TorchFunctionMode) -> None:
    _push_all([each for each in _popped() if each is not mode])


def _popped() -> list[TorchFunctionMode]:
    """All modes that are on, the topmost first, taken off."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]


def _push_all(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
