"""Ranks of one host have its devices between them, and call them by their hosts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from launching import Launch

import tl_devicefix
from tl_devicefix import check
from tl_devicefix.multihost import handshake
from tl_devicefix.multihost.handshake import (
    Place,
    called,
    free_memory,
    hello,
    places,
    shared,
    sites_of,
    visible_devices,
)

GiB = 1 << 30


def gpus(host: str, *numbers: int) -> list[tuple[str, str]]:
    """Devices of a host that a rank sees, as it calls them, and as all know them."""
    return [(f"cuda:{index}", f"{host}'s GPU {number}") for index, number in enumerate(numbers)]


def parts(*everyone: Any) -> list[list[str]]:
    """Of all ranks, each of which sees devices, and asks for all of its part or for a number."""
    return shared([hello(*item) if isinstance(item, tuple) else hello(item) for item in everyone])


A, B = gpus("a", 0, 1, 2, 3), gpus("b", 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("ranks", "devices"),
    [
        ([A, B[:3]], [[0, 1, 2, 3], [0, 1, 2]]),
        ([A, A, B, B], [[0, 1], [2, 3]] * 2),
        ([A, A, A], [[0], [1], [2, 3]]),
        ([(A, 1), A], [[0], [2, 3]]),
        ([gpus("a", 0, 1), gpus("a", 1, 0)], [[0], [0]]),
        ([gpus("a", 0), gpus("a", 1)], [[0], [0]]),
    ],
    ids=["one a host", "two a host", "three of four", "asks", "own numbers", "see their own"],
)
def test_ranks_of_a_host_have_equal_parts_in_order(ranks: Any, devices: list[list[int]]) -> None:
    assert parts(*ranks) == [[f"cuda:{index}" for index in of_rank] for of_rank in devices]


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        (
            [A[:2]] * 3,
            "^3 ranks share the 2 devices of .*, which leaves 0 for rank 0, but it needs 1",
        ),
        (
            [(A, 3), A],
            "^2 ranks share the 4 devices of .*, which leaves 2 for rank 0, but it needs 3",
        ),
        (
            [A[:2], gpus("a", 1, 2)],
            "^rank 1 .* and rank 0 both have the device that rank 1 calls c",
        ),
    ],
)
def test_devices_that_two_ranks_would_have(ranks: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parts(*ranks)


@pytest.mark.parametrize("fields", [{"uuid": "abab"}, {"uuid": "0000", "pci_bus_id": "1212"}, {}])
def test_processes_of_a_machine_see_the_same_devices(
    fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an accelerator's module of torch tells of them; no machine of CI has one."""
    of_type: dict[str, Any] = {"device_count": lambda: 2}
    if fields:
        result = iter(
            [SimpleNamespace(**dict(zip(fields, values))) for values in zip(*fields.values())]
        )
        of_type["get_device_properties"] = lambda device: next(result)
    monkeypatch.setattr(handshake, "real_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(**of_type))

    one, other = visible_devices(None), visible_devices(2)

    assert one == other
    assert len({result for _, result in one}) == 2
    with pytest.raises(ValueError, match=r"^n_devices must be 2 or less, .*, but is 3$"):
        visible_devices(3)


@pytest.mark.parametrize("n_devices", [0, -1])
def test_a_rank_that_asks_for_no_device(n_devices: int) -> None:
    with pytest.raises(ValueError, match=rf"^n_devices must be 1 or more, but is {n_devices}$"):
        visible_devices(n_devices)


def test_cpu_devices_of_a_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=6 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(handshake, "real_accelerator", lambda: None)
    asked = (1, None), (2, None), (1, "1GiB"), (1, None)
    everyone = [hello(visible_devices(n), n, memory) for n, memory in asked]
    everyone[-1]["machine"] = "another"

    result = [
        free_memory([torch.device(name) for name in names], everyone, rank)
        for rank, names in enumerate(shared(everyone))
    ]

    assert result == [[2 * GiB], [2 * GiB] * 2, [GiB], [6 * GiB]]


def test_all_ranks_are_told_of_one_that_cannot_tell_what_is_free(launch: Launch) -> None:
    launched = launch("see_a_full_gpu", memory=None)

    assert launched.ends() == [3, 3, 3]
    for rank in range(3):
        text = launched.text("said", rank)
        assert re.search(
            r'"rank 1 \(.*\) cannot tell how much memory is free: CUDA error: out of memory"', text
        )


@pytest.mark.parametrize("options", [{"rank": 0}, {"master": "localhost:29500"}])
def test_a_rank_says_how_many_there_are(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"^init_hosts\(\) needs world_size too"):
        tl_devicefix.init_hosts(**options)


# --------------------------------------------------------------------------------------------
# They are called by their hosts, before and after a load; `check` knows them

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


def test_a_full_device_is_named_with_what_its_rank_holds(over_ranks: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as message:
        torch.empty(1 << 40, device="sim:2")

    assert " sim:2 (host1/cpu:0) has a total capacity of 4.00 GiB of which " in str(message.value)
    # Models of other tests may not be collected yet, of which it holds a part too.
    assert re.search(r" is free\. Rank 1 holds .*\bblocks\.3-4\b.*\.$", str(message.value))
