"""Cases of the random trial, of which `nox -s fuzz` runs thousands.

A case that fails says which operations it takes. To run it again, paste it:

    import tl_devicefix
    from cases import Case, Installed, difference
    case = Case(("llama", 2, None), 1, [("code", "RMSNorm.forward"), ("generate", 2, True, False)])
    with Installed() as installed:
        print(difference(case, installed.run(case)))
"""

from __future__ import annotations

import pytest
from cases import report
from pools import IS_BRIDGE

SEEDS = range(10 if IS_BRIDGE else 100)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_case_is_as_installed(seed, installed):
    found = report(seed, installed)
    assert found is None, found
