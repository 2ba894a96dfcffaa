"""A load that is refused leaves nothing behind."""

from __future__ import annotations

from refusals import refused, snapshot  # noqa: F401
