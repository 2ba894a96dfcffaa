"""Files that several hosts see: each rank writes its own part of one, from its host's memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tl_devicefix.multihost import commands
from tl_devicefix.multihost.commands import NotWritten
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.file_parts import Pieces
from tl_devicefix.simulation.backend import active_machine
from tl_devicefix.simulation.geometry import Geometry
from tl_devicefix.simulation.machine import DEVICE_TYPE

_numbers = itertools.count()


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
            OSError that names the rank and the file, or HostLost.
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
