"""Weights of several devices are read on the device of `gather_on`, of either class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees
from transformer_lens import SVDInterpreter

from tl_devicefix import gather_on

CPU = torch.device("cpu")
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_E", "W_U", "b_U")


@pytest.mark.cover
@pytest.mark.parametrize("n_devices", [1, 4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_read_on_the_chosen_device(
    name: str, n_devices: int, machine: Any, folded: Any, folded_on_one: Any
) -> None:
    model = folded("llama", n_devices)
    with gather_on("cpu"):
        weight = getattr(model, name)

    assert_agrees(weight, getattr(folded_on_one("llama"), name), CPU)
    assert getattr(model, name).device == machine.devices[0]


def test_what_is_computed_from_weights_and_caches_is_too(
    machine: Any, folded: Any, folded_on_one: Any, tokens: torch.Tensor
) -> None:
    def computed(model: Any) -> list[Any]:
        _, cache = model.run_with_cache(tokens.to(model.cfg.device))
        with gather_on("cpu"):
            return [
                cache.stack_head_results(apply_ln=True),
                dict(cache.items()),
                getattr(scores := model.all_composition_scores("K"), "scores", scores),
                model.accumulated_bias(5),
                model.tokens_to_residual_directions("w5"),
                model.OV.AB,
                dict(model.tl_parameters().items()) if hasattr(model, "tl_parameters") else {},
            ]

    model = folded("gpt2", 4)

    assert_agrees(computed(model), computed(folded_on_one("gpt2")), CPU)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_singular_vectors(
    kind: str, cls: str, machine: Any, folded: Any, folded_on_one: Any
) -> None:
    if (kind, cls) == ("llama", "HookedTransformer"):
        pytest.skip("TransformerLens's own fails for grouped-query attention")

    def vectors(model: Any) -> torch.Tensor:
        interpreter = SVDInterpreter(model)
        return interpreter.get_singular_vectors("OV", 4, num_vectors=2, head_index=1).abs()

    assert_agrees(vectors(folded(kind, 4)), vectors(folded_on_one(kind)), tolerance=1e-4)
