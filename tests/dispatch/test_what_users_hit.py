"""Crashes that users of TransformerLens met on several devices, each as one test.

The numbers are those of TransformerLens's issues.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import attention_only_config
from comparison import assert_agrees
from hf_models import randomize
from kinds import GREEDY, assert_runs, devices_of, on_one_device
from transformer_lens import HookedTransformer


@pytest.mark.fails_unpatched
def test_906_the_devices_from_the_named_one_on(
    from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    with simulated(4) as machine:
        model = from_pretrained("gpt2", device="sim:2", n_devices=2)
        assert_runs(model, on_cpu("gpt2"), tokens)
        assert len(devices_of(model)) == 2
        assert [machine.max_memory_allocated(device) for device in machine.devices[:2]] == [0, 0]


@pytest.mark.fails_unpatched
def test_968_one_device_slightly_freer_than_the_other(
    from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    with simulated(2):
        ballast = torch.zeros(1000, device="sim:0")  # of another model, or another process
        model = from_pretrained("gpt2", n_devices=2)
        assert_runs(model, on_cpu("gpt2"), tokens)
        assert len(devices_of(model)) == 2
        assert model.cfg.device == "sim:0"
        del ballast


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(("n_layers", "n_devices"), [(26, 8), (32, 3)])
def test_837_layers_that_do_not_divide_by_the_devices(
    n_layers: int, n_devices: int, tokens: torch.Tensor, simulated: Any
) -> None:
    reference = HookedTransformer(attention_only_config(n_layers=n_layers))
    randomize(reference)
    with simulated(n_devices):
        cfg = attention_only_config(n_layers=n_layers, device="sim:0")
        cfg.n_devices = n_devices  # as an argument, TransformerLens would count CUDA devices
        model = HookedTransformer(cfg)
        randomize(model)
        assert_agrees(model(tokens), reference(tokens), torch.device("sim:0"), tolerance=1e-4)
        assert len(devices_of(model)) == n_devices


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_872_1260_generating_a_batch_with_left_padding_and_the_kv_cache_in_16_bits(
    name: str, from_pretrained: Any, simulated: Any
) -> None:
    sentences = ["w5 w6 w7", "w8 w9 w10 w11 w12 w13", "w14"]
    options = {**GREEDY, "padding_side": "left"}
    reference = from_pretrained(name, dtype=torch.bfloat16, device="cpu")
    expected = on_one_device(reference.generate, sentences, **options)
    with simulated(4):
        model = from_pretrained(name, dtype=torch.bfloat16, n_devices=4)
        assert len(devices_of(model)) == 4
        assert model.generate(sentences, **options) == expected
