"""Plans are made for toy models, too."""

from __future__ import annotations

from tl_devicefix.patching.versions import has_hooked_transformer

if has_hooked_transformer():
    from toy_configs import config  # noqa: F401
