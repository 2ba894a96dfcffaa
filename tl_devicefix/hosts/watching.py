"""What becomes of it all when a rank is lost: rank 0 is told, and all others end."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_EVERY = 1.0
"""Seconds between two signs of life."""
_OVER = "over"


class Watch:
    """Signs of life of all ranks, by the store where they met.

    Args:
        master: where rank 0 is, "host:port".
        rank: this one.
        world_size: how many there are.
        timeout: seconds without a sign of life after which a rank is lost.
    """

    def __init__(self, master: str, rank: int, world_size: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        address, _, port = master.rpartition(":")
        # A launcher may have its own store there.
        elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        wait = timedelta(seconds=max(timeout, 60.0))
        self.store: Any = dist.PrefixStore(
            "tl_devicefix",
            dist.TCPStore(
                address,
                int(port),
                world_size,
                is_master=rank == 0 and not elsewhere,
                timeout=wait,
                wait_for_workers=False,
            ),
        )
        self._ended = threading.Event()

    def begin(self, others: list[int], lose: Callable[[int, str], None]) -> None:
        """Watch other ranks from now on.

        Args:
            others: which; a rank that lends watches rank 0.
            lose: called with a rank that is lost, and why.
        """
        work = self._watch
        threading.Thread(target=work, args=(others, lose), daemon=True, name="watch").start()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def tell_all(self, why: str) -> None:
        """Tell all ranks that it is over."""
        with contextlib.suppress(RuntimeError):  # the store's: then they know
            self.store.set(_OVER, why)

    def _watch(self, others: list[int], lose: Callable[[int, str], None]) -> None:
        seen = {rank: ("", time.monotonic()) for rank in others}
        for beat in itertools.count():
            if self._ended.wait(_EVERY):
                return
            try:
                self.store.set(f"alive {self._rank}", str(beat))
                said = {rank: self._said(f"alive {rank}") for rank in others}
                over = self._said(_OVER)
            except RuntimeError:  # the store is gone, and rank 0 with it
                return self._tell(lose, 0, "its store cannot be reached")
            if over and self._rank:
                return self._tell(lose, 0, over)
            for rank in others:
                if said[rank] != seen[rank][0]:
                    seen[rank] = said[rank], time.monotonic()
                elif time.monotonic() - seen[rank][1] > self._timeout:
                    why = f"it gave no sign of life for {self._timeout:g} s"
                    return self._tell(lose, rank, why)

    def _tell(self, lose: Callable[[int, str], None], rank: int, why: str) -> None:
        if not self._ended.is_set():
            lose(rank, why)

    def _said(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""
