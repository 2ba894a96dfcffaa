"""`mix_devices`: torch functions that mix the devices in use, for a whole script.

Two things that are no torch functions on tensors are replaced meanwhile: how hooks on gradients are
registered, which run when and in which thread autograd does; and `assert_close`, which compares
devices itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.dispatch.joining import JoinedAt, Joining, bytes_of, tensors_in
from tl_devicefix.dispatch.naming import line_of_user
from tl_devicefix.monkeypatch.replacing import Replacing
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
    its output's device. PyTorch's own hooks on gradients (`Tensor.register_hook`,
    `register_full_backward_hook`, ...) mix if they were registered within it, in whichever thread
    autograd runs them. `torch.testing.assert_close` compares values wherever they are.

    It holds in this thread: enter it in each thread that mixes. Code that torch compiles is left
    as it is. While it is on, torch calls Python at each of its functions.

    Args:
        report: print what was copied, and for which lines, at the end of the `with`.

    >>> with mix_devices(report=True):  # doctest: +SKIP
    ...     stream = torch.stack(kept)  # which hooks of several blocks kept
    """

    def __init__(self, *, report: bool = False) -> None:
        super().__init__()
        self._report = report
        self._lines: dict[str, list[int]] = {}
        self._replaced: list[AbstractContextManager[None]] = []

    def __enter__(self) -> mix_devices:
        replaced = _replacing(_REPLACEMENTS)
        replaced.__enter__()
        self._replaced.append(replaced)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._replaced.pop().__exit__(None, None, None)
        if self._report and not self._replaced:
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


class _UnlessMixing:
    """What `check_device` is by default: true in threads in which devices do not mix.

    So it also holds where a script has imported the name `assert_close`.
    """

    def __bool__(self) -> bool:
        return not _mixing_here()


def _registering(own: Callable[..., Any]) -> Callable[..., Any]:
    """`register_full_backward_hook` or its like, whose hooks may mix devices."""

    @functools.wraps(own)
    def register(self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, _hook_of_gradients(hook) if _mixing_here() else hook, *args, **kwargs)

    return register


_REPLACEMENTS = (
    (torch.Tensor, "register_hook", _registering),
    (torch.Tensor, "register_post_accumulate_grad_hook", _registering),
    (torch.nn.Module, "register_full_backward_hook", _registering),
    (torch.nn.Module, "register_full_backward_pre_hook", _registering),
    (
        torch.testing.assert_close,
        "__kwdefaults__",
        lambda defaults: {**defaults, "check_device": _UnlessMixing()},
    ),
)
_replacing = Replacing()


def _hook_of_gradients(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A user's backward hook, which may mix devices; the gradients it returns are where they were.

    Args:
        hook: of a gradient, or of a module and its gradients.
    """

    @functools.wraps(hook, updated=())
    def mixing(*args: Any) -> Any:
        gradients = args[min(1, len(args) - 1)]
        # A module's first gradients may all be None: those of an embedding's input are.
        here = next((tensor.device for tensor in tensors_in(args)), None)
        if here is None:
            return hook(*args)
        with JoinedAt(here, devices_in_use()):
            return _where(gradients, hook(*args))

    return mixing


def _where(gradients: Any, result: Any) -> Any:
    """What a hook returned, each gradient on the device of the one that it was called with."""
    if isinstance(gradients, tuple):
        if isinstance(result, tuple) and len(result) == len(gradients):
            return tuple(map(_where, gradients, result))
        return _where(gradients[0], result) if len(gradients) == 1 else result
    if isinstance(gradients, torch.Tensor) and gradients.device in devices_in_use():
        return move(result, gradients.device)
    return result
