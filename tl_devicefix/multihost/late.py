"""How late it is for a sign that does not come."""

from __future__ import annotations

import time
from typing import Any

EVERY = 0.5
"""Seconds between two looks."""


class Late:
    """How long something has been the same, by looks at it, again and again.

    While this process, or its whole machine, stands still, so may who is to say something: that
    time is not counted.
    """

    def __init__(self) -> None:
        self._seen: Any = None
        self._looked = time.monotonic()
        self._seconds = 0.0

    def look(self, found: Any) -> float:
        """Look at it.

        Args:
            found: what it is now.

        Returns:
            Seconds for which it has been that.
        """
        now = time.monotonic()
        passed = min(now - self._looked, 1.5 * EVERY)
        self._seconds = self._seconds + passed if found == self._seen else 0.0
        self._seen, self._looked = found, now
        return self._seconds
