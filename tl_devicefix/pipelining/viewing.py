"""A view of a model of either class: modules and hooks of its own, around the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tl_devicefix.monkeypatch.versions import class_names, is_bridge, is_hooked_transformer


def viewing(model: Any) -> Callable[[], Any]:
    """What makes views of a model.

    Raises:
        TypeError: if it is of neither class.
    """
    # Imported here, as TransformerLens may lack the one class or the other.
    if is_bridge(model):
        from tl_devicefix.transformer_bridge.alignment import view_of as view_of_bridge

        return functools.partial(view_of_bridge, model)
    if is_hooked_transformer(model):
        from tl_devicefix.hooked_transformer.views import view_of

        return functools.partial(view_of, model)
    raise TypeError(f"the model must be a {class_names()}, but is a {type(model).__name__}")
