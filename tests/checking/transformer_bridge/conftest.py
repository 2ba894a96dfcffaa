"""Bridges over simulated devices."""

from __future__ import annotations

from bridges import boot, dispatched, references  # noqa: F401
