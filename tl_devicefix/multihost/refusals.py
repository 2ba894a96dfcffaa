"""What the host of a block would not see: it is refused, so that no change is ignored.

A block on another host computes with what its host has. Here, everything in the block is as it was
when the block was loaded, but for hooks on its hook points and modules in their place.
"""

from __future__ import annotations

import sys
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformer_lens.hook_points import HookPoint

from tl_devicefix.dispatch.mixing import OutsideBlocks, only_looks
from tl_devicefix.fusing.listening import RECORDING, hooks_of, records, unsupported_mode
from tl_devicefix.fusing.one_forward import FACTS, kept_in_forward
from tl_devicefix.multihost.worker import HAS_MLP_IN


class Unseen(Exception):
    """Something that the host of a block would not see."""


class AsLoaded:
    """What a block was like when it was loaded.

    Modules are told by their paths in the block, so that copies and views of it compare alike.
    """

    def __init__(self, block: Any) -> None:
        self._points: set[str] = set()
        named = self._modules_of(block)
        self._points = {path for path, module in named if isinstance(module, HookPoint)}
        self._hooks = {
            path: {number for hooks in hooks_of(vars(module)) for number in hooks}
            for path, module in named
        }
        self._facts = self._facts_of(named)

    def listened(self, block: Any) -> dict[str, bool]:
        """Paths of hook points on which somebody listens, and whether that is only to look.

        Raises:
            Unseen: if there is something else in the block that its host does not know of.
        """
        listened = {}
        modules = self._modules_of(block)
        for path, module in modules:
            known = self._hooks.get(path, ())
            new = [
                hook
                for of_kind in hooks_of(vars(module))
                for number, hook in of_kind.items()
                if number not in known and not records(hook)
            ]
            if path in self._points:
                if type(module) is not HookPoint or "forward" in vars(module):
                    listened[path] = False
                elif new:
                    listened[path] = all(map(only_looks, new))
            elif new and path:
                raise Unseen(f"{path} has hooks of torch's: put them on its hook points")
        self._refuse_changes(self._facts_of(modules))
        return listened

    def _modules_of(self, block: Any) -> list[tuple[str, Any]]:
        """The modules in a block, but for those in what stands in a hook point's place."""
        modules, seen = [("", block)], {block}
        for path, module in modules:
            if path not in self._points:
                for name, child in module._modules.items():
                    if child is not None and child not in seen:
                        seen.add(child)
                        modules.append((f"{path}.{name}" if path else name, child))
        return modules

    def _facts_of(self, modules: list[tuple[str, Any]]) -> dict[tuple[str, str], Any]:
        """Of each module that computes: its class, weights, and attributes that it may read."""
        facts: dict[tuple[str, str], Any] = {}
        for path, module in modules:
            if path not in self._points:
                facts[path, "class"] = path and type(module)
                for values in (vars(module), module._parameters, module._buffers):
                    for name, value in values.items():
                        if name in _NOT_FACTS or name.startswith("_tl_devicefix"):
                            continue
                        if isinstance(value, _FACTS):
                            # A view has another bound method.
                            facts[path, name] = getattr(value, "__func__", value)
                        elif callable(value):
                            facts[path, name] = type(value)
        facts.pop(("", "forward"), None)  # one in the place of the whole block's acts here
        return facts

    def _refuse_changes(self, facts: dict[tuple[str, str], Any]) -> None:
        loaded = self._facts
        if all(map(is_, facts.values(), loaded.values())) and facts.keys() == loaded.keys():
            return
        for path, name in {**loaded, **facts}:
            before, now = (has.get((path, name), Unseen) for has in (loaded, facts))
            has_values = isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor)
            if before is not now and (has_values or before != now):
                called = path or "the block"
                what = (
                    "is another module" if name == "class" else f"has a {name} that was not loaded"
                )
                raise Unseen(f"{called} {what}")


_NOT_FACTS = {
    *(*vars(nn.Module()), HAS_MLP_IN),
    # What a Bridge notes in a forward.
    *("_start_at_layer_idx", "_start_residual", "_stop_at_layer_idx", "_fired_hook_out"),
}
_FACTS = (
    *(bool, int, float, str, type(None), torch.Tensor),
    *(FunctionType, BuiltinFunctionType, MethodType, partial),
)


def _is_recorded() -> bool:
    """Whether transformers records outputs of layers, other than a Bridge, who drops them."""
    is_of_bridge, *_ = kept_in_forward().get(FACTS) or [False]
    recording = sys.modules.get(RECORDING)
    return not is_of_bridge and bool(recording and recording._active_collector.get())


def refuse_what_is_on() -> None:
    """Refuse what changes the blocks of this process alone.

    Raises:
        Unseen: if there is something.
    """
    if (why := unsupported_mode()) is not None:
        raise Unseen(why)
    if _is_recorded():
        raise Unseen("transformers was asked for hidden states or attentions")
    if torch._C._is_any_autocast_enabled():
        raise Unseen("torch.autocast is on")
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    for mode in modes:
        if not isinstance(mode, OutsideBlocks | DeviceContext):
            raise Unseen(f"a {type(mode).__name__} is active")
