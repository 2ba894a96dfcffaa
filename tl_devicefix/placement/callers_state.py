"""What torch keeps for each thread, taken from the caller's thread into another.

Gradient and inference mode, autocast, the modes of torch functions and operations
(`torch.set_default_device`, `mix_devices`), hooks of saved tensors, the current devices and
streams, and, as contextvars, what `gather_on` has chosen.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatching

_autograd: Any = torch._C._autograd


class CallersState:
    """What is in force in the thread that makes this.

    Args:
        devices: those whose current streams matter.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = tuple(devices)
        types = tuple(dict.fromkeys(device.type for device in devices))
        self._context = contextvars.copy_context()
        self._set: list[Callable[[], Any]] = [
            functools.partial(torch.set_num_threads, torch.get_num_threads()),
            *(setting for device in devices for setting in _current_stream(device)),
            # After the streams, as to set one makes its device the current one.
            *(setting for kind in types for setting in _current_device(kind)),
        ]
        multithreading = torch._C._is_multithreading_enabled()  # type: ignore[attr-defined]
        self._enter: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
            functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
            functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            functools.partial(torch.autograd.set_multithreading_enabled, multithreading),
            *(_autocast(kind) for kind in _casting((*types, "cpu"))),
            *_saved_tensors_hooks(),
            *_modes(_get_current_function_mode_stack(), _push_mode, _pop_mode),
            *_modes(
                dispatching._get_current_dispatch_mode_stack(),
                dispatching._push_mode,
                dispatching._pop_mode,
            ),
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in this thread, with all of it in force."""
        return self._context.copy().run(self._run, function, args)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        for each in self._set:
            each()
        with contextlib.ExitStack() as stack:
            for enter in self._enter:
                stack.enter_context(enter())
            return function(*args)


def _current_device(kind: str) -> Iterator[Callable[[], Any]]:
    module = torch.get_device_module(kind)
    if kind != "cpu" and hasattr(module, "current_device"):
        yield functools.partial(module.set_device, module.current_device())


def _current_stream(device: torch.device) -> Iterator[Callable[[], Any]]:
    module = torch.get_device_module(device.type)
    if device.type != "cpu" and hasattr(module, "set_stream"):
        yield functools.partial(module.set_stream, module.current_stream(device))


def _casting(kinds: Iterable[str]) -> Iterator[str]:
    """The types of device that autocast is on for: there are types that do not support it."""
    return filter(torch.is_autocast_enabled, dict.fromkeys(kinds))


def _autocast(kind: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    dtype, caching = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    return functools.partial(torch.autocast, kind, dtype, True, caching)


def _saved_tensors_hooks() -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """The innermost `torch.autograd.graph.saved_tensors_hooks`, which alone has a say."""
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        push, pop = _autograd._push_saved_tensors_default_hooks, _pop_saved_tensors_hooks
        yield functools.partial(_within, functools.partial(push, *hooks), pop)


def _pop_saved_tensors_hooks() -> None:
    _autograd._pop_saved_tensors_default_hooks()


def _modes(
    stack: Iterable[Any], push: Callable[[Any], Any], pop: Callable[[], Any]
) -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
    for mode in stack:
        yield functools.partial(_within, functools.partial(push, mode), pop)


@contextlib.contextmanager
def _within(push: Callable[[], Any], pop: Callable[[], Any]) -> Iterator[None]:
    push()
    try:
        yield
    finally:
        pop()
