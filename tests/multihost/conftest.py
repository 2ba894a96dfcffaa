"""A model with some blocks on a worker, and the same model in one process."""

from functools import cache

import pytest
from local_hosts import hosts
from model_classes import load_of


@pytest.fixture(scope="module")
def host():
    """node-b, with two devices."""
    with hosts(node_b=2) as (connection,):
        yield connection


@pytest.fixture(scope="module")
def load(checkpoints):
    """`load("llama", n_devices=2)`, from a checkpoint: a HookedTransformer if there are any."""
    return lambda name, **where: load_of()(str(checkpoints(name)), **where)


@pytest.fixture(scope="module")
def alone(load):
    """`alone("llama")`: the model in this process."""
    return cache(lambda name: load(name, device="cpu"))


@pytest.fixture(scope="module")
def spread(load, host):
    """`spread("llama")`: the model with blocks 2 and 3 on node-b."""
    device_map = {"": "cpu", "blocks.2": "node-b/cpu", "blocks.3": "node-b/cpu"}
    return cache(lambda name: load(name, device_map=device_map))
