"""Which functions answer for a model: those in `hooked`, or those of the same names in `bridge`."""

from __future__ import annotations

from typing import Any

from tl_devicefix.monkeypatch.versions import is_bridge


def of_class(model: Any) -> Any:
    """The module with what is asked of a model of this class."""
    # Imported here, as TransformerLens may lack the one class or the other.
    if is_bridge(model):
        from tl_devicefix.checking import bridge

        return bridge
    from tl_devicefix.checking import hooked

    return hooked
