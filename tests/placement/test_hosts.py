"""Devices of several hosts: what they are called, and what a placement over them says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_hosts import LocalConnection
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix import plan, simulate
from tl_devicefix.placement import devices
from tl_devicefix.placement.devices import Site, elsewhere, site_named
from tl_devicefix.placement.hosts import Host, join

JOINED = (
    Site(torch.device("xpu", 0), 0, "head", 0, "xpu:0"),
    Site(torch.device("xpu", 1), 0, "head", 1, "xpu:1"),
    Site(elsewhere(0), 1, "node-b", 0, "xpu:0"),
    Site(elsewhere(1), 1, "node-b", 1, "xpu:1"),
)
"""As after `init_hosts`, of hosts with names of their own."""


@pytest.fixture
def two_hosts():
    with simulate(4, hosts=2) as machine:
        yield machine


class _Connection(LocalConnection):
    """A host that nobody asks for more than the memory of its devices, which all have as much."""

    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, method: str, *arguments: Any) -> Any:
        assert method == "free_memory"
        return 1 << 30


@pytest.fixture
def joined_hosts(monkeypatch):
    """node-b and node-c, which have joined this process with two GPUs each; it has its CPU."""
    monkeypatch.setattr(devices.socket, "gethostname", lambda: "node-a")
    join([Host(_Connection(name), ("cuda:0", "cuda:1")) for name in ("node-b", "node-c")])
    yield
    join([])


def test_a_device_is_named_by_its_host_and_what_that_calls_it():
    names = {"head/xpu:1": 1, "node-b/xpu:0": 2, "host1/xpu:1": 3, "host0/0": 0}
    for name, index in {**names, "node-b/xpu": 2, "node-b/1": 3}.items():
        assert site_named(name, JOINED) is JOINED[index]
    there = r"head/xpu:0 to xpu:1 \(host0\), node-b/xpu:0 to xpu:1 \(host1\)$"
    for name in ("node-c/xpu:0", "node-b/xpu:2", "head/cpu:0", "/", "head/"):
        refused = f"^device {name!r} does not exist: name one of.* {there}"
        with pytest.raises(ValueError, match=refused):
            site_named(name, JOINED)


@pytest.mark.parametrize(
    ("n_devices", "hosts", "message"),
    [
        (5, 2, "n_devices=5 cannot be divided evenly over hosts=2"),
        (2, 4, "n_devices=2 cannot be divided evenly over hosts=4"),
        (4, "2", "hosts must be an int of 1 or more, .* but is '2'"),
        (4, [2, 1], r"n_devices is 4, but hosts=\[2, 1\] have 3"),
        (4, [5, -1], r"1 device or more, but hosts is \[5, -1\]"),
    ],
)
def test_hosts_have_as_many_devices_each(n_devices, hosts, message):
    with pytest.raises(ValueError, match=message), simulate(n_devices, hosts=hosts):
        pass


def test_device_map_max_memory_and_device_take_such_names(config, two_hosts):
    cfg = config(n_layers=4)

    mapped = plan(cfg, device_map={"": "host0/0", "blocks.3": "host1/1"})
    limited = plan(cfg, max_memory={"host1/0": "1GiB", "host1/1": "1GiB"})
    at_home = plan(cfg, n_devices=2, device="host1/0")

    assert mapped.device_of("blocks.3") == torch.device("sim:3")
    assert list(map(str, limited.devices)) == list(map(str, at_home.devices)) == ["sim:2", "sim:3"]
    assert mapped.bytes_on("host1/1") == mapped.bytes_on("sim:3") > 0


def test_where_no_other_host_has_joined_no_device_is_named_by_one(config, joined_hosts):
    device_map = {"": "cpu", "blocks.1": "node-b/cuda:0"}
    before = plan(config(), device_map=device_map)

    join([])

    assert repr(before).splitlines()[2].startswith("node-b/cuda:0")
    refused = r"'node-b/cuda:0' names a host, but no other host has joined.*init_hosts"
    with pytest.raises(ValueError, match=refused):
        plan(config(), device_map=device_map)
    with simulate(4), pytest.raises(ValueError, match=r"'host1/0' names a host"):
        plan(config(), device_map={"": 0, "blocks.3": "host1/0"})


def test_a_model_is_moved_and_gathered_by_such_a_name(config, two_hosts):
    cfg = config()
    cfg.device, cfg.n_devices = "sim:0", 4
    model = HookedTransformer(cfg)

    with tl_devicefix.gather_on("host1/1"):
        assert model.W_in.device == torch.device("sim:3")
    model.to("host1/0")

    assert model.placement.devices == (torch.device("sim:2"),)


def test_a_placement_says_both_names_and_what_crosses(config, two_hosts):
    placement = plan(config(n_layers=6, d_model=16), n_devices=4)

    lines = repr(placement).splitlines()
    assert lines[1].startswith("sim:0 (host0/0, home)  embed, pos_embed, blocks.0")
    assert lines[3].startswith("sim:2 (host1/0) ")
    assert lines[-1] == (
        "between hosts, in a forward of one token: host0 -> host1 64 bytes, host1 -> host0 64 bytes"
    )
    assert placement.between_hosts(batch=2, pos=3) == {
        ("host0", "host1"): 2 * 3 * 16 * 4,
        ("host1", "host0"): 2 * 3 * 16 * 4,
    }
    there_and_back = {"": 0, "blocks.1": "host1/0", "blocks.3": "host1/0"}
    crossings = plan(config(), device_map=there_and_back).between_hosts()
    assert crossings == dict.fromkeys((("host0", "host1"), ("host1", "host0")), 2 * 64)


def test_weights_of_a_block_that_visits_another_host_cross_too(config, two_hosts):
    device_map = {"": 0, "blocks.3": "host1/0", "blocks.4": "cpu", "blocks.5": "host1/0"}

    placement = plan(config(), device_map=device_map)

    (weights,) = (item.weights for item in placement.components if item.name == "blocks.4")
    assert placement.between_hosts() == {
        ("host0", "host1"): 64 + weights,
        ("host1", "host0"): 64,
    }


def test_joined_hosts_are_filled_after_this_one(config, joined_hosts):
    placement = plan(config(n_layers=6, d_model=16), n_devices=5)

    labels = [line.split("  ")[0] for line in repr(placement).splitlines()]
    assert labels[1] == "node-a/cpu (home)"
    assert labels[2:6] == ["node-b/cuda:0", "node-b/cuda:1", "node-c/cuda:0", "node-c/cuda:1"]
    names = (("node-a", "node-b"), ("node-b", "node-c"), ("node-c", "node-a"))
    assert placement.between_hosts(pos=3) == dict.fromkeys(names, 3 * 16 * 4)


def test_a_device_map_names_devices_of_joined_hosts(config, joined_hosts):
    blocks = {"blocks.1": "node-b/cuda:1", "blocks.2": "host2/0", "blocks.3": 4}
    placement = plan(config(n_layers=4), device_map={"": "cpu", **blocks})

    places = [placement.device_of(block) for block in ("blocks.0", *blocks)]
    assert places == [torch.device("cpu"), elsewhere(1), elsewhere(2), elsewhere(3)]
    assert placement.bytes_on("node-b/cuda:1") == placement.bytes_on("host1/1") > 0
    assert placement.read_at("blocks.1") == placement.home


def test_joined_hosts_have_so_many_devices_of_so_much_memory(config, joined_hosts):
    of_hosts = r"node-a/cpu \(host0\), node-b/cuda:0 to cuda:1 \(host1\), node-c/cuda:0 to "
    with pytest.raises(ValueError, match=f"the hosts have 5 \\({of_hosts}"):
        plan(config(), n_devices=6)
    with pytest.raises(ValueError, match=r"node-b/cuda:0 would hold \S+ GiB but has 1\.00 GiB"):
        plan("Llama-2-7b", device_map={"": "cpu", "blocks": "node-b/cuda:0"})
