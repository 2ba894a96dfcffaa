"""Views of a HookedTransformer."""

from __future__ import annotations

from typing import Any

from tl_devicefix.dispatch import views
from tl_devicefix.dispatch.views import Twins


def view_of(model: Any) -> Any:
    """A view of a HookedTransformer: see `dispatch/views.py:view_of`."""
    return views.view_of(model, Twins())
