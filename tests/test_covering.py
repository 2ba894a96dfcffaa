"""The cover that the default run takes of a product has what it promises, and is small."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from covering import covering

SIZES = {"kind": ["llama", "gpt2", "bloom"], "spread": [1, 3, 4], "dtype": ["float32", "bfloat16"]}
PRODUCT = [dict(zip(SIZES, values)) for values in product(*SIZES.values())]


def pairs(combined: list[Any], names: tuple[str, ...]) -> set[tuple[Any, ...]]:
    return {
        tuple(combination[name] for name in two)
        for combination in combined
        for two in combinations(names, 2)
    }


def test_every_value_is_there_once_or_a_little_more() -> None:
    cover = covering(PRODUCT)

    for name, values in SIZES.items():
        assert {combination[name] for combination in cover} == set(values)
    assert len(cover) == 3


def test_every_pair_of_a_group_is_there_and_every_value_of_the_others() -> None:
    cover = covering(PRODUCT, [("kind", "spread")])

    assert pairs(cover, ("kind", "spread")) == pairs(PRODUCT, ("kind", "spread"))
    assert {combination["dtype"] for combination in cover} == set(SIZES["dtype"])
    assert len(cover) == 9


def test_every_pair_is_fewer_than_all_combinations() -> None:
    cover = covering(PRODUCT, list(combinations(SIZES, 2)))

    assert pairs(cover, tuple(SIZES)) == pairs(PRODUCT, tuple(SIZES))
    assert len(cover) < len(PRODUCT) * 0.6


def test_combinations_that_do_not_exist_are_not_made_up() -> None:
    exist = [
        combination
        for combination in PRODUCT
        if combination["kind"] == "llama" or combination["spread"] == 4
    ]

    cover = covering(exist, [("kind", "spread")])

    assert all(combination in exist for combination in cover)
    assert pairs(cover, ("kind", "spread")) == pairs(exist, ("kind", "spread"))


@pytest.mark.parametrize(
    "groups", [[], [("kind", "spread")], [tuple(SIZES)], list(combinations(SIZES, 2))]
)
def test_it_is_the_same_each_time_and_in_order(groups: list[tuple[str, ...]]) -> None:
    cover = covering(PRODUCT, groups)

    assert cover == covering(PRODUCT, groups)
    assert [PRODUCT.index(combination) for combination in cover] == sorted(
        map(PRODUCT.index, cover)
    )
