"""How far a harvest is, and how fast."""

from __future__ import annotations

import time
from typing import Any

import transformers.utils.logging as hf_logging

from tl_devicefix.placement.tables import gib


class Bar:
    """A progress bar in examples, with tokens and bytes a second.

    Args:
        total: how many examples there will be, if that is known.
        initial: how many are there.
        n_bytes: how many bytes will be there, if that is known.
        shown: whether it is.
    """

    def __init__(self, total: int | None, initial: int, n_bytes: int | None, shown: bool) -> None:
        self._bar = hf_logging.tqdm(
            total=total,
            initial=initial,
            desc="Activations" if n_bytes is None else f"Activations of {gib(n_bytes)}",
            unit=" examples",
            disable=not shown,
        )
        self._began, self._tokens, self._bytes = time.perf_counter(), 0, 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.close()

    def add(self, n_examples: int, width: int, n_bytes: int) -> None:
        """Count examples, and their bytes, when they are given to the writer."""
        self._bytes += n_bytes
        self._tokens += n_examples * width
        seconds = time.perf_counter() - self._began
        self._bar.set_postfix_str(
            f"{self._tokens / seconds:.0f} tokens/s, {gib(self._bytes / seconds)}/s",
            refresh=False,
        )
        self._bar.update(n_examples)
