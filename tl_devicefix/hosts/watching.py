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
MEETING = timedelta(minutes=10)
"""How long ranks wait for each other; clusters start them one by one."""
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
        self.store: Any = dist.PrefixStore(
            "tl_devicefix",
            dist.TCPStore(
                address,
                int(port),
                world_size,
                is_master=rank == 0 and not elsewhere,
                timeout=MEETING,
                wait_for_workers=False,
            ),
        )
        self._ended = threading.Event()
        self._last_beat = time.monotonic()

    def meet(self, world_size: int) -> None:
        """Wait until all ranks are here.

        Raises:
            RuntimeError: if one does not come.
        """
        self.store.set(f"here {self._rank}", "")
        self.store.wait([f"here {rank}" for rank in range(world_size)], MEETING)

    def begin(self, others: list[int], lose: Callable[[int, str], None]) -> None:
        """Watch other ranks from now on.

        Args:
            others: which; a rank that lends watches rank 0.
            lose: called with a rank that is lost, and why.
        """
        for work in (self._watch, self._watch_the_watch):
            name = work.__name__
            threading.Thread(target=work, args=(others, lose), daemon=True, name=name).start()

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
            self._last_beat = time.monotonic()
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

    def _watch_the_watch(self, others: list[int], lose: Callable[[int, str], None]) -> None:
        """Give up if the store does not answer: of a host that is cut off, it says nothing."""
        self._last_beat = time.monotonic()
        while not self._ended.wait(_EVERY):
            if time.monotonic() - self._last_beat > self._timeout:
                return self._tell(lose, 0, f"its store has not answered for {self._timeout:g} s")

    def _tell(self, lose: Callable[[int, str], None], rank: int, why: str) -> None:
        if not self._ended.is_set():
            lose(rank, why)

    def _said(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""
