"""Interrupts that wait, where one would leave half of something, be lost, or end the process.

As torch records an operation it asks for the device's stream, and so calls Python: the guard. Also
where that is C alone, interrupts are looked for on the way to it, and one that raises there ends
the process. So Python's own handler, which raises, is replaced by one that then waits.

It also waits for collections of garbage, which take up to half a second where torch and
transformers are imported. An interrupt that comes meanwhile would be raised in the first callback,
or ``__del__``, that is called, and so be printed and lost.
"""

from __future__ import annotations

import _signal  # `signal.signal` makes enums, which takes ten times as long
import _thread
import functools
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

_Handler = Callable[[int, FrameType | None], Any]

type_of_devices: Any = staticmethod(
    functools.partial(getattr, torch._C._autograd.DeviceType, "PrivateUse1")
)
"""What torch calls of the guard. While interrupts are looked for on the way, torch holds it too."""


def _n_holders() -> int:
    return sys.getrefcount(type_of_devices.__func__)


_AT_REST = _n_holders()


class _Again:
    """As an operator: at the end of a call Python would see to it at once, and so for ever."""

    __neg__ = _thread.interrupt_main


_again: Any = _Again()
_collecting: int | None = None
"""The thread that collects garbage."""


def _note_collection(phase: str, _: dict[str, int]) -> None:
    """As Python calls it when a collection begins, and ends."""
    global _collecting
    if phase == "start":
        _collecting = _thread.get_ident()
        wait_for_torch()
    else:  # and no call, in which an interrupt could come
        _collecting = None


def _would_be_lost(frame: FrameType | None) -> bool:
    """Whether nobody hears what is raised here, in what a collection calls."""
    is_noting = frame is not None and frame.f_code is _note_collection.__code__
    return is_noting or _collecting == _thread.get_ident()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt; where that ends the process, or is lost, come again instead."""
    if _n_holders() > _AT_REST or _would_be_lost(frame):
        return -_again
    return _signal.default_int_handler(number, frame)


def wait_for_torch() -> None:
    """Have interrupts wait for torch from now on, unless they are handled in a way of their own.

    A notebook sets Python's handler for each cell, so this is called again and again.
    """
    is_pythons = _signal.getsignal(signal.SIGINT) is _signal.default_int_handler
    if is_pythons and threading.current_thread() is threading.main_thread():
        _signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def waiting_for_torch() -> Iterator[None]:
    """Within it, interrupts wait for torch, and for collections; then Python's handler is back."""
    global _collecting
    wait_for_torch()
    gc.callbacks.append(_note_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(_note_collection)
        _collecting = None  # also if it is a collection that leaves
        is_ours = _signal.getsignal(signal.SIGINT) is _interrupt
        if is_ours and threading.current_thread() is threading.main_thread():
            _signal.signal(signal.SIGINT, _signal.default_int_handler)


def _never() -> bool:
    return False


class kept:
    """Within it, an interrupt waits: its KeyboardInterrupt, or what it does else, comes at the end.

    Only the main thread is interrupted: in others this does nothing.

    Args:
        but_when: tells whether it does not wait just now.
    """

    __slots__ = ("_before", "_but_when", "_came", "_frame")

    def __init__(self, but_when: Callable[[], bool] = _never) -> None:
        self._but_when = but_when
        self._before: _Handler | None = None
        self._came = False
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                _signal.signal(signal.SIGINT, self._keep)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(signal.SIGINT, self._before)
            if self._came:
                self._before(signal.SIGINT, self._frame)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._but_when():
            assert self._before is not None
            self._before(number, frame)
        else:
            self._came, self._frame = True, frame
