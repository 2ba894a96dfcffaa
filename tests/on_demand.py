"""Things that are made when a test first asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OnDemand:
    """A mapping whose values are made when they are first asked for, then kept."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._made: dict[Any, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        key = (args, tuple(sorted(options.items(), key=lambda item: item[0])))
        if key not in self._made:
            self._made[key] = self._make(*args, **options)
        return self._made[key]
