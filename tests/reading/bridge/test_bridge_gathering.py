"""A Bridge's weights of several devices are read at home, or on the device of `gather_on`."""

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
    name: str, n_devices: int, machine: Any, boot: Any, references: Any
) -> None:
    bridge = boot("llama", compatible=True, n_devices=n_devices)
    with gather_on("cpu"):
        weight = getattr(bridge, name)

    assert_agrees(weight, getattr(references("llama", compatible=True), name), CPU)
    assert getattr(bridge, name).device == machine.devices[0]


def test_what_is_computed_from_weights_and_caches_is_too(
    machine: Any, boot: Any, references: Any, tokens: torch.Tensor
) -> None:
    def computed(bridge: Any) -> list[Any]:
        _, cache = bridge.run_with_cache(tokens.to(bridge.cfg.device))
        with gather_on("cpu"):
            return [
                cache.stack_head_results(apply_ln=True),
                dict(cache.items()),
                bridge.all_composition_scores("K").scores,
                bridge.accumulated_bias(5),
                bridge.tokens_to_residual_directions("w5"),
                bridge.OV.AB,
                dict(bridge.tl_parameters().items()),
            ]

    bridge = boot("gpt2", compatible=True, n_devices=4)

    assert_agrees(computed(bridge), computed(references("gpt2", compatible=True)), CPU)


@pytest.mark.fails_unpatched
def test_weights_by_name_are_read_at_home(machine: Any, dispatched: Any, references: Any) -> None:
    weights = dispatched("llama").tl_parameters()

    assert_agrees(dict(weights.items()), references("llama").tl_parameters(), machine.devices[0])


def test_singular_vectors(machine: Any, boot: Any, references: Any) -> None:
    def vectors(bridge: Any) -> torch.Tensor:
        interpreter = SVDInterpreter(bridge)
        return interpreter.get_singular_vectors("OV", 4, num_vectors=2, head_index=1).abs()

    bridge = boot("llama", compatible=True, n_devices=4)

    assert_agrees(vectors(bridge), vectors(references("llama", compatible=True)), tolerance=1e-4)
