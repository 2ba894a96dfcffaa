"""A model with some blocks on a worker, and the same model in one process."""

from functools import cache

import pytest
from local_hosts import hosts

from tl_devicefix.monkeypatch.versions import has_hooked_transformer


@pytest.fixture(scope="module")
def host():
    """node-b, with two devices."""
    with hosts(node_b=2) as (connection,):
        yield connection


@pytest.fixture(scope="module")
def load(checkpoints):
    """`load("llama", n_devices=2)`, from a checkpoint: a HookedTransformer if there are any."""
    if has_hooked_transformer():
        from transformer_lens import HookedTransformer

        method = HookedTransformer.from_pretrained
    else:
        from transformer_lens.model_bridge import TransformerBridge

        method = TransformerBridge.boot_transformers
    return lambda name, **where: method(str(checkpoints(name)), **where)


@pytest.fixture(scope="module")
def alone(load):
    """`alone("llama")`: the model in this process."""
    return cache(lambda name: load(name, device="cpu"))


@pytest.fixture(scope="module")
def spread(load, host):
    """`spread("llama")`: the model with blocks 2 and 3 on node-b."""
    device_map = {"": "cpu", "blocks.2": "node-b/cpu", "blocks.3": "node-b/cpu"}
    return cache(lambda name: load(name, device_map=device_map))
