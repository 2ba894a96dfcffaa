"""`max_memory` means one thing: the devices that it names are used."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import ARCHITECTURES, load_hooked

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


def used(sizes: dict[Any, Any]) -> list[str]:
    return [f"sim:{key}" for key in sorted(key for key in sizes if key != "cpu")] or ["sim:0"]


@pytest.mark.cover
@pytest.mark.parametrize("n_devices", [None, 2])
@pytest.mark.parametrize("case", SIZES)
def test_planning_estimating_and_dry_runs_place_alike(case: str, n_devices: int | None) -> None:
    sizes = SIZES[case]
    n_on_machine = 2 if n_devices and max(key for key in (*sizes, 0) if key != "cpu") < 2 else 4
    with simulate(n_on_machine if n_devices else 4, "1TiB"):
        planned = plan("gpt2", n_devices, max_memory=sizes)

    assert [str(d) for d in planned.devices] == (["sim:0", "sim:1"] if n_devices else used(sizes))
    if n_devices and n_on_machine != n_devices:
        return  # an estimate's machine has no more devices than are asked for
    estimated = estimate("gpt2", n_devices, max_memory=sizes, seq_len=8, fold_ln=False).placement
    dry = dry_run("gpt2", id, n_devices, max_memory=sizes, fold_ln=False).placement
    assert estimated.device_map == dry.device_map == planned.device_map
    stored = [[c.stored_on for c in p.components] for p in (planned, estimated, dry)]
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
    sizes: Any, options: Any, devices: str, hf_models: Any, tokenizer: Any, machine: Any
) -> None:
    model = load_hooked(
        ARCHITECTURES["gpt2"], hf_models("gpt2"), tokenizer, max_memory=sizes, **options
    )
    names = [d.type if d.index is None else str(d.index) for d in model.placement.devices]
    assert ", ".join(names) == devices
    assert model.cfg.device == str(model.placement.home)
    logits = model(model.to_tokens("a b"))
    assert logits.device == model.placement.home
