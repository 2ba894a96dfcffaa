"""`device_map` and `max_memory` mean what they mean to accelerate; unknown names are told."""

import pytest
import torch

from tl_devicefix import dry_run, estimate, plan, simulate

pytestmark = pytest.mark.hooked


def devices(*indices):
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


def test_longest_prefix_in_a_device_map_decides(config, machine):
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


SIZES = {
    "in another order, with a gap": {2: "1GiB", 0: "1GiB"},
    "with blocks on the host": {1: "300MiB", 2: "300MiB", "cpu": "100GiB"},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_planning_estimating_and_dry_runs_place_alike(sizes):
    with simulate(4, "1TiB"):
        planned = plan("gpt2", max_memory=sizes)

    used = [f"sim:{key}" for key in sorted(key for key in sizes if key != "cpu")]
    assert [str(device) for device in planned.devices] == used
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


@pytest.mark.parametrize("options", [{"n_devices": 3}, {"device_map": "balanced"}, {}])
def test_one_size_is_the_max_memory_of_each_device(options, config, machine):
    placement = plan(config(), max_memory="1GiB", **options)
    assert placement.devices == plan(config(), **options).devices
    with pytest.raises(ValueError, match=r"would hold .* but has 1\.0 KiB to use"):
        plan(config(), max_memory="1KiB", **options)


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has a GPU, so that nothing is warned of"
)
@pytest.mark.parametrize(
    "options",
    [{"max_memory": {0: "20GiB", "cpu": "100GiB"}}, {"device_map": {"": 0}}, {"device": 0}],
)
def test_an_index_where_there_is_no_gpu_is_warned_of(options, config, caplog):
    assert plan(config(), **options).home.type == "cpu"
    assert "device 0 is asked for, but there is no GPU here" in caplog.text


@pytest.fixture
def placement(config, machine):
    """Of 6 blocks, on two devices of four."""
    return plan(config(), n_devices=2)


HAS = "which has embed, pos_embed, blocks.0-5, ln_final, unembed"


def test_name_of_no_component_is_refused_with_a_suggestion(placement):
    meant = {"blocks.99": "", "blocks": "", 4: "", "unembd.W_U": "; did you mean 'unembed'?"}
    for name in meant:
        for ask in (placement.device_of, placement.stored_on):
            with pytest.raises(KeyError) as caught:
                ask(name)
            says = f"{name!r} is in no component of this model, {HAS}{meant[name]}"
            assert caught.value.args[0] == says


def test_bytes_on_accepts_numbers_and_names_of_devices(placement):
    assert placement.bytes_on(3) == placement.bytes_on("sim:2") == placement.bytes_on("cpu") == 0
    assert placement.bytes_on("sim") == placement.bytes_on(0) == placement.bytes_on("sim:0") > 0


@pytest.mark.parametrize(
    ("device_map", "says"),
    [
        ({"": 0, "blocks.3": "disk"}, "puts blocks.3 on 'disk', but device 'disk' cannot be used"),
        ({"": 0, "blocks.3": 7}, "device_map puts blocks.3 on 7, but device '7' does not exist: "),
        ({"": 0, "blcks": 1}, "device_map names 'blcks', but this model has no such component"),
        ({"": 0, "blocks.3.mlp": 1}, "names 'blocks.3.mlp', .*each placed as a whole"),
        ({"embed": 0, "blocks": 1}, "leaves out pos_embed, ln_final, unembed: give each"),
        ("balance", "device_map='balance' is neither .*; did you mean 'balanced'?"),
        (3.5, "device_map=3.5 is neither a device nor one of 'auto', 'balanced', 'sequential', "),
    ],
)
def test_device_map_with_an_invalid_device_is_refused(device_map, says, config, machine):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        plan(config(), device_map=device_map)


@pytest.mark.parametrize("device_map", [{"": 0, "blocks.3": 1}, 1])
def test_device_map_that_does_not_fit_is_refused_with_the_cure(device_map, config, machine):
    with pytest.raises(ValueError, match=r"do not fit: .* put less there in device_map"):
        plan(config(), device_map=device_map, max_memory={0: "1KiB", 1: "1KiB"})
