"""Devices of several hosts: what they are called, and what a placement over them says."""

import pytest
import torch

from tl_devicefix import estimate, plan, simulate
from tl_devicefix.multihost import hosts
from tl_devicefix.multihost.hosts import Host, Hosts, join
from tl_devicefix.placement.deciding import decide
from tl_devicefix.placement.elsewhere import elsewhere
from tl_devicefix.placement.placement import ComponentSize

pytestmark = pytest.mark.hooked


class _Host(Host):
    """A host that nobody asks for more than the memory of its devices, which all have as much."""

    def send(self, *message):
        assert message[0] == "free_memory"
        return 1 << 30


@pytest.fixture
def joined_hosts(monkeypatch):
    """node-b and node-c, which have joined this process with two GPUs each; it has its CPU."""
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "node-a")
    join([_Host(name, ("cuda:0", "cuda:1")) for name in ("node-b", "node-c")])
    yield
    join([])


def test_a_device_is_named_by_its_host_and_what_that_calls_it(monkeypatch):
    monkeypatch.setattr(hosts, "default_device", lambda: torch.device("xpu", 0))
    monkeypatch.setattr(hosts, "device_count", lambda kind: 2)
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "head")
    joined = Hosts([_Host("node-b", ("xpu:0", "xpu:1"))])
    names = {"head/xpu:0": 0, "head/xpu:1": 1, "node-b/xpu:0": 2, "node-b/xpu:1": 3}
    for name, index in names.items():
        assert joined.find(name) == joined.devices[index]
    assert joined.devices[2:] == (elsewhere(0), elsewhere(1))
    there = "head/xpu:0 to xpu:1, node-b/xpu:0 to xpu:1$"
    for name in ("node-c/xpu:0", "node-b/xpu:2", "head/cpu:0", "/", "head/"):
        refused = f"^device {name!r} does not exist: name one of.* {there}"
        with pytest.raises(ValueError, match=refused):
            joined.find(name)


def test_device_of_a_host_that_has_not_joined_is_refused(config, joined_hosts):
    device_map = {"": "cpu", "blocks.1": "node-b/cuda:0"}
    before = plan(config(), device_map=device_map)

    join([])

    assert repr(before).splitlines()[2].startswith("node-b/cuda:0")
    refused = r"'node-b/cuda:0' names a host, but no other host has joined.*init_hosts"
    with pytest.raises(ValueError, match=refused):
        plan(config(), device_map=device_map)
    with simulate(4), pytest.raises(ValueError, match="'node-b/cuda:0' names a host"):
        plan(config(), device_map={"": 0, "blocks.3": "node-b/cuda:0"})


def test_joined_hosts_are_filled_after_this_one(config, joined_hosts):
    placement = plan(config(n_layers=6, d_model=16), n_devices=5)
    labels = [line.split("  ")[0] for line in repr(placement).splitlines()]
    assert labels[1] == "node-a/cpu (home)"
    assert labels[2:6] == ["node-b/cuda:0", "node-b/cuda:1", "node-c/cuda:0", "node-c/cuda:1"]


def test_a_device_map_names_devices_of_joined_hosts(config, joined_hosts):
    blocks = {"blocks.1": "node-b/cuda:1", "blocks.2": "node-c/cuda:0", "blocks.3": 4}
    placement = plan(config(n_layers=4), device_map={"": "cpu", **blocks})
    places = [placement.device_of(block) for block in ("blocks.0", *blocks)]
    assert places == [torch.device("cpu"), elsewhere(1), elsewhere(2), elsewhere(3)]
    assert placement.bytes_on("node-b/cuda:1") == placement.bytes_on(2) > 0
    assert placement.read_at("blocks.1") == placement.home


def test_an_offloaded_block_runs_on_a_device_of_this_host(machine):
    names = ("embed", "blocks.0", "blocks.1", "blocks.2", "unembed")
    elsewhere_and_offloaded = {"blocks.1": elsewhere(0), "blocks.2": "cpu"}
    sizes = [ComponentSize(name, weights=1) for name in names]
    placement = decide(sizes, device_map={"": machine.devices[1], **elsewhere_and_offloaded})
    assert placement.device_of("blocks.2") == machine.devices[1]


def test_plan_beyond_the_hosts_devices_or_memory_is_refused(config, joined_hosts):
    of_hosts = "node-a/cpu, node-b/cuda:0 to cuda:1, node-c/cuda:0 to cuda:1"
    with pytest.raises(ValueError, match=rf"the hosts have 5 \({of_hosts}\)"):
        plan(config(), n_devices=6)
    with pytest.raises(ValueError, match=r"node-b/cuda:0 would hold \S+ GiB but has 1\.00 GiB"):
        plan("Llama-2-7b", device_map={"": "cpu", "blocks": "node-b/cuda:0"})


def test_simulated_devices_are_of_no_host(config, joined_hosts):
    fit = estimate(config(), 3)
    assert [device.device for device in fit.devices] == ["0 (home)", "1", "2"]
    with simulate(2):
        placement = plan(config(), device_map="balanced")
        assert [*map(str, placement.devices)] == ["sim:0", "sim:1"]
        assert placement.others.devices == ()
