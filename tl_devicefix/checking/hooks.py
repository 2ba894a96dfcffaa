"""Hooks that a run has left behind: TransformerLens's on hook points, and PyTorch's on modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.checking.report import Finding
from tl_devicefix.dispatch.naming import expression, named_modules

_PYTORCH = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}

_LIBRARIES = ("tl_devicefix", "transformer_lens", "torch", "transformers", "accelerate")
"""Whose own hooks on a module belong there."""


def hook_findings(model: Any) -> list[Finding]:
    """Hooks that are still there, of users': the next run has them too."""
    found = []
    for path, module in named_modules(model):
        if isinstance(module, HookPoint) and (names := _names(module, permanent=False)):
            message = f"{path} still has a hook ({names})"
            found.append(Finding("hooks", path, message, "model.reset_hooks()"))
        for where, key, hook in _on_module(module):
            message = f"{path or 'model'} still has a PyTorch {_PYTORCH[where]} ({_name(hook)})"
            fix = f"del {expression(path)}.{where}[{key}]"
            found.append(Finding("hooks", path or "model", message, fix))
    return found


def hook_notes(model: Any) -> list[Finding]:
    """Permanent hooks: they are meant to stay."""
    return [
        Finding("hooks", path, f"{path} has a permanent hook ({names})")
        for path, module in named_modules(model)
        if isinstance(module, HookPoint) and (names := _names(module, permanent=True))
    ]


def _names(point: HookPoint, permanent: bool) -> str:
    handles = [each for each in _handles(point) if each.is_permanent is permanent]
    if permanent:  # a Bridge has some of its own
        handles = [h for h in handles if not _is_a_library_s(getattr(h, "user_hook", None))]
    return ", ".join(_name_of_user_s(each) for each in handles)


def _handles(point: HookPoint) -> list[Any]:
    return [*point.fwd_hooks, *point.bwd_hooks]


def _on_module(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """A module's PyTorch hooks that are no library's: which dict they are in, their key there."""
    known = {each.hook.id for each in _handles(module)} if isinstance(module, HookPoint) else ()
    for where in _PYTORCH:
        for key, hook in getattr(module, where).items():
            if key not in known and not _is_a_library_s(hook):
                yield where, key, hook


def _is_a_library_s(hook: Any) -> bool:
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return owner.partition(".")[0] in _LIBRARIES


def _name_of_user_s(handle: Any) -> str:
    hook = getattr(handle, "user_hook", None)
    if hook is not None:
        return _name(hook)
    wrapped = (handle.hook.hooks_dict_ref() or {}).get(handle.hook.id)  # TransformerLens 2.x
    return re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", getattr(wrapped, "__name__", "?"))


def _name(hook: Any) -> str:
    """The name of a function; not the repr of a partial, which may show a whole cache."""
    hook = getattr(hook, "func", hook)
    return getattr(hook, "__qualname__", None) or type(hook).__name__
