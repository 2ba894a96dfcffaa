"""Devices of other processes: what placing knows of `multihost/`.

Blocks may be placed on such a device, and its process runs them. No tensor of this process can be
there. Here, the device is a meta device with an index, and a `TensorElsewhere` stands for a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

_Value = TypeVar("_Value")


def elsewhere(number: int) -> torch.device:
    """Return the meta device that stands for a device elsewhere, by its number among those."""
    # torch accepts any index for meta; an ordinary meta tensor's device has none.
    return torch.device("meta", number)


def is_elsewhere(device: torch.device) -> bool:
    """Return True if no tensor of this process can be on a device."""
    return device.type == "meta" and device.index is not None


class Elsewhere:
    """The devices elsewhere, their names and free memory. This base class has none.

    Attributes:
        devices: all devices, in the order in which users number them: this process's first. Empty
            if none is elsewhere.
        listed: the devices as a text for messages.
    """

    devices: Sequence[torch.device] = ()
    listed = ""

    def find(self, name: str) -> torch.device:
        """Return the device that has a name with a slash, such as "node-b/cuda:1".

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
"""The record for a process without other hosts."""


class TensorElsewhere(torch.Tensor):
    """A tensor whose values are in another process, until `read` fetches them."""

    def read(self) -> torch.Tensor:
        """Return the values, as a plain tensor of this process."""
        raise NotImplementedError


def plain(value: _Value) -> _Value | torch.Tensor:
    """Return a tensor elsewhere as a plain one, and anything else as it is."""
    return value.read() if isinstance(value, TensorElsewhere) else value
