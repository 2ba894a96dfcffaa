"""The installed TransformerLens, in a process of its own."""

from __future__ import annotations

import pytest
from cases import Installed


@pytest.fixture(scope="session")
def installed():
    with Installed() as process:
        yield process
