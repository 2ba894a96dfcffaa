"""On which host activations are kept and written: where they were computed, if that can be."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tl_devicefix.dispatch.naming import stacklevel_of_user
from tl_devicefix.multihost.files import OtherHost, other_host
from tl_devicefix.offload.copying import copies_beside_computing, module_with_streams


class ThisHost:
    """Memory of this host.

    Where devices have streams, the memory is pinned and copies are on a stream of their own, so
    that the next forward runs meanwhile. Elsewhere a copy is done at once.

    Args:
        devices: from which will be copied.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._pinned = any(map(copies_beside_computing, devices))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory as bytes."""
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return made.pin_memory() if self._pinned else made

    def copy(self, here: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start to copy a tensor."""
        with _on_copy_stream(tensor):
            here.copy_(tensor, non_blocking=True)

    def arrivals(self, devices: Iterable[torch.device]) -> list[Any]:
        """What is waited for by who waits for copies that were started from some devices."""
        streams = (device for device in devices if module_with_streams(device) is not None)
        return [_copy_stream(device).record_event() for device in streams]


Host = ThisHost | OtherHost


class Group(NamedTuple):
    """Names of tensors that are on one device: it copies them to a part of its own."""

    names: list[str]
    host: Host


def others_of(groups: Iterable[Group]) -> dict[str, OtherHost]:
    """By name, the other rank's host that a tensor is kept on, if it is."""
    others = ((each, each.host) for each in groups)
    return {n: host for each, host in others if isinstance(host, OtherHost) for n in each.names}


class Hosts:
    """Which host keeps and writes what.

    Args:
        devices: of the model.
        mark: a file in the directory that is written to.
        text: what is in it.
    """

    def __init__(self, devices: Iterable[torch.device], mark: Path, text: str) -> None:
        self._this, self._others = ThisHost(devices), dict[int, Host]()
        self._mark, self._text = mark, text
        self._blind: list[str] = []

    def groups(self, tensors: Mapping[str, torch.Tensor], compared: Collection[str]) -> list[Group]:
        """Tensors by device, and where each device's are kept.

        Args:
            tensors: by name.
            compared: names of those whose values are needed here.

        Warns:
            UserWarning: if another rank that has some does not see the directory.
        """
        found: dict[tuple[torch.device, Host], list[str]] = {}
        for name, tensor in tensors.items():
            host = self._this if name in compared else self._host_of(tensor.device)
            found.setdefault((tensor.device, host), []).append(name)
        if self._blind:
            warnings.warn(
                f"{' and '.join(self._blind)} cannot write to {self._mark.parent}, so what is "
                "computed there comes to rank 0, which writes it: harvest to a directory that all "
                "hosts have at the same path",
                stacklevel=stacklevel_of_user(sys._getframe()),
            )
        return [Group(names, host) for (_, host), names in found.items()]

    def _host_of(self, device: torch.device) -> Host:
        other = other_host(device)
        if other is None:
            return self._this
        if other.rank not in self._others:
            text, name = other.text_of(self._mark)
            self._others[other.rank] = other if text == self._text else self._this
            if text != self._text:
                self._blind.append(name)
        return self._others[other.rank]


@contextlib.contextmanager
def _on_copy_stream(tensor: torch.Tensor) -> Any:
    """Within it, copies of a tensor are beside what its device computes, after what made it."""
    module = module_with_streams(tensor.device)
    if module is None:
        yield
        return
    stream = _copy_stream(tensor.device)
    stream.wait_stream(module.current_stream(tensor.device))
    tensor.record_stream(stream)
    with module.stream(stream):
        yield


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """Of its own: on that of `offload/copying.py`, weights come to the device."""
    return module_with_streams(device).Stream(device)
