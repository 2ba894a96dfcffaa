"""Ranks of one host have its devices between them, and of its CPU's memory each a part."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from launching import Launch

import tl_devicefix
from tl_devicefix.multihost import handshake
from tl_devicefix.multihost.handshake import free_memory, hello, shared, visible_devices

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


@pytest.mark.parametrize("told", [{"uuid": "abab"}, {"uuid": "0000", "pci_bus_id": "1212"}, {}])
def test_processes_of_a_machine_see_the_same_devices(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an accelerator's module of torch tells of them; no machine of CI has one."""
    of_type: dict[str, Any] = {"device_count": lambda: 2}
    if told:
        result = iter(
            [SimpleNamespace(**dict(zip(told, values))) for values in zip(*told.values())]
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
    launched = launch("see_a_full_gpu")

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
