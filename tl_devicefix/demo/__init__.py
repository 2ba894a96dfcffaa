"""The demo and the self-check, on a small trained checkpoint that ships with the package."""

from __future__ import annotations

from tl_devicefix.demo.demo import CHECKPOINT

__all__ = ["CHECKPOINT"]
