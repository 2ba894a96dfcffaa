"""The demo and the self-check, on a small trained checkpoint that ships with the package."""

from __future__ import annotations

from tl_devicefix.demo.demo import CHECKPOINT, NAMES, OBJECTS, devices_for

__all__ = ["CHECKPOINT", "NAMES", "OBJECTS", "devices_for"]
