"""Cases of the random trial, of which `nox -s fuzz` runs thousands.

A case that fails is printed. To run it again with fewer operations, paste it:

    import tl_devicefix
    from cases import Case, Installed, difference
    case = Case(("llama", 2, None), 1, [("generate", 2, True, False)], is_fused=True)
    with Installed() as installed:
        print(difference(case, installed.run(case)))
"""

from __future__ import annotations

from cases import difference, draw


def test_a_random_case_is_as_installed(seed, installed):
    case = draw(seed)
    found = difference(case, installed.run_seed(seed))
    assert found is None, f"{case}\n{found}"
