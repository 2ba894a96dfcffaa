"""A backward that fails on simulated devices: it raises, where torch would end the process.

torch's autograd engine restores the stream of a device while an error passes through it, and for a
backend in Python that ends the process. So errors of hooks, of a `Function.backward`, and of
operations are kept until the engine is done, and the first is raised then; interrupts wait too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tl_devicefix.simulation import interrupts

Engine = Callable[..., Any]


class _Running(threading.local):
    """What runs in a thread: how many engines, and hooks of users; and what they raised."""

    def __init__(self) -> None:
        self.engines = 0
        self.hooks = 0
        self.errors: list[BaseException] = []


_here = _Running()


def run_backward(engine: Engine) -> Engine:
    """torch's `_engine_run_backward`, which raises what was kept while it ran.

    It runs in the thread that calls it: for others it would want one worker a device, but knows of
    one device only.
    """

    def run(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        _check_devices(t_outputs, args[0] if args else ())
        _here.engines += 1
        hooks, _here.hooks = _here.hooks, 0  # of an engine around this one
        try:
            threads = torch.autograd.set_multithreading_enabled
            with interrupts.kept(but_when=_is_in_hook), threads(False):
                result = engine(t_outputs, *args, **kwargs)
        except Exception:
            if not _here.errors:  # else it comes of these
                raise
        finally:
            _here.engines -= 1
            _here.hooks = hooks
            errors, _here.errors = _here.errors, []
        if errors:
            raise next((each for each in errors if not isinstance(each, Exception)), errors[0])
        return result

    return run


def _is_in_hook() -> bool:
    return _here.hooks > 0


def _check_devices(outputs: Sequence[Any], gradients: Any) -> None:
    for index, (output, gradient) in enumerate(zip(outputs, gradients or ())):
        if isinstance(gradient, torch.Tensor) and gradient.device != output.device:
            raise _gradient_error(index, output.device, gradient.device)


def _gradient_error(index: int, expected: torch.device, got: torch.device) -> RuntimeError:
    return RuntimeError(
        f"Function returned an invalid gradient at index {index} - expected device {expected} but "
        f"got {got}"
    )


def raise_or_keep(error: Exception) -> None:
    """Raise an operation's error; in a backward, keep it, and let the operation go on.

    Raises:
        Exception: the error.
    """
    if _here.engines and not _here.hooks:
        _here.errors.append(error)
        return
    try:
        raise error
    finally:
        del error  # or it and its traceback would hold each other, and what was allocated


def _kept(call: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Call what is the user's within an engine: its error is kept, and there is something else."""
    if _here.errors:
        return otherwise()
    _here.hooks += 1
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # an interrupt too; it is raised later
        _here.hooks -= 1  # before any call, at which there might be another
        _here.errors.append(error)
    else:
        _here.hooks -= 1
        return result
    return otherwise()


class KeptErrors:
    """A hook of a backward, whose error is kept and which then changes nothing.

    Args:
        hook: the user's.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        functools.update_wrapper(self, hook)  # TransformerLens 2 tells hooks by their names

    def __call__(self, *args: Any) -> Any:
        """Call the hook, and check where the gradient is that it returns."""

        def checked() -> Any:
            result = self._hook(*args)
            self._check(args[-1], result)
            return result

        return _kept(checked, lambda: None)

    def _check(self, given: Any, returned: Any) -> None:
        pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (given, returned)))
        for index, (before, after) in enumerate(pairs):
            both = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
            if both and before.device != after.device:
                raise _gradient_error(index, before.device, after.device)


def registering(register: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.register_hook` and its like, which keep the hook's errors."""

    def register_kept(self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        return register(self, KeptErrors(hook), *args, **kwargs)

    return register_kept


def applying(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a `torch.autograd.Function.backward`, which keeps its errors."""

    def apply_kept(self: Any, *args: Any) -> Any:
        return _kept(lambda: apply(self, *args), lambda: (None,) * len(self.needs_input_grad))

    return apply_kept


def saving(init: Callable[..., None]) -> Callable[..., None]:
    """`saved_tensors_hooks.__init__`: the hook that unpacks keeps its errors."""

    def init_kept(self: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        def pack_with_kind(tensor: torch.Tensor) -> Any:
            return pack(tensor), (tensor.shape, tensor.dtype, tensor.device)

        def unpack_kept(packed: Any) -> Any:
            value, (shape, dtype, device) = packed
            if not _here.engines:
                return unpack(value)
            otherwise = functools.partial(torch.zeros, shape, dtype=dtype, device=device)
            return _kept(lambda: unpack(value), otherwise)

        init(self, pack_with_kind, unpack_kept)

    return init_kept
