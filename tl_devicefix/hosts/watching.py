"""What becomes of it all when a rank is lost: rank 0 is told, and all others end."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_EVERY = 1.0
"""Seconds between two signs of life."""


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

    def begin(self, peers: dict[int, Any]) -> None:
        """Watch other ranks from now on.

        Args:
            peers: rank -> what is told when it is lost; on a rank that lends, only rank 0.
        """
        threading.Thread(target=self._watch, args=(peers,), daemon=True, name="watch").start()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self, peers: dict[int, Any]) -> None:
        seen = dict.fromkeys(peers, ("", time.monotonic()))
        beats = 0
        while not self._ended.wait(_EVERY):
            beats += 1
            try:
                self.store.set(f"alive {self._rank}", str(beats))
                for rank in peers:
                    said = self._said(rank)
                    if said != seen[rank][0]:
                        seen[rank] = said, time.monotonic()
            except RuntimeError as error:  # the store is gone, and rank 0 with it
                self._lost(peers, min(peers), f"its store cannot be reached: {error}")
                return
            for rank, (_, since) in seen.items():
                if time.monotonic() - since > self._timeout:
                    self._lost(peers, rank, f"no sign of life for {self._timeout:g} s")
                    return

    def _said(self, rank: int) -> str:
        key = f"alive {rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _lost(self, peers: dict[int, Any], rank: int, why: str) -> None:
        if self._ended.is_set():
            return
        if self._rank:
            print(f"rank {self._rank}: rank {rank} is lost, {why}", file=sys.stderr, flush=True)
            os._exit(1)
        peers[rank].lose(RuntimeError(f"rank {rank} is lost: {why}"))
