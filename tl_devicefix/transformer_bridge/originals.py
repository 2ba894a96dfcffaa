"""All or nothing: while a Bridge's weights are replaced, what they were is kept.

Weights that lie on the CPU are kept as they are: as long as nothing writes to a checkpoint's
memory-mapped file, that takes no memory of the process. Those of a device are copied to host
memory as soon as new ones have taken their place, or, where it has no room, to a temporary file,
and let go.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from tl_devicefix.placement.devices import HOST
from tl_devicefix.tracebacks import let_go

_TENSORS = ("_parameters", "_buffers")


class Originals:
    """The state of modules as it was, to be put back if something fails.

    Args:
        spill_to: a directory for weights that host memory has no room for.
    """

    def __init__(self, spill_to: str) -> None:
        self._directory = Path(spill_to)
        self._states: list[tuple[Any, dict[str, Any]]] = []
        self._copies: dict[int, _Copied] = {}
        self._files = itertools.count()

    def keep(self, *owners: Any) -> None:
        """Keep what modules, or any objects, hold now; deeper modules have to be named too."""
        for owner in owners:
            state = dict(vars(owner))
            for name in _TENSORS:
                if isinstance(owner, nn.Module):
                    state[name] = copy.copy(state[name])
            self._states.append((owner, state))

    def make_room(self, modules: Iterable[nn.Module], in_use: Iterable[torch.Tensor]) -> None:
        """Let those kept tensors of modules that are used no more leave their device.

        Args:
            modules: kept before, and changed since.
            in_use: each parameter and buffer that the model has now. What shares its memory with
                one of them takes none, and stays.
        """
        changed = {id(module) for module in modules}
        used = {_memory(tensor) for tensor in in_use}
        for owner, state in self._states:
            if id(owner) not in changed:
                continue
            for kind in _TENSORS:
                for name, tensor in state[kind].items():
                    if isinstance(tensor, torch.Tensor) and _can_leave(tensor, used):
                        state[kind][name] = self._copied(tensor)

    def _copied(self, tensor: torch.Tensor) -> _Copied:
        known = self._copies.get(id(tensor))
        if known is None or known.is_not(tensor):
            known = _Copied(tensor, self._on_host(tensor.detach()))
            self._copies[id(tensor)] = known
        return known

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if psutil.virtual_memory().available > _ROOM_LEFT + tensor.nbytes:
            return tensor.to(HOST)
        file = self._directory / f"{next(self._files)}.pt"
        torch.save(tensor.to(HOST), file)
        return torch.load(file, mmap=True, weights_only=True)

    def put_back(self) -> None:
        """Restore everything that is kept.

        Raises:
            torch.OutOfMemoryError: if others have taken a device's memory meanwhile. The values are
                what they were all the same, but some are on the host.
        """
        for owner, state in self._states:
            vars(owner).clear()
            vars(owner).update(state)
        full: set[str] = set()
        for _, state in self._states:
            for kind in _TENSORS:
                for name, kept in state.get(kind, {}).items():
                    if isinstance(kept, _Copied):
                        state[kind][name] = kept.back(full)
        if full:
            raise torch.OutOfMemoryError(
                f"the weights are what they were, but {', '.join(sorted(full))} has no room for "
                "all of them any more, and the rest is on the host: free memory there, and call "
                "tl_devicefix.check(bridge, repair=True)"
            )


def _can_leave(tensor: torch.Tensor, used: set[int]) -> bool:
    return tensor.device.type not in ("cpu", "meta") and _memory(tensor) not in used


def _memory(tensor: torch.Tensor) -> int:
    """Which storage a tensor has, that it may share with others; its address is 0 on meta."""
    return tensor.untyped_storage()._cdata


class _Copied:
    """A tensor whose values are on the host, and which lives on only if someone else holds it.

    Args:
        tensor: on a device.
        values: on the host.
    """

    def __init__(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        self._tensor: weakref.ref[torch.Tensor] | torch.Tensor = weakref.ref(tensor)
        self._values, self._device = values, tensor.device
        self._is_parameter, self._requires_grad = (
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
        )

    def is_not(self, tensor: torch.Tensor) -> bool:
        """Whether this is another tensor, which had the same `id` before."""
        return isinstance(self._tensor, weakref.ref) and self._tensor() is not tensor

    def back(self, full: set[str]) -> torch.Tensor:
        """The tensor itself if it is still there, or one like it.

        Args:
            full: to which its device is added if that has no room.
        """
        if isinstance(self._tensor, torch.Tensor):
            return self._tensor
        tensor = self._tensor()
        if tensor is None:
            try:
                tensor = self._values.to(self._device)
            except torch.OutOfMemoryError:
                tensor = self._values
                full.add(str(self._device))
            if self._is_parameter:
                tensor = nn.Parameter(tensor, self._requires_grad)
        self._tensor = tensor  # tied modules get the same one
        return tensor


_ROOM_LEFT = 2 * 2**30
"""Bytes of host memory that are left to others."""


@contextlib.contextmanager
def all_or_nothing() -> Iterator[Originals]:
    """Within it, what is kept is put back if there is an error, or an interrupt."""
    with tempfile.TemporaryDirectory(prefix="tl_devicefix_") as directory:
        originals = Originals(directory)
        handled = id(sys.exc_info()[1])  # what the caller was handling is not ours
        try:
            yield originals
        except BaseException as error:
            # Its frames hold the weights that were being processed, in whose place others go.
            let_go(error, but_not=[handled])
            originals.put_back()
            raise
