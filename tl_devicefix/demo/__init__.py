"""The demo and the self-check, on a small trained checkpoint that ships with the package."""

from __future__ import annotations

from tl_devicefix.demo.demo import CHECKPOINT, devices_for
from tl_devicefix.demo.recall_task import NAMES, OBJECTS

__all__ = ["CHECKPOINT", "NAMES", "OBJECTS", "devices_for"]
