"""Text given to a Bridge in runs that are in flight."""

from __future__ import annotations

from typing import Any

from tl_devicefix.dispatch.own_tokenizer import reading_text, take_own_tokenizer


def with_own_tokenizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a Bridge that changes the tokenizer's padding side while it runs."""
    take_own_tokenizer(self)
    return original(self, *args, **kwargs)


def reading(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a Bridge that calls the tokenizer."""
    with reading_text():
        return original(self, *args, **kwargs)
