"""How commands and values get from one rank to another: by TCP, a connection for each two ranks.

All that is sent is a frame: its length, a signature, and bytes. A message is a pickle, and signed.
Values come as a frame of their own behind a message that tells their shape; large ones, which
nobody unpickles, are signed by their length only. Rank 0 has a second connection to each other
rank, for signs of life.

Another way for values, as NCCL, overrides `Transport.send_values` and `receive_values`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tl_devicefix.multihost.signing import SIGNATURE, Signer, WronglySigned

_HEADER = struct.Struct(f">Q{SIGNATURE}s")
_SIGNED = 1 << 16
"""Bytes of values up to which these are signed."""
_PART = 1 << 20
"""Bytes in which values are dropped for which there is no memory."""
EVERY = 0.5
"""Seconds between two signs of life."""
Lose = Callable[["int | None", str], None]
"""Is told which rank is lost, and why; or, without a rank, which one rank 0 has lost."""


class HostLost(RuntimeError):
    """A rank is lost, and with it the part of a model that its devices held.

    Attributes:
        rank: which one.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Connection:
    """One socket to another rank.

    Args:
        sock: the socket.
        signer: of this session.
        own: what messages of this end are called in signatures.
        other: what those of the other end are called.
    """

    def __init__(self, sock: socket.socket, signer: Signer, own: str, other: str) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)  # nobody knows how long a rank computes: the watch notices a loss
        self.sock, self._signer, self._sending = sock, signer, threading.Lock()
        self._places = map(f"{own} {{}}".format, itertools.count())
        self._other_places = map(f"{other} {{}}".format, itertools.count())

    def send(self, message: Any) -> None:
        """Send an object."""
        self._send(pickle.dumps(message, protocol=5))

    def receive(self) -> Any:
        """Wait for the next object."""
        nbytes, signature, place = self._next_header()
        message = bytearray(nbytes)
        self._receive_into(memoryview(message))
        self._signer.check(signature, message, place)
        return pickle.loads(message)  # a rank's, whose code runs here

    def send_values(self, values: torch.Tensor) -> None:
        """Send the values of a CPU tensor."""
        self._send(_bytes_of(values), all_signed=values.nbytes <= _SIGNED)

    def receive_values(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Wait for values.

        Raises:
            MemoryError: if there is no room for them; they are dropped.
        """
        nbytes, signature, place = self._next_header()
        if nbytes != math.prod(shape) * dtype.itemsize:
            raise ConnectionError(f"{nbytes} bytes came for values of shape {tuple(shape)}")
        try:
            values = torch.empty(tuple(shape), dtype=dtype)
        except RuntimeError as error:
            for start in range(0, nbytes, _PART):
                self._receive_into(memoryview(bytearray(min(_PART, nbytes - start))))
            raise MemoryError(str(error)) from error
        received = _bytes_of(values)
        self._receive_into(received)
        self._signer.check(signature, received if nbytes <= _SIGNED else _signed(nbytes), place)
        return values

    def is_readable(self) -> bool:
        """Whether something has come."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let the other rank notice that this one has ended."""
        self.sock.close()

    def _send(self, data: Any, all_signed: bool = True) -> None:
        nbytes = len(data)
        signed = data if all_signed else _signed(nbytes)
        with self._sending:
            header = _HEADER.pack(nbytes, self._signer.signature(signed, next(self._places)))
            if nbytes <= _SIGNED:
                self.sock.sendall(header + data)
            else:
                self.sock.sendall(header)
                self.sock.sendall(data)

    def _next_header(self) -> tuple[int, bytes, str]:
        header = bytearray(_HEADER.size)
        self._receive_into(memoryview(header))
        return *_HEADER.unpack(header), next(self._other_places)

    def _receive_into(self, data: memoryview) -> None:
        while data:
            received = self.sock.recv_into(data)
            if not received:
                raise ConnectionError("its connection was closed")
            data = data[received:]


def _signed(nbytes: int) -> bytes:
    return f"{nbytes} bytes".encode()


def _bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor."""
    flat = values.contiguous().view(-1)
    # Of a single value, torch lets any stride pass for contiguous, but not for another dtype.
    flat = flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)


class Transport:
    """All other ranks, as this one reaches them; if it does not, a `HostLost` is raised.

    Attributes:
        has_ended: whether all ranks are about to end, and none is lost.
    """

    def __init__(self, data: dict[int, Connection], signs_of_life: dict[int, Connection]) -> None:
        self._data, self._signs_of_life, self.has_ended = data, signs_of_life, False

    def send(self, rank: int, message: Any) -> None:
        """Send an object to a rank."""
        with _losing(rank):
            self._data[rank].send(message)

    def receive(self, rank: int) -> Any:
        """Wait for the next object of a rank."""
        with _losing(rank):
            return self._data[rank].receive()

    def send_values(self, rank: int, values: torch.Tensor) -> None:
        """Send the values of a CPU tensor to a rank."""
        with _losing(rank):
            self._data[rank].send_values(values)

    def receive_values(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Wait for values of a rank; it raises a MemoryError if there is no room for them."""
        with _losing(rank):
            return self._data[rank].receive_values(shape, dtype)

    def watch(self, lose: Lose, timeout: float) -> None:
        """From now on, show signs of life, and tell it when a rank shows none, or has ended."""
        threading.Thread(
            target=self._watch, args=(lose, timeout), daemon=True, name="watch"
        ).start()

    def tell_loss(self, why: str) -> None:
        """On rank 0: tell all other ranks that one is lost."""
        for connection in self._signs_of_life.values():
            with contextlib.suppress(OSError):
                connection.send(why)

    def close(self) -> None:
        """Close this process's connections, as in one that was forked from a rank."""
        for connection in (*self._data.values(), *self._signs_of_life.values()):
            connection.close()

    def _watch(self, lose: Lose, timeout: float) -> None:
        # It was last heard up to a beat before it was lost, and is looked for once a beat.
        limit = timeout - 2 * EVERY
        # Beats, not seconds: while this process stands still, so may the other ranks.
        silent = dict.fromkeys(self._signs_of_life, 0)
        while True:
            for rank, connection in self._signs_of_life.items():
                silent[rank] += 1
                try:
                    # To a rank that has ended it fails: but why that ended may be here, unread.
                    with contextlib.suppress(OSError):
                        connection.send(None)
                    while connection.is_readable():
                        silent[rank] = 0
                        if (lost := connection.receive()) is not None:
                            return self._tell(lose, None, lost)
                except (OSError, WronglySigned) as error:
                    return self._tell(lose, rank, said_by(error))
                if silent[rank] * EVERY > limit:
                    why = f"it gave no sign of life for {limit:g} s"
                    return self._tell(lose, rank, why)
            time.sleep(EVERY)

    def _tell(self, lose: Lose, rank: int | None, why: str) -> None:
        if not self.has_ended:
            lose(rank, why)


@contextlib.contextmanager
def _losing(rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, WronglySigned) as error:
        raise HostLost(said_by(error), rank) from error


def said_by(error: Exception) -> str:
    """Why a connection failed, as a clause."""
    return getattr(error, "strerror", None) or str(error)
