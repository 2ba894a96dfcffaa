"""Devices of another rank are called by its host, before and after a load; `check` knows them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tl_devicefix import check
from tl_devicefix.multihost.handshake import Place, called, places, sites_of

WHERE = {"": "host0/0", "blocks.3": "host1/cpu:0", "blocks.4": "host1/cpu:1"}


@pytest.fixture
def over_ranks(machine: Any, load_over: Any) -> Any:
    return load_over("llama", device_map=WHERE)


def test_sites_are_named_by_rank_host_and_device() -> None:
    one, other = torch.device("cpu"), torch.device("meta", 3)
    places = [Place(0, 0, one, "head", 1), Place(0, 1, one, "head", 1), Place(1, 0, other, "b", 1)]

    assert [site.name for site in sites_of(places)] == ["head/cpu:0", "head/cpu:1", "b/meta:3"]


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (("head", "b"), ["head", "b"]),
        (("head", "head"), ["host0", "host1"]),
        (("head", "head", "host1"), ["host0", "host1", "host2"]),
    ],
)
def test_hosts_of_one_name_are_called_by_their_numbers(hosts: Any, names: list[str]) -> None:
    everyone = [{"host": host, "devices": [("cpu", 1)]} for host in hosts]

    assert [place.hostname for place in places(everyone)] == names


def test_a_rank_is_called_as_its_devices_are_in_a_placement() -> None:
    one, other = ({"host": host, "devices": [("cuda:0", 1), ("cuda:1", 1)]} for host in "ab")

    assert called([one, other], 1) == "rank 1 (b/cuda:0 to cuda:1)"
    assert called([one, one], 1) == "rank 1 (host1/cuda:0 to cuda:1, on a)"


def test_a_model_is_placed_and_printed_by_such_names(over_ranks: Any) -> None:
    placement = over_ranks.placement

    assert str(placement.device_of("blocks.4")) == "sim:3"
    lines = repr(placement).splitlines()
    assert lines[1].startswith("sim:0 (host0/cpu:0, home) ")
    assert lines[2].startswith("sim:2 (host1/cpu:0)        blocks.3 ")
    assert "host0 -> host1" in lines[-1]


def test_a_name_that_no_rank_has(load_over: Any, machine: Any) -> None:
    with pytest.raises(ValueError, match="name one of host0/cpu:0 to cpu:1, host1/cpu:0 to cpu:1"):
        load_over("llama", device_map={"": "host0/0", "blocks.3": "host7/0"})


@pytest.mark.parametrize("device", ["sim:0", "sim:2"])
def test_a_tensor_of_the_cpu_is_told_where_to_go(device: str, machine: Any) -> None:
    activation = torch.ones(3, device=device)

    with pytest.raises(RuntimeError, match=rf"devices, {device} and cpu! After .*\.to\(activation"):
        activation + torch.ones(3)


def test_a_hook_that_adds_one_is_told_once(over_ranks: Any) -> None:
    hook = ("blocks.4.hook_resid_post", lambda value, hook: value + torch.ones(value.shape[-1]))

    with pytest.raises(RuntimeError, match=r"is on sim:3 \(host1/cpu:1\)") as message:
        over_ranks.run_with_hooks(torch.arange(4).view(1, 4), fwd_hooks=[hook])

    assert str(message.value).count(".to(") == 1


def test_a_check_is_well_and_says_over_which_hosts(over_ranks: Any) -> None:
    report = check(over_ranks)

    assert report, report
    assert repr(report).splitlines()[0].endswith(" on 3 devices of 2 hosts (host0, host1)")


def test_a_check_names_both_hosts_of_what_is_misplaced(over_ranks: Any) -> None:
    over_ranks.blocks[3].to("sim:0")

    report = check(over_ranks)

    name = "is on sim:0 (host0/cpu:0), but the placement puts it on sim:2 (host1/cpu:0)"
    assert any(name in item.message for item in report.findings)
    assert check(over_ranks, repair=True)


def test_a_check_notes_what_goes_between_hosts_without_need(load_over: Any, machine: Any) -> None:
    back_and_forth = {"": "host0/0", "blocks.1": "host1/0", "blocks.3": "host1/0"}

    report = check(load_over("llama", device_map=back_and_forth))

    assert report
    assert "from host to host 4 times in a forward, where 2 would do" in repr(report)


def test_a_full_device_is_named_with_what_its_rank_holds(over_ranks: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as message:
        torch.empty(1 << 40, device="sim:2")

    assert " sim:2 (host1/cpu:0) has a total capacity of 4.00 GiB of which " in str(message.value)
    # Models of other tests may not be collected yet, of which it holds a part too.
    assert re.search(r" is free\. Rank 1 holds .*\bblocks\.3-4\b.*\.$", str(message.value))
