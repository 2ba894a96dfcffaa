"""Blocks that do not fit live in host memory: which, and what `plan` says of them."""

import copy
import pickle

import pytest
import torch

import tl_devicefix
from tl_devicefix import Placement, plan
from tl_devicefix.placement.placement import PlacedComponent

pytestmark = pytest.mark.hooked

HOST = torch.device("cpu")


def sim(index):
    return torch.device("sim", index)


@pytest.fixture
def room(config):
    """`room(blocks=3)`: bytes for the embeddings, the buffers that blocks share, and 3 blocks."""

    def room(blocks, at_home=True):
        placement = plan(config())
        weights = placement.components[2].weights
        around = placement.bytes_on(placement.home) - 6 * weights
        return blocks * weights + (around if at_home else placement.components[2].buffers)

    return room


def offloaded(placement):
    return [int(c.name.split(".")[1]) for c in placement.components if c.offloaded]


def test_blocks_on_the_cpu_run_where_the_block_before_them_does(config, machine):
    device_map = {"": 0, "blocks": "cpu", "blocks.1": 1, "blocks.4": 2}

    placement = plan(config(), device_map=device_map)

    assert offloaded(placement) == [0, 2, 3, 5]
    runs_on = [placement.device_of(f"blocks.{layer}") for layer in range(6)]
    assert runs_on == [sim(1), sim(1), sim(1), sim(1), sim(2), sim(2)]
    assert placement.devices == (sim(0), sim(1), sim(2))
    assert placement.memories == (sim(0), sim(1), sim(2), HOST)
    assert placement.stored_on("blocks.3.attn.W_Q") == HOST
    assert placement.stored_on("blocks.4.attn.W_Q") == sim(2)


def test_a_model_whose_home_is_the_cpu_offloads_nothing(config, machine):
    placement = plan(config(), device_map={"": "cpu", "blocks.3": 1})
    assert offloaded(placement) == []
    assert placement.device_of("blocks.2") == HOST


def test_only_the_blocks_that_do_not_fit_are_offloaded(config, machine, room):
    placement = plan(config(), max_memory={0: room(blocks=5), "cpu": "1GiB"})
    # Room for five blocks is room for three that stay, and two that visit.
    assert offloaded(placement) == [1, 3, 5]
    assert placement.devices == (sim(0),)
    assert placement.bytes_on(0) == room(blocks=5)
    assert placement.bytes_on("cpu") == 3 * placement.components[2].weights


def test_a_limit_above_the_free_memory_leaves_a_tenth_free(config, room):
    free = room(blocks=5)
    with tl_devicefix.simulate(1, free):
        placement = plan(config(), max_memory={0: 2 * free, "cpu": "1GiB"})
        assert placement.bytes_on(0) <= 0.9 * free


def test_device_reserves_room_for_its_two_largest_blocks():
    sizes = {"embed": 1, "blocks.0": 100, "blocks.1": 10, "blocks.2": 1000}
    components = tuple(
        PlacedComponent(name, weights, device=sim(0), offloaded=name != "embed")
        for name, weights in sizes.items()
    )
    assert Placement(components).bytes_on(sim(0)) == 1 + 1000 + 100


@pytest.mark.parametrize("strategy", [None, "balanced", "sequential"])
def test_each_device_runs_one_range_of_blocks(strategy, config, machine, room):
    limits = {0: room(blocks=3), 1: room(blocks=4, at_home=False), "cpu": "1GiB"}
    spread = {"n_devices": 2} if strategy is None else {"device_map": strategy}

    placement = plan(config(n_layers=12), max_memory=limits, **spread)

    runs_on = [placement.device_of(f"blocks.{layer}").index for layer in range(12)]
    assert runs_on == sorted(runs_on)
    assert set(runs_on) == {0, 1}
    # Offloading on both takes room for visitors on both: 12 - 3 - 2, or 12 - 1 - 4.
    assert len(offloaded(placement)) == 7
    assert all(placement.bytes_on(device) <= limits[device] for device in (0, 1))


@pytest.mark.parametrize(("n_layers", "blocks"), [(5, 2), (8, 3), (13, 4), (26, 3)])
def test_offloaded_blocks_alternate_evenly_with_resident_ones(
    n_layers, blocks, config, machine, room
):
    placement = plan(config(n_layers=n_layers), max_memory={0: room(blocks), "cpu": "1GiB"})
    away = offloaded(placement)
    assert len(away) == n_layers - (blocks - 2)
    gaps = [later - earlier for earlier, later in zip([-1, *away], away)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((5,), r"sim:0.* would hold .* but has .* or offload blocks: name 'cpu' in max_memory or "),
        ((5, 1000), r"fit: cpu would hold .* KiB but has 1000 bytes to use; use more devices"),
        ((1, "1GiB"), r"sim:0.* would hold .*, a larger max_memory or a smaller dtype, "),
    ],
)
def test_model_that_fits_nowhere_is_refused_in_one_sentence(limits, message, config, machine, room):
    """Nothing is offloaded unless the host is named."""
    blocks, *on_host = limits
    with pytest.raises(ValueError, match=message) as refused:
        plan(config(), max_memory={0: room(blocks), **({"cpu": on_host[0]} if on_host else {})})
    assert "\n" not in str(refused.value)


def test_placement_can_be_copied_pickled_and_gathered(config, machine):
    placement = plan(config(), device_map={"": 0, "blocks": "cpu"})
    assert copy.deepcopy(placement) == placement == pickle.loads(pickle.dumps(placement))
    assert placement.gathered_on(sim(1)).memories == (sim(1),)


def test_printing_shows_what_is_on_the_host_and_where_it_visits(config, machine):
    device_map = {"": 0, "blocks.1": "cpu", "blocks.3": "cpu", "blocks.4": 1, "blocks.5": "cpu"}

    lines = str(plan(config(), device_map=device_map)).splitlines()

    assert lines[1].startswith("sim:0 (")
    assert "home) " in lines[1]
    assert "embed, pos_embed, blocks.0, 2, ln_final, unembed + 2 visiting" in lines[1]
    assert "blocks.4 + 1 visiting" in lines[2]
    assert lines[3].startswith("cpu (offloaded)")
    assert "blocks.1, 3 -> sim:0; blocks.5 -> sim:1" in lines[3]
    assert lines[4].startswith("total")
