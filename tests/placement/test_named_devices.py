"""`max_memory` means one thing: the devices that it names are used."""

from __future__ import annotations

from typing import Any

import pytest

from tl_devicefix import dry_run, estimate, plan, simulate

SIZES: dict[str, Any] = {
    "both": {0: "1GiB", 1: "1GiB"},
    "unequal": {0: "400MiB", 1: "1GiB"},
    "without the first": {1: "1GiB", 2: "1GiB"},
    "with a gap": {0: "1GiB", 3: "1GiB"},
    "one": {2: "1GiB"},
    "in another order": {2: "1GiB", 0: "1GiB"},
    "with room on the host": {0: "1GiB", 1: "1GiB", "cpu": "100GiB"},
    "with blocks on the host": {1: "300MiB", 2: "300MiB", "cpu": "100GiB"},
    "the host": {"cpu": "100GiB"},
}


@pytest.mark.parametrize("case", SIZES)
def test_planning_estimating_and_dry_runs_place_alike(case: str) -> None:
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
        ({0: "1GiB", 2: "1GiB", "cpu": "1GiB"}, {}, "0, 2"),
        ({1: "1GiB", 2: "1GiB"}, {"n_devices": 3}, "0, 1, 2"),
        ({0: "1GiB", 1: "1GiB"}, {"n_devices": 1}, "0"),
        ({0: "1GiB", 1: "1GiB", 3: "1GiB"}, {"device": "sim:1"}, "1, 3, 0"),
        ({2: "1GiB", 3: "1GiB"}, {"device": "sim:1"}, "1, 2, 3"),
        ({0: "1GiB", 1: "1GiB"}, {"device_map": "balanced"}, "0, 1"),
        ({0: "1GiB", 1: "1GiB"}, {"device_map": 2}, "2"),
        ({"sim:1": "1GiB", "sim:2": "1GiB"}, {"device": "cpu"}, "cpu"),
    ],
)
def test_loading_uses_the_devices_that_are_named(
    sizes: Any, options: Any, devices: str, from_pretrained: Any, machine: Any
) -> None:
    model = from_pretrained("gpt2", max_memory=sizes, **options)
    names = [d.type if d.index is None else str(d.index) for d in model.placement.devices]
    assert ", ".join(names) == devices
    assert model.cfg.device == str(model.placement.home)
    logits = model(model.to_tokens("a b"))
    assert logits.device == model.placement.home
