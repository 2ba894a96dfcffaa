"""Which device a block goes to by a config that no model has been placed by: arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    pytest.skip("this TransformerLens has no HookedTransformer", allow_module_level=True)

from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_devicefix.hooked_transformer.alignment import get_device_for_block_index
from tl_devicefix.monkeypatch.patch import named
from tl_devicefix.monkeypatch.versions import installed


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:2", "mps", "cpu", torch.device("cuda", 1)], ids=str
)
@pytest.mark.parametrize(
    ("n_layers", "n_devices"), [(8, 1), (8, 8), (32, 4), (24, 8), (62, 8), (1, 8), (7, 8)]
)
@pytest.mark.parametrize("by_config", [True, False])
def test_it_is_transformer_lens_own(device, n_layers, n_devices, by_config):
    """Of devices that are not there too: "cuda" is in no config placed here."""
    cfg = SimpleNamespace(
        n_layers=n_layers, n_devices=n_devices, device=device if by_config else "cuda:5"
    )
    arguments = {} if by_config else {"device": device}
    with tl_devicefix.disabled():
        theirs = named("get_device_for_block_index")
        uneven = n_layers % n_devices and installed().major < 3  # then theirs runs off the end
        if uneven and torch.device(device).type != "cpu":
            pytest.skip("TransformerLens 2 names devices that are not asked for")
        expected = [theirs(index, cfg, **arguments) for index in range(n_layers)]
    assert [get_device_for_block_index(i, cfg, **arguments) for i in range(n_layers)] == expected


@pytest.mark.parametrize(("n_layers", "n_devices"), [(62, 8), (12, 8), (1, 8), (7, 8)])
def test_no_block_is_beyond_the_last_device(n_layers, n_devices):
    cfg = SimpleNamespace(n_layers=n_layers, n_devices=n_devices, device="cuda")
    indices = [get_device_for_block_index(index, cfg).index for index in range(n_layers)]
    assert indices == sorted(indices)
    assert set(indices) <= set(range(n_devices))


@pytest.mark.fails_unpatched
def test_devices_that_are_simulated_are_the_default(machine):
    sizes = {"n_layers": 4, "d_model": 8, "n_ctx": 8, "d_head": 4, "d_vocab": 9, "act_fn": "relu"}
    cfg = HookedTransformerConfig(**sizes, n_devices=4)
    assert torch.device(cfg.device) == machine.devices[0]
    placed = {p.device for p in HookedTransformer(cfg).parameters()}
    assert placed == set(machine.devices)
