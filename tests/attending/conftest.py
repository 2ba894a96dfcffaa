"""Models over the devices of a machine that is open for a whole module, and how they attend."""

from __future__ import annotations

import pytest
from spread_of_either_class import *  # noqa: F403

from tl_devicefix.attending import fused


@pytest.fixture
def fused_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of SDPA had, of blocks that build no scores."""
    calls: list[int] = []
    there = fused._fused

    def counting(q, *args):  # type: ignore[no-untyped-def]
        calls.append(q.shape[2])
        return there(q, *args)

    monkeypatch.setattr(fused, "_fused", counting)
    return calls
