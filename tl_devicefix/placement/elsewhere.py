"""Devices that no tensor of this process can be on: the seam between placing and `multihost/`.

Blocks may be placed on them: another process runs those blocks for this one. Here, such a device
is one of torch's meta devices with an index, and a tensor there is a `TensorElsewhere`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

_Value = TypeVar("_Value")


def elsewhere(number: int) -> torch.device:
    """Return the stand-in for a device elsewhere, by its number among these."""
    # torch takes any index of meta; the device of an ordinary meta tensor has none.
    return torch.device("meta", number)


def is_elsewhere(device: torch.device) -> bool:
    """Return True if no tensor of this process can be on a device."""
    return device.type == "meta" and device.index is not None


class Elsewhere:
    """Names and memory of devices elsewhere. This class knows of none; a subclass may.

    Attributes:
        devices: all devices by the numbers that users give, this process's first; empty if none is
            elsewhere.
        listed: the same as a text for messages.
    """

    devices: Sequence[torch.device] = ()
    listed = ""

    def find(self, name: str) -> torch.device:
        """Return the device of a name with a slash, such as "node-b/cuda:1".

        Raises:
            ValueError: if there is none.
        """
        raise ValueError(
            f"device {name!r} names a host, but no other host has joined: call "
            "tl_devicefix.init_hosts() first, or leave the host out"
        )

    def name_of(self, device: torch.device) -> str:
        """Return the name of a device, here or elsewhere, as a user may give it."""
        return str(device)

    def free_memory(self, device: torch.device) -> int | None:
        """Return the bytes that are free on a device elsewhere; None if nobody knows."""
        return None


NOBODY = Elsewhere()
"""Knows of no devices elsewhere."""


class TensorElsewhere(torch.Tensor):
    """A tensor whose values this process gets when it reads them."""

    def read(self) -> torch.Tensor:
        """Return the values, as a plain tensor of this process."""
        raise NotImplementedError


def plain(value: _Value) -> _Value | torch.Tensor:
    """Return a tensor elsewhere as a plain one, and anything else as it is."""
    return value.read() if isinstance(value, TensorElsewhere) else value
