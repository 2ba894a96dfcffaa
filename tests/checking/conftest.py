"""Models to check."""

from __future__ import annotations

from either_class import cls  # noqa: F401

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

if has_bridge():
    from bridges import boot  # noqa: F401
    from bridges import references as bridge_references  # noqa: F401

if has_hooked_transformer():
    from checked_models import load, model, reference  # noqa: F401
