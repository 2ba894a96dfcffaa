"""The installed TransformerLens, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import Installed


@pytest.fixture(scope="session")
def installed() -> Iterator[Installed]:
    with Installed() as process:
        yield process
