"""Bridges over simulated devices, a machine for each test."""

from __future__ import annotations

from bridges import boot, dispatched, references  # noqa: F401
from machines import machine  # noqa: F401
