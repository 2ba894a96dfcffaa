"""The public calls of a class run where the installed TransformerLens has it."""

import pytest

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

collect_ignore = [
    *([] if has_hooked_transformer() else ["test_sweep.py"]),
    *([] if has_bridge() else ["test_bridge_sweep.py"]),
]


@pytest.fixture(scope="module")
def machine(simulated):
    with simulated(4) as machine:
        yield machine
