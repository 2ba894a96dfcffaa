"""Interrupts that wait, where one would leave half of something behind."""

from __future__ import annotations

import _signal  # `signal.signal` makes enums, which takes ten times as long
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


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
