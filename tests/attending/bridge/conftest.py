"""Bridges over simulated devices."""

from __future__ import annotations

from bridges import boot, references  # noqa: F401
