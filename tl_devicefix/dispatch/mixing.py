"""`mix_devices`: torch functions that mix the devices in use, for a whole script."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack

from tl_devicefix.dispatch.joining import Joining, bytes_of
from tl_devicefix.dispatch.naming import line_of_user
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.in_use import device_of_result, devices_in_use
from tl_devicefix.placement.memory import gib


class Copied(NamedTuple):
    """What one line of a script had copied: "script.py:12", bytes, and in how many copies."""

    line: str
    nbytes: int
    times: int


class mix_devices(Joining):
    """Let torch functions mix tensors of the devices in use, within a `with`.

    A function that torch refuses, as its tensors are on several devices, gets them brought
    together: what is changed in place (or by ``out=``), and what is indexed, stays where it is;
    other results lie at home, unless one operand is larger than all the others together and on
    another device (not the host): then there. Gradients go back to where each operand is.

    The devices in use are those of the models that are placed (the host if blocks are offloaded),
    and that of `gather_on`, which is then home. A tensor of any other device, such as the CPU, is
    left alone, and torch says so. A gradient given to `backward` or `torch.autograd.grad` goes to
    its output's device.

    It holds in this thread: enter it in each thread that mixes. Autograd runs PyTorch's hooks on
    gradients in other threads, for CUDA devices. Code that torch compiles is left as it is. While
    it is on, torch calls Python at each of its functions.

    Args:
        report: print what was copied, and for which lines, at the end of the `with`.

    >>> with mix_devices(report=True):  # doctest: +SKIP
    ...     stream = torch.stack(kept)  # which hooks of several blocks kept
    """

    def __init__(self, *, report: bool = False) -> None:
        super().__init__()
        self._report = report
        self._lines: dict[str, list[int]] = {}
        self._depth = 0

    def __enter__(self) -> mix_devices:
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self._report and not self._depth:
            print(self)

    @property
    def copied(self) -> list[Copied]:
        """What was copied so far, by the lines that had it copied, most bytes first."""
        lines = (Copied(line, *counts) for line, counts in self._lines.items())
        return sorted(lines, key=lambda copied: copied.nbytes, reverse=True)

    def __repr__(self) -> str:
        lines = self.copied
        everything = Copied("all", sum(c.nbytes for c in lines), sum(c.times for c in lines))
        rows = [f"{gib(c.nbytes):>12} {c.times:>7} x  {c.line}" for c in (everything, *lines)]
        return "\n".join(["mix_devices copied", *rows])

    def devices(self) -> frozenset[torch.device]:
        """Those in use; none in code that torch compiles."""
        return frozenset() if torch.compiler.is_compiling() else devices_in_use()

    def target(self, tensors: list[torch.Tensor], devices: frozenset[torch.device]) -> torch.device:
        """Home, or where an operand is that is larger than all the others together."""
        home = device_of_result(devices)
        sizes = {id(tensor): bytes_of(tensor) for tensor in tensors if tensor.device in devices}
        largest = max(tensors, key=lambda tensor: sizes.get(id(tensor), -1))
        if largest.device not in (home, HOST) and 2 * sizes[id(largest)] > sum(sizes.values()):
            return largest.device
        return home

    def count(self, nbytes: int) -> None:
        """Count it for the line that mixes, here and in those around this one."""
        line = line_of_user(sys._getframe(1))
        for mixing in {self, *_mixing_here()}:
            counts = mixing._lines.setdefault(line, [0, 0])
            counts[0] += nbytes
            counts[1] += 1


def _mixing_here() -> list[mix_devices]:
    """Those that are on in this thread."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, mix_devices)]
