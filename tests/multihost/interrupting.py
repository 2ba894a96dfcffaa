"""An interrupt at a chosen line of the code for ranks, as Ctrl-C is one at any."""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

HOSTS, MACHINE, BACKWARD = "/tl_devicefix/multihost/", "/simulation/machine.py", "/backward.py"


class _Interrupt:
    """As an operator, and not a call, at which Python would raise it: in what traces."""

    __neg__ = _thread.interrupt_main


_interrupt: Any = _Interrupt()


class Interrupting:
    """Runs something, and counts the lines of this code in it.

    Attributes:
        lines: how many there were.
    """

    def __init__(self) -> None:
        self.lines = 0
        self._at = 0

    def run(self, what: Callable[[], Any], at: int = 0) -> bool:
        """Run it, with an interrupt at this line; whether there was one that was raised."""
        self.lines, self._at = 0, at
        sys.settrace(self._trace)
        try:
            what()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not (HOSTS in file or MACHINE in file or BACKWARD in file):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                self._at = -_interrupt or 0
        return self._trace
