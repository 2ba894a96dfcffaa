"""How commands and values get from one rank to another: by torch.distributed's point-to-point.

On rank 0, a thread for each other rank sends, and another receives, so that nobody waits for a rank
that is lost. All that is sent is bytes: gloo knows few dtypes.
"""

from __future__ import annotations

import pickle
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tl_devicefix.hosts import commands

_COMMANDS, _ANSWERS, _VALUES = 0, 1, 2
"""Tags."""
_FOREVER = timedelta(days=365)
"""Who waits is woken when a rank is lost; how long a rank computes is not known."""
_NOTHING = -1
_INLINE = 4096
"""Bytes below which values go with their command."""


def said_by_gloo(error: RuntimeError) -> str:
    """What gloo says of a connection, without where in its source, and advice."""
    found = re.search(r"(Connection|Timed out|Broken)[^.\[]*[a-z]", str(error))
    return found[0] if found else str(error)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous CPU tensor."""
    return values.contiguous().view(-1).view(torch.uint8)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def _give(values: torch.Tensor, rank: int, tag: int) -> None:
    work: Any = dist.isend(values, rank, tag=tag)
    work.wait(_FOREVER)


def _get(values: torch.Tensor, rank: int, tag: int) -> None:
    work: Any = dist.irecv(values, rank, tag=tag)
    work.wait(_FOREVER)


def _send(values: torch.Tensor, rank: int, tag: int) -> None:
    if values.numel():
        _give(as_bytes(values), rank, tag=tag)


def _receive(values: torch.Tensor, rank: int, tag: int) -> torch.Tensor:
    if values.numel():
        _get(values.view(-1).view(torch.uint8), rank, tag=tag)
    return values


def _send_object(found: Any, rank: int, tag: int) -> None:
    told = torch.frombuffer(bytearray(pickle.dumps(found, protocol=5)), dtype=torch.uint8)
    _give(torch.tensor([told.numel()]), rank, tag=tag)
    _give(told, rank, tag=tag)


def _receive_object(rank: int, tag: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    _get(size, rank, tag=tag)
    told = torch.empty(int(size), dtype=torch.uint8)
    _get(told, rank, tag=tag)
    # From a rank of the process group, whose network is trusted.
    return pickle.loads(bytes(told.numpy()))


class RankLost(RuntimeError):
    """A rank is no more there, and with it what its devices held.

    Attributes:
        rank: which one.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Peer:
    """Another rank, as rank 0 speaks to it.

    Args:
        rank: which one.
        lose: called with why, when the connection to it is lost.

    Attributes:
        messages: how many were sent to it.
    """

    def __init__(self, rank: int, lose: Callable[[str], None]) -> None:
        self.rank = rank
        self.messages = 0
        self._lose = lose
        self._lost: RankLost | None = None
        self._told: queue.Queue[tuple[list[Any], list[torch.Tensor]]] = queue.Queue(64)
        self._asked: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._has_sent_all = threading.Event()
        self._within_gloo: set[str] = set()
        for work in (self._send_next, self._receive_next):
            name = f"rank {rank}: {work.__name__}"
            threading.Thread(target=self._keep, args=(work,), daemon=True, name=name).start()

    def tell(self, told: list[Any], values: list[torch.Tensor]) -> None:
        """Give it commands, with the values that come with them, in order.

        Raises:
            RankLost: if it, or another rank, is lost.
        """
        while True:
            self._raise_if_lost()
            try:
                self._told.put((told, values), timeout=0.5)
            except queue.Full:
                continue
            self.messages += 1
            return

    def answer(self) -> Future[Any]:
        """Its next answer, of those that it was told to give.

        Raises:
            RankLost: if it, or another rank, is lost.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._raise_if_lost()
            self._waiting.add(future)
        self._asked.put(future)
        return future

    def end(self, timeout: float = 5.0) -> None:
        """Tell it to end; wait until that was sent, unless it is lost."""
        if self._lost is None:
            self._told.put(([commands.End()], []))
            self._has_sent_all.wait(timeout)

    def rest(self, timeout: float = 3.0) -> None:
        """Wait until no thread is within gloo, from where it must not come back as Python ends."""
        until = time.monotonic() + timeout
        while self._within_gloo and time.monotonic() < until:
            time.sleep(0.02)

    def lose(self, error: RankLost) -> None:
        """Give up on it: whoever waits for it gets the error, and whoever needs it."""
        with self._lock:
            self._lost = self._lost or error
            waiting, self._waiting = self._waiting, set()
        self._has_sent_all.set()
        for future in waiting:
            future.set_exception(self._lost)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise RankLost(str(self._lost), self._lost.rank)

    def _keep(self, do: Callable[[], None]) -> None:
        try:
            while True:
                do()
        except RuntimeError as error:  # gloo's
            self._lose(said_by_gloo(error))

    @contextmanager
    def _in_gloo(self, what: str) -> Iterator[None]:
        self._within_gloo.add(what)
        try:
            yield
        finally:
            self._within_gloo.discard(what)

    def _send_next(self) -> None:
        told, values = self._told.get()
        with self._in_gloo("sending"):
            self._send(told, values)
        if told and isinstance(told[-1], commands.End):
            self._has_sent_all.set()

    def _send(self, told: list[Any], values: list[torch.Tensor]) -> None:
        inline = [each if each.nbytes <= _INLINE else None for each in values]
        _send_object((told, inline), self.rank, _COMMANDS)
        for each in values:
            if each.nbytes > _INLINE:
                _send(each, self.rank, _COMMANDS)

    def _receive_next(self) -> None:
        future = self._asked.get()
        with self._in_gloo("receiving"):
            found = _receive_object(self.rank, _ANSWERS)
            if isinstance(found, _Values):
                found = _receive(_empty(*found), self.rank, _ANSWERS)
        with self._lock:
            if future in self._waiting:
                self._waiting.remove(future)
                future.set_result(found)


class _Values(tuple[Any, ...]):
    """Shape and dtype of values that come next."""


class Wire:
    """Rank 0, and the others, as a rank that lends speaks to them."""

    def receive_commands(self) -> tuple[list[Any], Callable[..., torch.Tensor]]:
        """The next commands, and what gives the values that come with them, in order."""
        told, inline = _receive_object(0, _COMMANDS)
        there = iter(inline)

        def values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            given = next(there)
            return _receive(_empty(shape, dtype), 0, _COMMANDS) if given is None else given

        return told, values

    def answer(self, found: Any) -> None:
        """Answer rank 0."""
        if isinstance(found, torch.Tensor):
            if found.nbytes <= _INLINE:
                _send_object(found.clone(), 0, _ANSWERS)  # not all of a larger storage
                return
            _send_object(_Values((tuple(found.shape), found.dtype)), 0, _ANSWERS)
            _send(found, 0, _ANSWERS)
        else:
            _send_object(found, 0, _ANSWERS)

    def send_values(self, values: torch.Tensor | None, rank: int) -> None:
        """Send values to another rank, or that there are none."""
        _give(torch.tensor([_NOTHING if values is None else 0]), rank, tag=_VALUES)
        if values is not None:
            _send(values, rank, _VALUES)

    def receive_values(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int
    ) -> torch.Tensor | None:
        """Receive values from another rank; None if it has none."""
        there = torch.empty(1, dtype=torch.int64)
        _get(there, rank, tag=_VALUES)
        if int(there) == _NOTHING:
            return None
        return _receive(_empty(shape, dtype), rank, _VALUES)
