"""The cache of either class is read at home, where its methods compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from transformer_lens import ActivationCache

Method = Callable[[ActivationCache], Any]
STACKS: dict[str, Method] = {
    "accumulated_resid": lambda cache: cache.accumulated_resid(incl_mid=True, apply_ln=True),
    "decompose_resid": lambda cache: cache.decompose_resid(mode="all"),
    "stack_head_results": lambda cache: cache.stack_head_results(incl_remainder=True),
    "stack_activation": lambda cache: cache.stack_activation("pattern"),
    "logit_attrs": lambda cache: cache.logit_attrs(cache.accumulated_resid(), 5),
    "get_full_resid_decomposition": lambda cache: cache.get_full_resid_decomposition(pos_slice=-1),
}
each_stack = pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS.keys())


def cache_of(model: Any, tokens: torch.Tensor, **options: Any) -> ActivationCache:
    return model.run_with_cache(tokens.to(model.cfg.device), **options)[1]


@pytest.mark.cover
@each_stack
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.fails_unpatched
def test_what_is_stacked_of_several_blocks(
    stack: Method, kind: str, machine: Any, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    cache = cache_of(over_devices(kind), tokens)

    assert_agrees(stack(cache), stack(cache_of(on_one(kind), tokens)), machine.devices[0])


@pytest.mark.cover
@each_stack
@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_cache_that_was_moved_is_read_where_it_is(
    stack: Method,
    n_devices: int,
    machine: Any,
    folded: Any,
    folded_on_one: Any,
    tokens: torch.Tensor,
) -> None:
    cache = cache_of(folded("llama", n_devices), tokens).to("cpu")
    expected = stack(cache_of(folded_on_one("llama"), tokens))

    assert_agrees(stack(cache), expected, torch.device("cpu"))


@pytest.mark.fails_unpatched
def test_gradients_are_cached_and_read_at_home(
    machine: Any, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    model, reference = over_devices("llama"), on_one("llama")
    cache = cache_of(model, tokens, incl_bwd=True, return_type="loss")
    expected = cache_of(reference, tokens, incl_bwd=True, return_type="loss")

    assert_agrees(dict(cache.items()), dict(expected.items()), machine.devices[0])
