"""How blocks are shared out: in contiguous ranges, so that the fullest device is least full."""

import itertools

import pytest
import torch
from parameters import in_turn

import tl_devicefix
from tl_devicefix import plan
from tl_devicefix.placement.balance import balanced, fits, shares
from tl_devicefix.placement.placement import ComponentSize

pytestmark = pytest.mark.hooked


def block_devices(placement):
    return [device for name, device in placement.device_map.items() if name.startswith("blocks.")]


def blocks_per_device(placement):
    return [len(list(run)) for _, run in itertools.groupby(block_devices(placement))]


def home_block_and_shared_bytes(placement):
    """What home has besides blocks, each block's weights, and the buffers that blocks share."""
    blocks = [c for c in placement.components if c.name.startswith("blocks.")]
    home = sum(c.weights + c.buffers for c in placement.components if c not in blocks)
    return home, [block.weights for block in blocks], blocks[0].buffers


def how_full(home, blocks, shared, counts, free):
    """The relative loads of devices, fullest first, when they hold `counts` blocks each."""
    ends = list(itertools.accumulate(counts))
    loads = [shared + sum(blocks[end - count : end]) for count, end in zip(counts, ends)]
    loads[0] += home
    return sorted((load / room for load, room in zip(loads, free)), reverse=True)


def every_split(n_layers, n_devices):
    """Every way to deal blocks out in contiguous ranges, none empty, as counts."""
    cuts = itertools.combinations(range(1, n_layers), n_devices - 1)
    return [
        [end - start for start, end in zip((0, *cut), (*cut, n_layers), strict=True)]
        for cut in cuts
    ]


def test_a_device_without_a_limit_takes_what_the_others_cannot():
    sizes = [ComponentSize("embed", 1), *(ComponentSize(f"blocks.{i}", 10) for i in range(60))]
    counts = balanced(sizes, [None, 240])
    assert fits(sizes, counts, [None, 240])
    assert sum(counts) == 60


def test_blocks_of_another_host_are_not_offloaded():
    sizes = [ComponentSize("embed", 1), *(ComponentSize(f"blocks.{i}", 10) for i in range(6))]
    here, there = shares(sizes, [41, 20], [True, False])
    assert (here.blocks, there.blocks) == (4, 2)
    assert shares(sizes, [41, 10], [True, False])[1].offloaded == frozenset()


FREE = [[3, 10], [10, 3], [5, 5, 5], [24, 80, 80], [80, 24, 48], [9, 3, 6, 2], [7, 7, 7, 8]]


@pytest.mark.parametrize(("n_layers", "memory", "d_vocab"), in_turn([4, 7, 11], FREE, [8, 300]))
def test_balanced_split_is_minimax_optimal(n_layers, memory, d_vocab, config):
    free = [size * 2**20 for size in memory]
    with tl_devicefix.simulate(len(memory), memory=free):
        placement = plan(config(n_layers=n_layers, d_vocab=d_vocab), n_devices=len(memory))
    loads = home_block_and_shared_bytes(placement)
    best = min(how_full(*loads, counts, free) for counts in every_split(n_layers, len(memory)))
    assert how_full(*loads, blocks_per_device(placement), free) == pytest.approx(best)


def test_device_with_memory_in_use_gets_a_smaller_share(config):
    with tl_devicefix.simulate(2, memory="1MiB"):
        before = plan(config(n_layers=12), n_devices=2)
        in_use = torch.empty(768 * 2**10, dtype=torch.uint8, device="sim:1")
        after = plan(config(n_layers=12), n_devices=2)
        del in_use
    sim_1 = torch.device("sim", 1)
    assert after.bytes_on(sim_1) < before.bytes_on(sim_1) / 2


@pytest.mark.parametrize("counts", [[3, 3], [1]])
def test_a_home_with_room_for_the_embeddings_only_has_no_block(counts, config):
    cfg = config(n_layers=sum(counts), d_vocab=400)
    with tl_devicefix.simulate(3) as machine:
        home, _, _ = home_block_and_shared_bytes(plan(cfg, n_devices=3))
        placement = plan(cfg, n_devices=3, max_memory={0: home + 1000})
        assert blocks_per_device(placement) == counts
        assert machine.devices[0] not in block_devices(placement)
        assert placement.home == machine.devices[0]
        assert placement.bytes_on(placement.home) == home
