"""What torch itself does otherwise while devices mix: backward hooks, and `assert_close`.

Neither is torch functions on tensors: a hook runs when, and in which thread, autograd does, and has
to return its gradient on the device that it came from; `assert_close` compares devices itself.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.dispatch.joining import JoinedAt, tensors_in
from tl_devicefix.placement.in_use import devices_in_use

_REGISTERING = (
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (torch.nn.Module, "register_full_backward_hook"),
    (torch.nn.Module, "register_full_backward_pre_hook"),
)
_DEFAULTS: dict[str, Any] = torch.testing.assert_close.__kwdefaults__ or {}
_lock = threading.RLock()  # a thread's end may be noticed within it
_threads = 0
_replaced: list[tuple[Any, str, Any, Any]] = []


class ChangedTorch:
    """Torch, changed once for all threads in which devices mix, as long as one of them holds this.

    Args:
        is_mixing: whether they do in the thread that asks. In others, torch does as ever.
    """

    def __init__(self, is_mixing: Callable[[], bool]) -> None:
        _change(is_mixing)
        # Nobody restores it in a thread that ends while devices mix in it.
        weakref.finalize(self, _restore).atexit = False


class _UnlessMixing:
    """What `check_device` is by default: true in threads in which devices do not mix.

    So it also holds where a script has imported the name `assert_close`.
    """

    def __init__(self, is_mixing: Callable[[], bool]) -> None:
        self._is_mixing = is_mixing

    def __bool__(self) -> bool:
        return not self._is_mixing()


def _change(is_mixing: Callable[[], bool]) -> None:
    global _threads
    with _lock:
        _threads += 1
        if _threads > 1:
            return
        for owner, name in _REGISTERING:
            own = vars(owner)[name]
            ours = _registering(own, is_mixing)
            _replaced.append((owner, name, own, ours))
            setattr(owner, name, ours)
        _DEFAULTS["check_device"] = _UnlessMixing(is_mixing)


def _restore() -> None:
    global _threads
    with _lock:
        _threads -= 1
        if _threads:
            return
        for owner, name, own, ours in _replaced:
            if vars(owner)[name] is ours:  # or else someone has replaced it since, or put it back
                setattr(owner, name, own)
        _replaced.clear()
        _DEFAULTS["check_device"] = True


def _registering(own: Callable[..., Any], is_mixing: Callable[[], bool]) -> Callable[..., Any]:
    """`Tensor.register_hook` or its like, whose hooks may mix devices."""

    @functools.wraps(own)
    def register(self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        if is_mixing() and not isinstance(hook, _HookOfGradients):
            hook = _HookOfGradients(hook)
        return own(self, hook, *args, **kwargs)

    return register


class _HookOfGradients:
    """A backward hook that may mix devices; the gradients that it returns are where they were.

    Args:
        hook: the user's: of a gradient, or of a module and its gradients.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._of_user = hook
        functools.update_wrapper(self, hook, updated=())

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        given = args[min(1, len(args) - 1)]
        # A module's first gradients may all be None: those of an embedding's input are.
        here = next((tensor.device for tensor in tensors_in(args)), None)
        if here is None:
            return self._of_user(*args)
        with JoinedAt(here, devices_in_use()):
            result = self._of_user(*args)
        return _where(given, result)


def _where(given: Any, result: Any) -> Any:
    """What a hook returned, each gradient on the device of the one that was given."""
    if isinstance(result, tuple) and isinstance(given, tuple) and len(result) == len(given):
        return tuple(_where(before, after) for before, after in zip(given, result))
    if isinstance(given, tuple) and len(given) == 1:
        return _where(given[0], result)
    if isinstance(given, torch.Tensor) and given.device in devices_in_use():
        return move(result, given.device)
    return result
