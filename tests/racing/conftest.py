"""Models over devices that run behind the host, open for a whole module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from spread_of_either_class import *  # noqa: F403

from racing import asynchronous
from racing.machine import RacingMachine


@pytest.fixture(scope="module")
def machine() -> Iterator[RacingMachine]:
    with asynchronous(4) as machine:
        yield machine
