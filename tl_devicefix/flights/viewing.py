"""Views of a model of either class: modules and hooks of their own, around the same weights."""

from __future__ import annotations

from typing import Any

from tl_devicefix.patching.versions import class_names, is_bridge, is_hooked_transformer


def view_of(model: Any) -> Any:
    """A view of a model.

    Raises:
        TypeError: if it is of neither class.
    """
    return _of_class(model).view_of(model)


def restore(view: Any) -> None:
    """Have a view be again what it was when it was made, whatever a run has set or added."""
    _of_class(view).restore(view)


def _of_class(model: Any) -> Any:
    # Imported here, as TransformerLens may lack the one class or the other.
    if is_bridge(model):
        from tl_devicefix.bridge import views

        return views
    if is_hooked_transformer(model):
        from tl_devicefix.hooked import views as hooked_views

        return hooked_views
    raise TypeError(f"the model must be a {class_names()}, but is a {type(model).__name__}")
