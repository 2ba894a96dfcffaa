"""Other hosts: how they are asked, what devices they have, and which have joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class HostLost(RuntimeError):
    """A host is lost, with its blocks, which the message names.

    Attributes:
        host (str): its name.
    """

    def __init__(self, message: str, host: str) -> None:
        super().__init__(message)
        self.host = host


class Connection(Protocol):
    """How a host's worker is asked.

    - Several threads ask at once, and a call may last.
    - Arguments and values are None, numbers, strings, dtypes, dense CPU tensors without gradients,
      and tuples, lists and dicts of these.
    - A tensor that arrives is its receiver's own, and may be written to.

    Attributes:
        name: the host's.
    """

    name: str

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker, and wait for what it returns.

        Raises:
            HostLost: at once, if the host is lost.
        """


@dataclass(frozen=True, eq=False)
class Host:
    """A host that has joined.

    Attributes:
        connection: how it is asked.
        devices: what it calls each of its devices ("cuda:0"), in order.
        forgotten: numbers of what the worker may let go of: it is told so with the next run.
    """

    connection: Connection
    devices: tuple[str, ...]
    forgotten: list[int] = field(default_factory=list)

    def take_forgotten(self) -> list[int]:
        """What it is told now; others may add to it meanwhile."""
        return [self.forgotten.pop() for _ in range(len(self.forgotten))]


_joined: tuple[Host, ...] = ()


def join(hosts: Sequence[Host]) -> None:
    """Have the devices of these hosts in this process, and those of no others."""
    global _joined
    _joined = tuple(hosts)


def joined() -> tuple[Host, ...]:
    """The hosts that have joined, in order; this process's own is not among them."""
    return _joined
