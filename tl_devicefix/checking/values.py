"""Tensors that have no values or another's memory, and hooks that are left."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.checking.places import tensors
from tl_devicefix.checking.report import Finding
from tl_devicefix.dispatch.naming import expression, named_modules
from tl_devicefix.dispatch.user_modules import PlacedTensor
from tl_devicefix.monkeypatch.patch import package_of
from tl_devicefix.placement.remote_tensor import RemoteTensor


def meta_findings(model: Any) -> Iterator[Finding]:
    """Tensors without values."""
    on_meta: dict[int, PlacedTensor] = {}
    for tensor in tensors(model):
        if tensor.value.is_meta:
            on_meta.setdefault(id(tensor.value), tensor)
    for tensor in on_meta.values():
        name, shape = tensor.full_name, list(tensor.value.shape)
        message = f"{name} {shape} is on the meta device, so it has no values"
        fix = f'model.load_state_dict({{"{name}": values}}, strict=False, assign=True)'
        yield Finding("meta", name, message, fix)


def storage_findings(
    model: Any, attached: Container[nn.Module], are_tied: Callable[[Any, str, str], bool]
) -> Iterator[Finding]:
    """Parameters that overlap in memory, and are not meant to."""
    seen: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = defaultdict(list)
    for tensor in tensors(model, attached):
        value, name = tensor.value, tensor.full_name
        if not isinstance(value, nn.Parameter) or value.is_meta or not value.numel():
            continue
        if type(value) is RemoteTensor:
            continue
        start = value.data_ptr()
        steps = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
        end = start + (steps + 1) * value.element_size()
        others = seen[value.device, value.untyped_storage().data_ptr()]
        overlapping = [other for a, b, other in others if start < b and a < end]
        others.append((start, end, name))
        for other in overlapping:
            if not are_tied(model, other, name):
                it = expression(name)
                message = f"{name} shares its memory with {other}: what changes one, changes both"
                fix = f"{it} = torch.nn.Parameter({it}.detach().clone())"
                yield Finding("storage", name, message, fix)
                break


# --------------------------------------------------------------------------------------------
# Hooks: TransformerLens's on hook points, and PyTorch's on modules

_PYTORCH = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}

_LIBRARIES = ("tl_devicefix", "transformer_lens", "torch", "transformers", "accelerate")
"""Whose own hooks on a module belong there."""


def hook_findings(model: Any) -> Iterator[Finding]:
    """Hooks of users that are left: the next run has them too."""
    for path, module in named_modules(model):
        handles = _handles(module)
        if names := ", ".join(_name(h) for h in handles if not h.is_permanent):
            message = f"{path} still has a hook ({names})"
            yield Finding("hooks", path, message, "model.reset_hooks()")
        own = {handle.hook.id for handle in handles}
        for attribute, kind in _PYTORCH.items():
            for key, hook in getattr(module, attribute).items():
                if key not in own and package_of(hook) not in _LIBRARIES:
                    name = path or "model"
                    message = f"{name} still has a PyTorch {kind} ({_name(hook)})"
                    fix = f"del {expression(path)}.{attribute}[{key}]"
                    yield Finding("hooks", name, message, fix)


def hook_notes(model: Any) -> Iterator[Finding]:
    """Permanent hooks of users: they are meant to stay."""
    for path, module in named_modules(model):
        permanent = (handle for handle in _handles(module) if handle.is_permanent)
        users = (
            h for h in permanent if package_of(getattr(h, "user_hook", None)) not in _LIBRARIES
        )
        if names := ", ".join(map(_name, users)):
            yield Finding("hooks", path, f"{path} has a permanent hook ({names})")


def _handles(module: nn.Module) -> list[Any]:
    return [*module.fwd_hooks, *module.bwd_hooks] if isinstance(module, HookPoint) else []


def _name(hook: Any) -> str:
    """The name of a hook or a handle's; not the repr of a partial, which may show a whole cache."""
    if hasattr(hook, "is_permanent"):
        # TransformerLens 2.x keeps no user_hook, but its repr as the name of what it registers.
        if (own := getattr(hook, "user_hook", None)) is None:
            registered = (hook.hook.hooks_dict_ref() or {}).get(hook.hook.id)
            name = str(getattr(registered, "__name__", "unknown"))
            return re.sub(r"^<function (.*) at 0x\w+>$", r"\1", name)[:80]
        hook = own
    hook = getattr(hook, "func", hook)
    return (getattr(hook, "__qualname__", None) or type(hook).__name__)[:80]
