"""`device_map` and `max_memory` mean what they mean to accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_devicefix import dry_run, estimate, plan, simulate


def devices(*indices: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("sim", index) for index in indices)


def test_balanced_and_auto_spread_over_all_devices(config, machine):
    cfg = config(n_layers=26)

    balanced = plan(cfg, device_map="balanced")

    assert balanced.device_map == plan(cfg, n_devices=4).device_map
    assert plan(cfg, device_map="auto") == balanced
    assert plan(cfg, device_map="auto", device="sim:1").devices == devices(1, 2, 3)


def test_sequential_fills_a_device_before_it_uses_the_next(config, machine):
    cfg = config(n_layers=6, d_vocab=200)
    block = next(c for c in plan(cfg).components if c.name == "blocks.0")
    size = block.weights
    around = plan(cfg).bytes_on(devices(0)[0]) - 6 * size
    assert around > size
    room = {0: around + 2 * size, 1: block.buffers + 3 * size + 1, 2: 100 * size, 3: 100 * size}

    placement = plan(cfg, device_map="sequential", max_memory=room)

    on_blocks = [placement.device_map[f"blocks.{layer}"] for layer in range(6)]
    assert on_blocks == [*devices(0, 0), *devices(1, 1, 1), *devices(2)]
    assert plan(cfg, device_map="sequential").devices == devices(0)


def test_a_dict_decides_for_each_component_the_longest_prefix_first(config, machine):
    device_map = {"": "sim:3", "blocks": 1, "blocks.1": torch.device("sim", 2), "embed": "sim:0"}

    placement = plan(config(n_layers=12), device_map=device_map)

    sim_0, sim_1, sim_2, sim_3 = devices(0, 1, 2, 3)
    assert placement.home == sim_0
    assert placement.device_map == {
        "embed": sim_0,
        "pos_embed": sim_3,
        **{f"blocks.{layer}": sim_2 if layer == 1 else sim_1 for layer in range(12)},
        "ln_final": sim_3,
        "unembed": sim_3,
    }
    assert plan(config(n_layers=12), device_map=placement.device_map) == placement


def test_max_memory_bounds_what_a_device_holds(config, machine):
    sim_1 = devices(1)[0]
    assert plan(config(n_layers=12), n_devices=4).bytes_on(sim_1) > 15_000

    for limit in (15_000, "15KB", "0.015MB"):
        placement = plan(config(n_layers=12), n_devices=4, max_memory={1: limit})
        assert 0 < placement.bytes_on(sim_1) <= 15_000
        assert placement.devices == devices(0, 1, 2, 3)


# --------------------------------------------------------------------------------------------
# `max_memory` means one thing: the devices that it names are used

SIZES: dict[str, Any] = {
    "with a gap": {0: "1GiB", 3: "1GiB"},
    "in another order": {2: "1GiB", 0: "1GiB"},
    "with blocks on the host": {1: "300MiB", 2: "300MiB", "cpu": "100GiB"},
    "the host": {"cpu": "100GiB"},
}


@pytest.mark.parametrize("case", SIZES)
def test_planning_estimating_and_dry_runs_place_alike(case):
    sizes = SIZES[case]
    with simulate(4, "1TiB"):
        planned = plan("gpt2", max_memory=sizes)

    used = [f"sim:{key}" for key in sorted(key for key in sizes if key != "cpu")]
    assert [str(device) for device in planned.devices] == (used or ["sim:0"])
    estimated = estimate("gpt2", max_memory=sizes, seq_len=8, fold_ln=False).placement
    dry = dry_run("gpt2", id, max_memory=sizes, fold_ln=False).placement
    stored = [[c.stored_on for c in p.components] for p in (planned, estimated, dry)]
    assert estimated.device_map == dry.device_map == planned.device_map
    assert stored[0] == stored[1] == stored[2]


@pytest.mark.parametrize(
    ("sizes", "options", "devices"),
    [
        ({0: "1GiB", 2: "1GiB"}, {}, "0, 2"),
        ({1: "1GiB", 2: "1GiB"}, {"n_devices": 3}, "0, 1, 2"),
        ({0: "1GiB", 1: "1GiB"}, {"n_devices": 1}, "0"),
        ({0: "1GiB", 1: "1GiB", 3: "1GiB"}, {"device": "sim:1"}, "1, 3, 0"),
        ({2: "1GiB", 3: "1GiB"}, {"device": "sim:1"}, "1, 2, 3"),
        ({0: "1GiB", 1: "1GiB"}, {"device_map": "balanced"}, "0, 1"),
        ({0: "1GiB", 1: "1GiB"}, {"device_map": 2}, "2"),
        ({"sim:1": "1GiB", "sim:2": "1GiB"}, {"device": "cpu"}, "cpu"),
    ],
)
def test_the_devices_that_are_named_are_used(sizes, options, devices, machine):
    placement = plan("gpt2", max_memory=sizes, **options)
    names = [d.type if d.index is None else str(d.index) for d in placement.devices]
    assert ", ".join(names) == devices
