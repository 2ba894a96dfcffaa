"""Suggest a name if a hook, or a read of a cache, names a hook point that the model lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from tl_devicefix.misspelt import UnknownName, shown, which_hook_point
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.types import Model

T = TypeVar("T")

_WHY = "an error that suggests a hook point's name"


@patches("HookedTransformer", takes="self fwd_hooks bwd_hooks", why=_WHY)
@patches("TransformerBridge", takes="self fwd_hooks bwd_hooks", why=_WHY)
def hooks(original: Callable[..., T], self: Model, *args: object, **kwargs: object) -> T:
    """Wrap `hooks`: check the names, and suggest one for an unknown name.

    Raises:
        KeyError: if the model has no hook point of that name. For TransformerLens 3's Bridge,
            which ignores such a hook, this is a warning.
        TypeError: if an item of a list is not a pair.
    """
    _check_hooks(self, args, kwargs)
    return original(self, *args, **kwargs)


def _check_hooks(model: Model, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    given = [kwargs.get("fwd_hooks"), kwargs.get("bwd_hooks"), *args[:2]]
    lists = [some for some in given if isinstance(some, list | tuple | dict)]
    for item in (item for some in lists for item in some):
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise TypeError(
                f"hooks must be a list of (name, function), but {shown(item)} is in it: write "
                "[(name, function)]"
            )
        name = item[0]
        modules = vars(model).get("mod_dict", {})  # a HookedTransformer's; `hooks` rejects modules
        if not _is_hook_point(model, name) and name not in modules:
            if modules or installed().major > 3:
                raise UnknownName(_sentence(model, name))
            warnings.warn(f"a hook does not run: {_sentence(model, name)}", stacklevel=4)


@patches("TransformerBridge", takes="self input fwd_hooks bwd_hooks", why=_WHY)
def run_with_hooks(original: Callable[..., T], self: Model, *args: object, **kwargs: object) -> T:
    """Wrap `run_with_hooks`: names are checked as in `hooks`."""
    _check_hooks(self, args[1:], kwargs)
    return original(self, *args, **kwargs)


def why_not_cached(model: Model, name: str) -> str:
    """Say why an activation is not in a cache of a model."""
    # A cache loaded from disk may have no model.
    if hasattr(model, "hook_dict") and not _is_hook_point(model, name):
        return _sentence(model, name)
    return (
        f"{name} is not in this cache, see cache.keys(): names_filter or stop_at_layer left it "
        "out, or a setting such as model.set_use_attn_result(True) turns it on before you run"
    )


def _is_hook_point(model: Model, name: object) -> bool:
    """Return True for a hook point's name, and for anything that is not a string."""
    # A Bridge rebuilds `hook_dict` at each access, which takes 75 ms for 80 layers.
    made = vars(model).get("_hook_registry", ())
    return not isinstance(name, str) or name in made or name in model.hook_dict


def _sentence(model: Model, name: object) -> str:
    near = which_hook_point(name, model.hook_dict) or "; see model.hook_dict"
    return f"this model has no hook point {shown(name)}{near}"
