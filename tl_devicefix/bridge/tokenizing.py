"""Text given to a Bridge in runs that are in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tl_devicefix.patching.applying import original
from tl_devicefix.running.own_tokenizer import reading_text, take_own_tokenizer


@functools.cache
def with_own_tokenizer(name: str) -> Callable[..., Any]:
    """A method of a Bridge that changes the tokenizer's padding side while it runs."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        take_own_tokenizer(self)
        return original(type(self), name)(self, *args, **kwargs)

    return method


@functools.cache
def reading(name: str) -> Callable[..., Any]:
    """A method of a Bridge that calls the tokenizer."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with reading_text():
            return original(type(self), name)(self, *args, **kwargs)

    return method
