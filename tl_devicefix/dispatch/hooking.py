"""Hooks across devices: what a hook takes from the model's other devices comes to its activation.

A hook sees the activation on its block's device. Written for one device, it adds a steering vector
or patches in a cached activation, which are at home. While it runs, torch functions that mix the
model's devices, or the device of `gather_on`, bring their arguments to the activation's device;
what is changed in place stays where it is. What the hook returns goes on from there too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint

from tl_devicefix.dispatch.mixing import JoinedAt
from tl_devicefix.dispatch.scheduler import refuse_in_run
from tl_devicefix.monkeypatch.patch import package_of, patches
from tl_devicefix.placement.devices import printed
from tl_devicefix.placement.in_use import chosen_device
from tl_devicefix.placement.placement import Placement

_DEVICES = "_tl_devicefix_devices"


def allow_mixing_in_hooks(model: Any, placement: Placement) -> None:
    """Let the hooks of a model that is on several devices use tensors from all of them."""
    for module in model.modules():
        if isinstance(module, HookPoint):
            module.__dict__[_DEVICES] = frozenset(placement.memories)


def forbid_mixing_in_hooks(model: Any) -> None:
    """Undo `allow_mixing_in_hooks`."""
    for module in model.modules():
        module.__dict__.pop(_DEVICES, None)


@patches(
    "HookPoint",
    takes="self hook dir is_permanent",
    why="a hook may use tensors of all the model's devices",
)
def add_hook(original: Any, self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
    """`HookPoint.add_hook`; on a model on several devices, the hook may mix them.

    Raises:
        RuntimeError: in a run that was given a view of the hook point's model.
    """
    refuse_in_run(self)
    if _is_caching(hook):  # which uses its activation alone
        n_before = len(self._forward_hooks)
        added = original(self, hook, *args, **kwargs)
        if len(self._forward_hooks) > n_before:
            setattr(self._forward_hooks[max(self._forward_hooks)], _ONLY_LOOKS, True)
        return added
    across = HookAcrossDevices(hook)
    added = original(self, across, *args, **kwargs)
    for handles in (self.fwd_hooks, self.bwd_hooks):
        for handle in handles:
            if getattr(handle, "user_hook", None) is across:
                handle.user_hook = hook
    return added


_ONLY_LOOKS = "_tl_devicefix_only_looks"


def only_looks(hook: Any) -> bool:
    """Whether a hook of torch's keeps an activation, detached, and does nothing else."""
    return hasattr(hook, _ONLY_LOOKS)


def _is_caching(hook: Any) -> bool:
    """Whether it is TransformerLens's own, which `run_with_cache` adds."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    name = getattr(function, "__qualname__", "").rpartition(".")[2]
    return name in ("save_hook", "cache_hook") and package_of(function) == "transformer_lens"


class HookAcrossDevices:
    """A hook as `HookPoint.add_hook` takes it, that may use tensors of all the model's devices."""

    def __init__(self, hook: Any) -> None:
        self.__wrapped__ = hook  # as `functools.wraps` names it

    def __repr__(self) -> str:
        # As in TransformerLens: a partial's repr shows its arguments, which may be whole caches.
        if isinstance(self.__wrapped__, functools.partial):
            return f"partial({self.__wrapped__.func!r},...)"
        return repr(self.__wrapped__)

    def __call__(self, activation: Any, *, hook: Any) -> Any:
        """Call the hook."""
        point = vars(hook).get("_target", hook)  # of a Bridge's hook point by another name
        devices: frozenset[torch.device] = vars(point).get(_DEVICES, frozenset())
        # A Bridge's hook points may hand out tuples, or None.
        device = getattr(activation, "device", None)
        chosen = chosen_device(device)
        if chosen is not None and device is not None:
            devices |= {device, chosen}
        if not devices or device is None:
            return self.__wrapped__(activation, hook=hook)
        try:
            with JoinedAt(device, devices):
                result = self.__wrapped__(activation, hook=hook)
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            raise RuntimeError(
                f"the hook on {hook.name} mixes devices: its activation is on {printed(device)}, "
                f"so bring other tensors there with .to(activation.device) ({error})"
            ) from error
        return _at(result, device, devices, hook.name)


def _at(result: Any, device: torch.device, devices: frozenset[torch.device], name: str) -> Any:
    """What a hook returned, on its activation's device."""
    if isinstance(result, tuple) and len(result) == 1:  # backward hooks may return (gradient,)
        return (_at(result[0], device, devices, name),)
    if not isinstance(result, torch.Tensor) or result.device == device:
        return result
    if result.device not in devices:
        raise RuntimeError(
            f"the hook on {name} returned a tensor on {printed(result.device)}, but its activation "
            f"is on {printed(device)}: return it with .to(activation.device)"
        )
    return result.to(device)
