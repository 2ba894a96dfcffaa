"""Cases of the random trial, of which `nox -s fuzz` runs thousands.

A case that fails is printed. To run it again with fewer operations, put it in the place of
`draw(seed)` below, with `from cases import Case`.
"""

from __future__ import annotations

import pickle

from cases import draw, installed_outcome, outcome
from comparison import assert_agrees


def test_a_random_case_is_as_installed(seed, installed):
    case = draw(seed)
    print(case)
    meanwhile = installed.submit(installed_outcome, case)
    actual = outcome(case, with_package=True)
    expected = pickle.loads(meanwhile.result())
    print("errors:", *actual.errors, "installed:", *expected.errors, sep="\n")
    for i, (ours, theirs) in enumerate(zip(actual.seen, expected.seen)):
        print(f"value {i}: {theirs[0]}")
        assert_agrees(ours, theirs, tolerance=case.tolerance)
    assert len(actual.seen) == len(expected.seen)
