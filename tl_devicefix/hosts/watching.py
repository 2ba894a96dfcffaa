"""What becomes of it all when a rank is lost: rank 0 is told, and all others end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_EVERY = 0.5
"""Seconds between two signs of life."""
SHORTEST_TIMEOUT = 2.0
"""Seconds; a busy machine may have no time for a sign of life for one."""
_REFUSING = timedelta(seconds=10)
"""How long rank 0, which has the store, waits until all others have read in it why they end."""
_OVER = "over"


class Watch:
    """Signs of life of all ranks, by the store where they met.

    Args:
        master: where rank 0 is, "host:port".
        rank: this one.
        world_size: how many there are.
        timeout: seconds within which it is known that a rank is lost.
        wait: seconds that ranks wait for each other.

    Attributes:
        timeout: as it was given.
        store: where they met.
        wait: as it was given.

    Raises:
        RuntimeError: if rank 0 cannot be reached, or cannot listen there.
    """

    def __init__(
        self, master: str, rank: int, world_size: int, timeout: float, wait: float
    ) -> None:
        self._master, self._rank, self._world_size = master, rank, world_size
        self.timeout = timeout
        # It was last seen up to a beat before it was lost, and is looked for once a beat.
        self._limit = timeout - 2 * _EVERY
        self.wait = timedelta(seconds=wait)
        self.store: Any = self._opened()
        self._ended = threading.Event()
        self._last_beat = time.monotonic()

    def _opened(self) -> Any:
        address, _, port = self._master.rpartition(":")
        # A launcher may have its own store there, also when it starts all ranks again.
        elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = self._rank == 0 and not elsewhere
        try:
            store = dist.TCPStore(
                address,
                int(port),
                self._world_size,
                is_master=is_master,
                timeout=self.wait,
                wait_for_workers=False,
            )
        except RuntimeError as error:  # DistError is one
            raise RuntimeError(
                f"rank 0 cannot listen at {self._master}: choose another port, or end what has it"
                if is_master
                else f"rank 0 did not come to {self._master} within {self.wait.total_seconds():g} "
                "s: start it, and see that this port can be reached from here"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"tl_devicefix {attempt}", store)

    def meet(self, hello: Any) -> list[Any]:
        """Wait until all ranks are here.

        Args:
            hello: what this one says of itself, as JSON has it.

        Returns:
            What each says.

        Raises:
            RuntimeError: if one does not come, or there are two of this one.
        """
        if self.store.add(f"is here {self._rank}", 1) > 1:
            raise RuntimeError(
                f"another process came to {self._master} as rank {self._rank}: each needs a rank "
                "of its own"
            )
        self.store.set(f"hello {self._rank}", json.dumps(hello))
        keys = [f"hello {rank}" for rank in range(self._world_size)]
        try:
            self.store.wait(keys, self.wait)
            return [json.loads(self.store.get(key)) for key in keys]
        except RuntimeError as error:  # DistError is one
            raise RuntimeError(self._why_not_all_came(keys)) from error

    def _why_not_all_came(self, keys: list[str]) -> str:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return (
                f"rank 0 ended before all {self._world_size} ranks had come to {self._master}: see "
                "what it says, and start all again"
            )
        shown = ", ".join(map(str, missing[:8])) + (", ..." if missing[8:] else "")
        return (
            f"rank{'s' if missing[1:] else ''} {shown} of {self._world_size} did not come to "
            f"{self._master} within {self.wait.total_seconds():g} s: start each, with a rank of "
            "its own, and see that this port can be reached from its host"
        )

    def refuse(self, error: RuntimeError) -> None:
        """Raise what all ranks raise, once all have read what it is of."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"refuses {self._rank}", "")
            if not self._rank:
                keys = [f"refuses {rank}" for rank in range(self._world_size)]
                self.store.wait(keys, _REFUSING)
        raise error

    def begin(self, others: list[int], lose: Callable[[int | None, str], None]) -> None:
        """Watch other ranks from now on.

        Args:
            others: which; a rank that lends watches rank 0.
            lose: called with a rank that is lost, or None if rank 0 says that it is over, and why.
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

    def _watch(self, others: list[int], lose: Callable[[int | None, str], None]) -> None:
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
                return self._tell(lose, None, over)
            for rank in others:
                if said[rank] != seen[rank][0]:
                    seen[rank] = said[rank], time.monotonic()
                elif time.monotonic() - seen[rank][1] > self._limit:
                    why = f"it gave no sign of life for {self._limit:g} s"
                    return self._tell(lose, rank, why)

    def _watch_the_watch(self, others: list[int], lose: Callable[[int | None, str], None]) -> None:
        """Give up if the store does not answer: of a host that is cut off, it says nothing."""
        self._last_beat = time.monotonic()
        while not self._ended.wait(_EVERY):
            if time.monotonic() - self._last_beat > self._limit:
                return self._tell(lose, 0, f"its store has not answered for {self._limit:g} s")

    def _tell(self, lose: Callable[[int | None, str], None], rank: int | None, why: str) -> None:
        if not self._ended.is_set():
            lose(rank, why)

    def _said(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""
