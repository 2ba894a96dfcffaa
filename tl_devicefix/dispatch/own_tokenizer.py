"""Runs in flight that read text: one at a time, and with a padding side of their own."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

from tl_devicefix.dispatch.scheduler import current_run

_lock = threading.RLock()
_READS_ALONE = contextlib.nullcontext()


def reading_text() -> contextlib.AbstractContextManager[Any]:
    """Within it, no other run in flight reads text: tokenizers keep how to pad between calls."""
    return _READS_ALONE if current_run() is None else _lock


def take_own_tokenizer(model: Any) -> None:
    """Have a run's view change a copy's padding side: other runs read the tokenizer's meanwhile.

    What is behind the copy is shared, and is told the side at each call.
    """
    if current_run() is not None and model.tokenizer is not None:
        model.tokenizer = copy.copy(model.tokenizer)
