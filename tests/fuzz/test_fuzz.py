"""Cases of the random trial, of which `nox -s fuzz` runs thousands.

A case that fails is printed. To run it again with fewer operations, put it in the place of
`draw(seed)` below, with `from cases import Case`.
"""

from __future__ import annotations

import pickle

from cases import draw, outcome
from comparison import assert_agrees


def test_a_random_case_is_as_installed(seed, elsewhere):
    case = draw(seed)
    print(case)
    installed = elsewhere.submit(outcome, case, with_package=False)
    actual, errors = pickle.loads(outcome(case, with_package=True))
    expected, installed_errors = pickle.loads(installed.result())
    print("errors:", *errors, "installed:", *installed_errors, sep="\n")
    for i, (ours, theirs) in enumerate(zip(actual, expected)):
        print(f"value {i}: {theirs[0]}")
        assert_agrees(ours, theirs, tolerance=case.tolerance)
    assert len(actual) == len(expected)
