"""All or nothing: while a Bridge's weights are replaced, what they were is kept.

Weights that lie on the CPU are kept as they are: as long as nothing writes to a checkpoint's
memory-mapped file, that takes no memory of the process. Those of a device go to host memory as
soon as new ones have taken their place, or, where it has no room, to a temporary file.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from tl_devicefix.devices import HOST
from tl_devicefix.tracebacks import let_go

_MODULE_STATE = ("_parameters", "_buffers")


class Originals:
    """The state of modules as it was, to be put back if something fails.

    Args:
        spill_to: a directory for weights that host memory has no room for.
    """

    def __init__(self, spill_to: str) -> None:
        self._directory = Path(spill_to)
        self._states: list[tuple[Any, dict[str, Any]]] = []
        self._left: dict[int, tuple[torch.Tensor, torch.device]] = {}

    def keep(self, *owners: Any) -> None:
        """Keep what modules, or any objects, hold now; deeper modules have to be named too."""
        for owner in owners:
            state = dict(vars(owner))
            for name in _MODULE_STATE:
                if isinstance(owner, nn.Module):
                    state[name] = copy.copy(state[name])
            self._states.append((owner, state))

    def make_room(self, modules: Iterable[nn.Module], in_use: set[int]) -> None:
        """Let those kept tensors of modules that are used no more leave their device.

        Args:
            modules: kept before, and changed since.
            in_use: `id` of each parameter and buffer that the model has now.
        """
        changed = {id(module) for module in modules}
        for owner, state in self._states:
            if id(owner) not in changed:
                continue
            for tensor in (*state["_parameters"].values(), *state["_buffers"].values()):
                if tensor is None or id(tensor) in in_use or id(tensor) in self._left:
                    continue
                if tensor.device.type not in ("cpu", "meta"):
                    self._left[id(tensor)] = tensor, tensor.device
                    tensor.data = self._on_host(tensor.data)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if psutil.virtual_memory().available > _ROOM_LEFT + tensor.nbytes:
            return tensor.to(HOST)
        file = self._directory / f"{len(self._left)}.pt"
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
        for tensor, device in self._left.values():
            try:
                tensor.data = tensor.data.to(device)
            except torch.OutOfMemoryError:
                full.add(str(device))
        if full:
            raise torch.OutOfMemoryError(
                f"the weights are what they were, but {', '.join(sorted(full))} has no room for "
                "all of them any more, and the rest is on the host: free memory there, and call "
                "tl_devicefix.check(bridge, repair=True)"
            )


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
