"""Ctrl-C that waits where it would end the process, or leave half of something.

As torch records an operation it asks for the device's stream, and so calls Python: the guard. An
interrupt that raises there, or on the way to it, ends the process. So Python's own handler, which
raises, is replaced by one that then comes again a moment later.
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

type_of_devices: Any = staticmethod(
    functools.partial(getattr, torch._C._autograd.DeviceType, "PrivateUse1")
)
"""The guard's answer, in C alone. While torch asks for it, torch holds a reference to it."""


def _n_holders() -> int:
    return sys.getrefcount(type_of_devices.__func__)


_AT_REST = _n_holders()


class _Again:
    """As an operator: at the end of a call Python would see to it at once, and so for ever."""

    __neg__ = _thread.interrupt_main


_again: Any = _Again()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _n_holders() > _AT_REST:
        return -_again
    return _signal.default_int_handler(number, frame)


def _wait_for_torch(*_: Any) -> None:
    """Have interrupts wait for torch, unless they are handled in a way of their own."""
    is_pythons = _signal.getsignal(signal.SIGINT) is _signal.default_int_handler
    if is_pythons and threading.current_thread() is threading.main_thread():
        _signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def waiting_for_torch() -> Iterator[None]:
    """Within it, interrupts wait while torch records an operation."""
    _wait_for_torch()
    gc.callbacks.append(_wait_for_torch)  # a notebook sets Python's handler for each cell
    try:
        yield
    finally:
        gc.callbacks.remove(_wait_for_torch)
        is_ours = _signal.getsignal(signal.SIGINT) is _interrupt
        if is_ours and threading.current_thread() is threading.main_thread():
            _signal.signal(signal.SIGINT, _signal.default_int_handler)


@contextmanager
def delayed_interrupts(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Within it, Ctrl-C waits until the end; in other threads than the main one, do nothing.

    Args:
        unless: tells whether it does not wait just now.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    frames: list[FrameType | None] = []

    def delay(number: int, frame: FrameType | None) -> None:
        if unless():
            before(number, frame)
        else:
            frames.append(frame)

    signal.signal(signal.SIGINT, delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if frames:
            before(signal.SIGINT, frames[0])
