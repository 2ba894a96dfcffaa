"""An interrupt at a chosen line of the code for ranks, as Ctrl-C is one at any."""

from __future__ import annotations

import _thread
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

HOSTS, MACHINE, BACKWARD = "/tl_devicefix/hosts/", "/simulation/machine.py", "/backward.py"


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
        before = signal.signal(signal.SIGINT, self._interrupt)
        sys.settrace(self._trace)
        try:
            what()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, before)
        return False

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename  # no call here, where `_interrupt` would see another frame
        if not (HOSTS in file or MACHINE in file or BACKWARD in file):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                _thread.interrupt_main()
        return self._trace

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is Interrupting._trace.__code__:
            # Python would raise it here, from where it would be at a line, and not where Python
            # looks for it: at the next call, or at a loop's end.
            _thread.interrupt_main()
            return
        raise KeyboardInterrupt
