"""Make a failing backward pass raise on simulated devices, where torch would end the process.

While an error passes through torch's autograd engine, the engine restores the device's stream. For
a backend in Python, that ends the process. So errors in hooks and operations are kept until the
engine is done. Then Ctrl-C is raised, or else the first error. A `Function.backward` may raise:
torch then clears Python's error indicator before it restores the stream.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

Result = TypeVar("Result")
Packed = TypeVar("Packed")
Hook = Callable[..., object]


class _Running(threading.local):
    """The number of engines and users' hooks running in this thread, and the errors they raised."""

    engines = hooks = 0

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


_running = _Running()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C until the end of a `with` block, and call the user's handler then."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no interrupt is raised in this thread
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            handler(*interrupts[0])


def run_backward(engine: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap torch's `_engine_run_backward`: after it has run, a kept error is raised."""

    def run(t_outputs: Sequence[object], *args: Any, **kwargs: object) -> Result:
        gradients = (args[0] if args else None) or ()
        for index, (output, gradient) in enumerate(zip(t_outputs, gradients)):
            _check_device(index, output, gradient)
        # Stay in this thread: torch would start a thread for each device, but knows of one only.
        with _interrupts_later(), torch.autograd.set_multithreading_enabled(False):
            return _raising_kept_errors(lambda: engine(t_outputs, *args, **kwargs))

    return run


def _raising_kept_errors(engine: Callable[[], Result]) -> Result:
    _running.engines += 1
    # Start from 0: if a user's hook runs this backward, its errors have to be kept too.
    hooks, _running.hooks = _running.hooks, 0
    try:
        result = engine()
    except Exception:
        if not _running.errors:  # otherwise it follows from the kept errors
            raise
    finally:
        errors, _running.errors = _running.errors, []
        _running.engines -= 1
        _running.hooks = hooks
    if errors:  # Ctrl-C first: the user wants to stop
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])
    return result


def _check_device(index: int, expected: object, gradient: object) -> None:
    if not isinstance(expected, torch.Tensor) or not isinstance(gradient, torch.Tensor):
        return
    if expected.device != gradient.device:
        raise RuntimeError(
            f"Function returned an invalid gradient at index {index} - expected device "
            f"{expected.device} but got {gradient.device}"
        )


def raise_or_keep(error: Exception) -> None:
    """Raise an operation's error; in a backward, but not in a hook, keep it and go on."""
    if _running.engines and not _running.hooks:
        _running.errors.append(error)
        return
    try:
        raise error
    finally:
        del error  # break the cycle error -> traceback -> error, which would keep tensors


def _kept(call: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
    """Call the user's code; if it fails within an engine, keep the error and call `otherwise`."""
    if not _running.engines:
        return call()
    if _running.errors:  # the pass has failed already, so the rest does not matter
        return otherwise()
    _running.hooks += 1
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  # Ctrl-C too; it is raised later
        _running.errors.append(error)
    finally:
        _running.hooks -= 1
    return otherwise()


class KeptErrors:
    """A user's backward hook; if it fails, its error is kept and the gradient is unchanged."""

    holds_users_hook = True  # a view of the model gets a copy that refers to the view's modules

    def __init__(self, hook: Hook) -> None:
        functools.update_wrapper(self, hook)  # TransformerLens 2 identifies hooks by name
        self._hook = hook  # last: `update_wrapper` copies the hook's own attributes

    def __call__(self, *args: object) -> object:
        """Call the hook, and check the device of the gradient that it returns."""

        def checked() -> object:
            result = self._hook(*args)
            # The arguments are (gradient,) or (parameter,) for a tensor's hook, (module,
            # of_outputs) for a module's pre-hook, and (module, of_inputs, of_outputs) for its hook.
            if len(args) == 1 and not isinstance(result, torch.Tensor | None):
                kind = type(result).__name__
                raise TypeError(f"expected Variable, but hook returned '{kind}'")  # as torch
            given = args[len(args) // 2]
            pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (given, result)))
            for index, (before, after) in enumerate(pairs):
                _check_device(index, before, after)
            return result

        return _kept(checked, lambda: None)


def registering(register: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a method that registers a backward hook, so that the hook's errors are kept."""

    @functools.wraps(register)
    def register_kept(self: object, hook: Hook, *args: object, **kwargs: object) -> Result:
        return register(self, KeptErrors(hook), *args, **kwargs)

    return register_kept


def saving(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `saved_tensors_hooks.__init__`, so that errors of the unpacking hook are kept."""

    def init_kept(
        self: saved_tensors_hooks,
        pack: Callable[[torch.Tensor], Packed],
        unpack: Callable[[Packed], torch.Tensor],
    ) -> None:
        # Also pack a function that makes zeros: the engine needs a tensor if unpacking fails.
        def pack_with_zeros(tensor: torch.Tensor) -> tuple[Packed, Callable[[], torch.Tensor]]:
            kind = {"dtype": tensor.dtype, "device": tensor.device}
            return pack(tensor), functools.partial(torch.zeros, tensor.shape, **kind)

        def unpack_kept(packed: tuple[Packed, Callable[[], torch.Tensor]]) -> torch.Tensor:
            value, zeros = packed
            return _kept(lambda: unpack(value), zeros)

        init(self, pack_with_zeros, unpack_kept)

    return init_kept
