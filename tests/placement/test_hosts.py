"""Devices of several hosts: what they are called, and what a placement over them says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix import plan, simulate
from tl_devicefix.placement.devices import Site, site_named
from tl_devicefix.simulation.machine import Machine

JOINED = (
    Site(torch.device("sim", 0), 0, "head", 0, "xpu:0"),
    Site(torch.device("sim", 1), 0, "head", 1, "xpu:1"),
    Site(torch.device("sim", 2), 1, "node-b", 0, "xpu:0"),
    Site(torch.device("sim", 3), 1, "node-b", 1, "xpu:1"),
)
"""As after `init_hosts`, of hosts with names of their own."""


@pytest.fixture
def two_hosts() -> Iterator[Machine]:
    with simulate(4, hosts=2) as machine:
        yield machine


@pytest.fixture
def one_host() -> Iterator[Machine]:
    with simulate(4, values=False) as machine:
        yield machine


@pytest.mark.parametrize(
    ("name", "index"),
    [
        *(("head/xpu:1", 1), ("node-b/xpu:0", 2), ("host1/xpu:1", 3), ("host0/0", 0)),
        *(("node-b/xpu", 2), ("node-b/1", 3)),
    ],
)
def test_a_device_is_named_by_its_host_and_what_that_calls_it(name: str, index: int) -> None:
    assert site_named(name, JOINED).torch_device.index == index


@pytest.mark.parametrize("name", ["node-c/xpu:0", "node-b/xpu:2", "head/cpu:0", "/", "head/"])
def test_a_name_that_is_not_there_gets_those_that_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device {name!r} does not exist: name one of") as caught:
        site_named(name, JOINED)

    sentence = "head/xpu:0 to xpu:1 (host0), node-b/xpu:0 to xpu:1 (host1)"
    assert str(caught.value).endswith(sentence)


@pytest.mark.parametrize(
    ("n_devices", "hosts", "message"),
    [
        (5, 2, "n_devices=5 cannot be divided evenly over hosts=2"),
        (2, 4, "n_devices=2 cannot be divided evenly over hosts=4"),
        (4, 0, "hosts must be an int of 1 or more, .* but is 0"),
        (4, "2", "hosts must be an int of 1 or more, .* but is '2'"),
        (4, [2, 1], r"n_devices is 4, but hosts=\[2, 1\] have 3"),
        (4, [5, -1], r"1 device or more, but hosts is \[5, -1\]"),
    ],
)
def test_hosts_have_as_many_devices_each(n_devices: int, hosts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message), simulate(n_devices, hosts=hosts):
        pass


def test_device_map_max_memory_and_device_take_such_names(config: Any, two_hosts: Machine) -> None:
    cfg = config(n_layers=4)

    mapped = plan(cfg, device_map={"": "host0/0", "blocks.3": "host1/1"})
    limited = plan(cfg, max_memory={"host1/0": "1GiB", "host1/1": "1GiB"})
    at_home = plan(cfg, n_devices=2, device="host1/0")

    assert mapped.device_of("blocks.3") == torch.device("sim:3")
    assert list(map(str, limited.devices)) == list(map(str, at_home.devices)) == ["sim:2", "sim:3"]
    assert mapped.bytes_on("host1/1") == mapped.bytes_on("sim:3") > 0


def test_on_one_host_no_device_is_named_by_it(config: Any, one_host: Machine) -> None:
    with pytest.raises(ValueError, match=r"'host1/0' names a host, .* tl_devicefix\.init_hosts"):
        plan(config(), device_map={"": 0, "blocks.3": "host1/0"})


def test_a_model_is_moved_and_gathered_by_such_a_name(config: Any, two_hosts: Machine) -> None:
    cfg = config()
    cfg.device, cfg.n_devices = "sim:0", 4
    model = HookedTransformer(cfg)

    with tl_devicefix.gather_on("host1/1"):
        assert model.W_in.device == torch.device("sim:3")
    model.to("host1/0")

    assert model.placement.devices == (torch.device("sim:2"),)


def test_a_placement_says_both_names_and_what_crosses(config: Any, two_hosts: Machine) -> None:
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


def test_each_boundary_counts_and_offloaded_weights_do(config: Any, two_hosts: Machine) -> None:
    there_and_back = {"": 0, "blocks.1": "host1/0", "blocks.3": "host1/0"}
    offloaded = {"": 0, "blocks.3": "host1/0", "blocks.4": "cpu", "blocks.5": "host1/0"}

    crossings = plan(config(), device_map=there_and_back).crossings
    visits = plan(config(), device_map=offloaded)

    assert len(crossings) == 4
    weights = next(
        component.weights for component in visits.components if component.name == "blocks.4"
    )
    stream = 16 * 4
    assert visits.between_hosts() == {
        ("host0", "host1"): stream + weights,
        ("host1", "host0"): stream,
    }
