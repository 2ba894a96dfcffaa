"""Placements are decided for toy models."""

from __future__ import annotations

from toy_configs import config  # noqa: F401
