"""Functions of torch's that do something else for a while, and are then as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""What has an attribute, the attribute's name, and what makes another of its value."""


class Replacing:
    """Attributes that are replaced for all threads, for as long as any of them is within it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._n_within = 0
        self._replaced: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    @contextlib.contextmanager
    def __call__(self, replacements: Iterable[Replacement]) -> Iterator[None]:
        """Within it, these are replaced too.

        Args:
            replacements: one that is in force already is left as it is.
        """
        with self._lock:
            self._n_within += 1
            for owner, name, make in replacements:
                if (id(owner), name) not in self._replaced:
                    before = getattr(owner, name)
                    after = make(before)
                    self._replaced[id(owner), name] = owner, before, after
                    setattr(owner, name, after)
        try:
            yield
        finally:
            with self._lock:
                self._n_within -= 1
                if not self._n_within:
                    self._restore()

    def _restore(self) -> None:
        for (_, name), (owner, before, after) in self._replaced.items():
            if getattr(owner, name) is after:  # or else someone has replaced it since
                setattr(owner, name, before)
        self._replaced.clear()
