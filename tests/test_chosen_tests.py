"""The cover of a product that tests are chosen by."""

from __future__ import annotations

from covering import covering


def test_cover_has_every_pair_of_a_group_and_every_other_value():
    product = [
        {"kind": kind, "spread": spread, "dtype": dtype}
        for kind, spread in (("llama", 1), ("llama", 3), ("llama", 4), ("gpt2", 4), ("bloom", 4))
        for dtype in ("float32", "bfloat16")
    ]
    cover = covering(product, [("kind", "spread")])
    assert len({(each["kind"], each["spread"]) for each in cover}) == len(cover) == 5
    assert {each["dtype"] for each in cover} == {"float32", "bfloat16"}
