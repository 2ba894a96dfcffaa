"""A cover of a product: some of its combinations, with every value, and every pair that matters.

A test that is parametrised over several things, fixtures too, is a product. With `pytest --full`
all of its combinations run; by default some, which have every row of every `parametrize` between
them. A mark says what else they are to have:

    @pytest.mark.cover(("kind", "spread"))   # every value of every parameter, every kind on every
                                             # spread: what matters together
    @pytest.mark.cover                       # every value alone, also of what is in rows
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest
from model_classes import BRIDGE

from tl_devicefix.monkeypatch.versions import has_hooked_transformer, installed

Combination = Mapping[str, Hashable]
"""Name of a parameter -> its value."""


def covering(
    product: Sequence[Combination], groups: Sequence[Sequence[str]] = ()
) -> list[Combination]:
    """The combinations of a product, in its order, that together have all that it has.

    Args:
        product: the combinations that exist, which may be fewer than values allow.
        groups: parameters of which every combination of values is to be there that the product
            has; of every other parameter, every value.
    """
    has: list[set[Hashable]] = [
        {
            *each.items(),
            *(tuple((name, each[name]) for name in group if name in each) for group in groups),
        }
        for each in product
    ]
    order = list(range(len(product)))
    random.Random(0).shuffle(order)  # so that no value is chosen more often for being the first
    seen: set[Hashable] = set()
    chosen = []
    for n_new in range(max(map(len, has), default=0), 0, -1):  # first what adds most
        for index in order:
            if len(has[index] - seen) == n_new:
                seen |= has[index]
                chosen.append(index)
    return [product[index] for index in sorted(chosen)]


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests that the default run leaves out, as others of their function cover them."""
    functions: dict[tuple[pytest.Collector | None, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions.setdefault((item.parent, item.originalname), []).append(item)
    others: list[pytest.Item] = []
    for tests in functions.values():
        product = [_combination_of(test) for test in tests]
        kept = {id(combination) for combination in covering(product, _groups_of(tests[0]))}
        others += [test for test, each in zip(tests, product) if id(each) not in kept]
    return others


def _groups_of(test: pytest.Item) -> list[Sequence[str]]:
    """What is to be there of each combination: as the test is marked, or its rows."""
    marks = list(test.iter_markers("cover"))
    if marks:
        return [group for mark in marks for group in mark.args]
    rows = (mark.args[0] for mark in test.iter_markers("parametrize"))
    return [row.replace(" ", "").split(",") if isinstance(row, str) else row for row in rows]


def _combination_of(test: pytest.Function) -> Combination:
    """The test's parameters; whether it fails unpatched is one more, so that some still do."""
    values: dict[str, Hashable] = {
        name: value if isinstance(value, (str, int)) else repr(value)
        for name, value in test.callspec.params.items()
    }
    return {**values, "fails_unpatched": fails_unpatched(test)}


def parameters_of(test: pytest.Item) -> Mapping[str, Any]:
    """Values of a test's parameters, by their names."""
    return test.callspec.params if hasattr(test, "callspec") else {}


def fails_unpatched(test: pytest.Item) -> bool:
    """Whether a test is marked so; on one device there is nothing for the patches to mend."""
    marked = test.get_closest_marker("fails_unpatched") is not None
    return marked and parameters_of(test).get("n_devices") != 1


OF_FILES = ("test_saved_activations_resumed", "test_load_activations")
"""Saved activations, whichever model they are of."""
BRIDGE_ON_3 = ("test_parity",)
"""Where the Bridge of TransformerLens 3.9 is tested: whether it gives what it gave unpatched."""


def is_left_to_others(item: pytest.Item) -> bool:
    """Whether another version's default run has this test, of the same code.

    The newest HookedTransformer is in TransformerLens 3, the newest Bridge in 4: all of each is
    tested there, and elsewhere what depends on TransformerLens.
    """
    if has_hooked_transformer() and _is_of_bridge(item):
        return item.path.stem not in BRIDGE_ON_3
    # Simulated devices, Ray and files know nothing of TransformerLens.
    is_of_torch = item.path.parent.name in ("simulation", "hosts") or item.path.stem in OF_FILES
    return installed().major != 3 and is_of_torch


def _is_of_bridge(item: pytest.Item) -> bool:
    in_files = item.path.parent.name == "transformer_bridge" or "bridge" in item.path.stem
    return in_files or parameters_of(item).get("model_class") == BRIDGE
