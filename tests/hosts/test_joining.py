"""How hosts join where no cluster is needed: which nodes, which versions, what is not there."""

import pickle
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import tl_devicefix
from tl_devicefix.multihost import init_hosts as joining
from tl_devicefix.multihost.hosts import joined_hosts
from tl_devicefix.multihost.init_hosts import _packed, _unpacked, own_versions

pytestmark = pytest.mark.once


def test_node_with_other_package_versions_is_refused():
    joining._check_versions("node-b", own_versions())
    for package in ("torch", "transformers", "transformer_lens"):
        differs = f"node-b has {package} 0.1, and this .* has {own_versions()[package]}: "
        with pytest.raises(RuntimeError, match=differs):
            joining._check_versions("node-b", own_versions() | {package: "0.1"})


def test_init_hosts_without_ray_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"init_hosts\(\) needs Ray: pip install ray"):
        tl_devicefix.init_hosts()


def test_address_that_does_not_answer_is_refused():
    with pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127.0.0.1:1: start"):
        joining._check_that_it_answers("127.0.0.1:1")


def test_init_hosts_without_a_cluster_joins_no_host(monkeypatch, tmp_path):
    services = pytest.importorskip(
        "ray._private.services", reason="Ray is not installed: pip install ray"
    )
    # Clusters of others may run here.
    monkeypatch.setattr(services, "find_gcs_addresses", cache(set))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tl_devicefix.init_hosts()
    assert joined_hosts() == ()


TENSORS = [
    *(torch.randn(3, 4), torch.randn(3, 4).T, torch.randn(5).bfloat16(), torch.empty(0, 4)),
    *(torch.tensor([True, False]), torch.tensor(7), torch.randn(2, requires_grad=True)),
]


def test_tensors_arrive_as_they_left_and_can_be_written_to():
    buffers = []
    packed = _packed(({"x": [*TENSORS, 1]}, None))
    pickled = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    read_only = [bytes(buffer) for buffer in buffers]  # as Ray's shared memory is
    tree, none = _unpacked(pickle.loads(pickled, buffers=read_only))

    *tensors, number = tree["x"]
    assert (list(tree), none, number, len(tensors)) == (["x"], None, 1, len(TENSORS))
    for tensor, sent in zip(tensors, TENSORS):
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent.detach())
        assert not tensor.requires_grad
        tensor.zero_()
        assert not tensor.any()


def test_nodes_are_named_and_ordered_by_their_host(monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    context = SimpleNamespace(get_node_id=lambda: "0")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    def named(*names, gpus=(8,) * 4):
        """Of the nodes but the first, where this process is, in the order of their devices."""
        nodes = [
            {"NodeID": f"{number}", "Alive": name != "dead", "NodeManagerHostname": name}
            | {"Resources": {"GPU": gpus[number]} if gpus[number] else {}}
            for number, name in enumerate(names)
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        return [name for name, _ in joining._other_nodes()]

    assert named("a", "node-c", "node-b", "dead") == ["node-b", "node-c"]
    assert named("vm", "vm", "vm") == ["host1", "host2"]
    assert named("a", "b", gpus=(0, 0)) == ["b"]
    assert named("a", "c", "d", gpus=(8, 0, 8)) == ["d"]
