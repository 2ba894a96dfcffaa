"""Models to check."""

from __future__ import annotations

from tl_devicefix.patching.versions import has_hooked_transformer

if has_hooked_transformer():
    from checked_models import load, model, reference  # noqa: F401
