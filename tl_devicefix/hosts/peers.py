"""How commands and values get from one rank to another: by torch.distributed's point-to-point.

On rank 0, a thread for each other rank sends, and another receives, so that nobody waits for a rank
that is lost. All that is sent is bytes: gloo knows few dtypes.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from tl_devicefix.hosts import commands

_COMMANDS, _ANSWERS, _VALUES = 0, 1, 2
"""Tags."""
_NOTHING = -1
_INLINE = 4096
"""Bytes below which values go with their command."""


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous CPU tensor."""
    return values.contiguous().view(-1).view(torch.uint8)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def _send(values: torch.Tensor, rank: int, tag: int) -> None:
    if values.numel():
        dist.send(as_bytes(values), rank, tag=tag)


def _receive(values: torch.Tensor, rank: int, tag: int) -> torch.Tensor:
    if values.numel():
        dist.recv(values.view(-1).view(torch.uint8), rank, tag=tag)
    return values


def _send_object(found: Any, rank: int, tag: int) -> None:
    told = torch.frombuffer(bytearray(pickle.dumps(found, protocol=5)), dtype=torch.uint8)
    dist.send(torch.tensor([told.numel()]), rank, tag=tag)
    dist.send(told, rank, tag=tag)


def _receive_object(rank: int, tag: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank, tag=tag)
    told = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(told, rank, tag=tag)
    # From a rank of the process group, whose network is trusted.
    return pickle.loads(told.numpy())


class Peer:
    """Another rank, as rank 0 speaks to it.

    Args:
        rank: which one.

    Attributes:
        messages: how many were sent to it.
        lost: why it is no more there.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.messages = 0
        self.lost: BaseException | None = None
        self._told: queue.Queue[tuple[list[Any], list[torch.Tensor]]] = queue.Queue(64)
        self._asked: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._waiting: list[Future[Any]] = []
        self._has_sent_all = threading.Event()
        for work in (self._keep_sending, self._keep_receiving):
            threading.Thread(target=work, daemon=True, name=f"rank {rank}").start()

    def tell(self, told: list[Any], values: list[torch.Tensor]) -> None:
        """Give it commands, with the values that come with them, in order."""
        while True:
            self._raise_if_lost()
            try:
                self._told.put((told, values), timeout=0.5)
            except queue.Full:
                continue
            self.messages += 1
            return

    def answer(self) -> Future[Any]:
        """Its next answer, of those that it was told to give."""
        self._raise_if_lost()
        future: Future[Any] = Future()
        self._waiting.append(future)
        self._asked.put(future)
        return future

    def end(self, timeout: float = 10.0) -> None:
        """Tell it to end; wait until that was sent, unless it is lost."""
        if self.lost is None:
            self._told.put(([commands.End()], []))
            self._has_sent_all.wait(timeout)

    def lose(self, error: BaseException) -> None:
        """Give up on it: whoever waits for it gets the error."""
        self.lost = self.lost or error
        for future in self._waiting:
            if not future.done():
                future.set_exception(self.lost)
        self._waiting.clear()

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _keep_sending(self) -> None:
        self._keep(self._send_next)

    def _keep_receiving(self) -> None:
        self._keep(self._receive_next)

    def _keep(self, do: Callable[[], None]) -> None:
        try:
            while True:
                do()
        except RuntimeError as error:  # gloo's, as the connection is closed
            self.lose(error)

    def _send_next(self) -> None:
        told, values = self._told.get()
        inline = [each if each.nbytes <= _INLINE else None for each in values]
        _send_object((told, inline), self.rank, _COMMANDS)
        for each in values:
            if each.nbytes > _INLINE:
                _send(each, self.rank, _COMMANDS)
        if told and isinstance(told[-1], commands.End):
            self._has_sent_all.set()

    def _receive_next(self) -> None:
        future = self._asked.get()
        found = _receive_object(self.rank, _ANSWERS)
        if isinstance(found, _Values):
            found = _receive(_empty(*found), self.rank, _ANSWERS)
        self._waiting.remove(future)
        if not future.done():
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
        dist.send(torch.tensor([_NOTHING if values is None else 0]), rank, tag=_VALUES)
        if values is not None:
            _send(values, rank, _VALUES)

    def receive_values(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int
    ) -> torch.Tensor | None:
        """Receive values from another rank; None if it has none."""
        there = torch.empty(1, dtype=torch.int64)
        dist.recv(there, rank, tag=_VALUES)
        if int(there) == _NOTHING:
            return None
        return _receive(_empty(shape, dtype), rank, _VALUES)
