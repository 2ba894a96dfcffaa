"""Hooks that are left: TransformerLens's on hook points, and PyTorch's on modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attention.implementation import HOOKS
from tl_devicefix.checking.report import Finding
from tl_devicefix.dispatch.naming import expression, named_modules
from tl_devicefix.monkeypatch.patch import LIBRARIES, package_of

_NOT_THE_USERS = ("tl_devicefix", *LIBRARIES)


def hook_findings(model: Any) -> Iterator[Finding]:
    """Hooks of users that are left: the next run has them too."""
    for path, module in named_modules(model):
        handles = _handles(module)
        if names := ", ".join(_name(h) for h in handles if not h.is_permanent):
            message = f"{path} still has a hook ({names})"
            yield Finding("hooks", path, message, "model.reset_hooks()")
        own = {handle.hook.id for handle in handles}
        for attribute in HOOKS:
            kind = attribute.strip("_s").replace("pre_", "pre-").replace("_", " ")
            for key, hook in getattr(module, attribute).items():
                if key not in own and package_of(hook) not in _NOT_THE_USERS:
                    name = path or "model"
                    message = f"{name} still has a PyTorch {kind} ({_name(hook)})"
                    fix = f"del {expression(path)}.{attribute}[{key}]"
                    yield Finding("hooks", name, message, fix)


def hook_notes(model: Any) -> Iterator[Finding]:
    """Permanent hooks of users: they are meant to stay."""
    for path, module in named_modules(model):
        permanent = (handle for handle in _handles(module) if handle.is_permanent)
        users = (
            h for h in permanent if package_of(getattr(h, "user_hook", None)) not in _NOT_THE_USERS
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
