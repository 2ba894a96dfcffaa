"""Files that several hosts see: each rank writes its own part of one, from its host's memory."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash

from tl_devicefix.hosts import commands
from tl_devicefix.hosts.commands import NotWritten
from tl_devicefix.hosts.far_devices import FarDevices
from tl_devicefix.simulation.backend import active_machine
from tl_devicefix.simulation.geometry import Geometry
from tl_devicefix.simulation.machine import DEVICE_TYPE

Pieces = Sequence[torch.Tensor]
"""A tensor as contiguous ones that follow each other along its first axis."""

_AT_ONCE = 1 << 24
"""Bytes that are written together, if pieces are smaller."""
_numbers = itertools.count()


def checksum(of: bytes = b"") -> Any:
    """A checksum, which may be gone on with; it is many times as fast as a disk."""
    return xxhash.xxh3_128(of)


def write_at(file: BinaryIO, offset: int, tensors: Iterable[Pieces]) -> list[bytes]:
    """Write tensors that follow each other from a place of a file on; returns their checksums."""
    file.seek(offset)
    found = []
    for pieces in tensors:
        of_tensor = checksum()
        for piece in pieces:
            values: Any = piece.reshape(-1).view(torch.uint8).numpy()
            file.write(values)
            of_tensor.update(values)
        found.append(of_tensor.digest())
    return found


# What a rank does that lends its devices


def text_of(path: str) -> str | None:
    """What is in a file, if it is there, and its directory may be written to."""
    try:
        is_ours = os.access(Path(path).parent, os.W_OK)
        return Path(path).read_text() if is_ours else None
    except (OSError, ValueError):
        return None


def write_into(path: str, nbytes: int, offset: int, tensors: Iterable[Pieces]) -> list[bytes]:
    """Write a part of a file that is there, onto the disk; returns the tensors' checksums.

    Raises:
        OSError: if that cannot be done, or the file has not so many bytes.
    """

    def opened(path: str, _: int) -> int:
        # By itself, NFS writes whole pages, and with them what was there before others wrote it.
        return os.open(path, os.O_WRONLY | os.O_DSYNC)

    with open(path, "wb", buffering=_AT_ONCE, opener=opened) as file:
        there = os.fstat(file.fileno()).st_size
        if there != nbytes:
            said = f"Not the file of rank 0, as it has {there} bytes here and {nbytes} there"
            raise OSError(errno.ESTALE, said)
        return write_at(file, offset, tensors)


# What rank 0 has of it


def other_host(device: torch.device) -> OtherHost | None:
    """The host of a device, if that is another rank's."""
    if device.type != DEVICE_TYPE:
        return None
    far = active_machine().asynchronous
    return OtherHost(far, device) if isinstance(far, FarDevices) and _rank(far, device) else None


def _rank(far: FarDevices, device: torch.device) -> int:
    return far.places[device.index].rank


class Arrival(NamedTuple):
    """Of what a rank was told to copy to its host's memory."""

    wait: Callable[[], Any]

    def synchronize(self) -> None:
        """Wait for it.

        Raises:
            RuntimeError: what failed there; or the rank is lost.
        """
        self.wait()


class OtherHost:
    """Memory of another rank's host, and files that the rank writes from there.

    Args:
        far: the devices of all ranks.
        device: one of the rank's.

    Attributes:
        rank: which one.
    """

    def __init__(self, far: FarDevices, device: torch.device) -> None:
        self._far, self._device = far, device.index
        self.rank = _rank(far, device)

    def text_of(self, path: Path) -> tuple[str | None, str]:
        """What the rank reads in a file, if it is there and may be written beside; its name."""
        found: tuple[str | None, str] = self._far.ask(
            self.rank, commands.Look(os.path.abspath(path))
        )()
        return found

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory as bytes: a tensor without values here, with which it is let go."""
        geometry = Geometry(torch.Size([nbytes]), (1,), torch.uint8)
        return self._far.allocate_on_host(geometry, self.rank)

    def copy(self, here: torch.Tensor, tensor: Any) -> None:
        """Have a tensor copied to its memory."""
        if tensor.device.type == DEVICE_TYPE:
            self._far.copy(here, tensor._cpu, self._device, tensor.device.index)
        else:
            self._far.copy(here, tensor, self._device, None)

    def arrivals(self, devices: Iterable[torch.device]) -> list[Arrival]:
        """What is waited for by who waits for what was told to be copied."""
        return [Arrival(self._far.ask(self.rank, commands.Synchronize()))]

    def write(
        self, path: Path, nbytes: int, offset: int, tensors: Sequence[Pieces]
    ) -> Callable[[], list[bytes]]:
        """Have a part of a file written from its memory, beside what the rank computes.

        Args:
            path: of a file that is there.
            nbytes: how many it has.
            offset: of the first tensor.
            tensors: which follow each other.

        Returns:
            What waits until that is on the disk, and gives the tensors' checksums. It raises an
            OSError that names the rank and the file, or RankLost.
        """
        pieces = tuple(tuple(map(self._far.stored, each)) for each in tensors)
        told = commands.Write(next(_numbers), os.path.abspath(path), nbytes, offset, pieces)
        wait = self._far.ask(self.rank, told)

        def written() -> list[bytes]:
            found: list[bytes] | NotWritten = wait()
            if isinstance(found, NotWritten):
                raise OSError(found.errno, found.why, str(path))
            return found

        return written
