"""`simulate(n, asynchronous=True)`: devices behind the host, in the order of streams and events."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from tl_devicefix.simulation import Machine, RaceError, simulate

LONG = 0.2
"""Seconds; long enough for the host to do something meanwhile, however busy it is."""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with simulate(2, asynchronous=True) as machine:
        yield machine


@pytest.fixture
def sim(machine: Machine) -> Any:
    """The module of the device, as torch gives it: `sim.Stream("sim:0")`."""
    return torch.get_device_module("sim")


# --------------------------------------------------------------------------------------------
# Behind the host


def test_the_host_goes_on_and_waits_for_values(machine: Machine, sim: Any) -> None:
    x = torch.ones(3, 4, device="sim:0")
    machine.keep_busy("sim:0", LONG)

    y = (x @ x.T).softmax(-1)[:, :2]

    assert y.shape == (3, 2)
    assert not sim.current_stream("sim:0").query()
    torch.testing.assert_close(y.cpu(), torch.full((3, 2), 1 / 3))
    assert sim.current_stream("sim:0").query()


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, torch.rand_like])
def test_devices_do_not_wait_for_each_other(machine: Machine, sim: Any, like: Any) -> None:
    x = torch.ones(3, device="sim:0")
    machine.keep_busy("sim:0", LONG)
    assert (torch.ones(3, device="sim:1") + 1).tolist() == [2, 2, 2]
    assert like(x, device="sim:1").cpu().shape == x.shape  # whose values are not read
    assert not sim.current_stream("sim:0").query()


def test_a_copy_between_devices_waits_for_its_source(machine: Machine, sim: Any) -> None:
    x = torch.ones(3, device="sim:0")
    machine.keep_busy("sim:0", LONG)
    y = (x * 2).to("sim:1") + 1
    assert not sim.current_stream("sim:1").query()
    assert y.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "operation", [lambda x: x[x > 1], torch.nonzero, lambda x: torch.equal(x, x.clone())]
)
def test_what_depends_on_values_waits_for_them(machine: Machine, sim: Any, operation: Any) -> None:
    x = torch.arange(4, device="sim:0")
    machine.keep_busy("sim:0", LONG)
    operation(x)
    assert sim.current_stream("sim:0").query()


def train(device: str, other: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.GELU(), torch.nn.Dropout(0.2)
    ).to(device)
    head = torch.nn.Linear(6, 3).to(other)
    parameters = [*layers.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 6).to(device)
        x[:, 0] += torch.rand(5, device=device)
        logits = head(layers(x).to(other))
        loss = torch.nn.functional.cross_entropy(logits, logits.argmax(-1).flip(0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters[:2], 1.0)
        optimizer.step()
    return [loss.detach().cpu(), *(parameter.detach().cpu() for parameter in parameters)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"asynchronous": True},
        {"asynchronous": True, "flops_per_second": 1e7, "bytes_per_second": 1e7},
    ],
    ids=str,
)
def test_results_are_exactly_those_of_the_cpu(options: dict[str, Any]) -> None:
    expected = train("cpu", "cpu")
    with simulate(2, **options):
        results = train("sim:0", "sim:1")
    for result, other in zip(results, expected):
        assert torch.equal(result, other)


# --------------------------------------------------------------------------------------------
# Streams and events


def test_a_stream_that_waits_for_another_is_ordered_after_it(machine: Machine, sim: Any) -> None:
    side = sim.Stream("sim:0")
    machine.keep_busy("sim:0", 0.01)
    x = torch.ones(3, device="sim:0") * 2
    side.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(side):
        y = x + 1
        assert sim.current_stream("sim:0") == side
    assert sim.current_stream("sim:0") == sim.default_stream("sim:0")
    sim.current_stream("sim:0").wait_stream(side)
    assert (y * 2).tolist() == [6, 6, 6]


def test_a_read_that_nothing_orders_after_a_write_names_both_operations(sim: Any) -> None:
    x = torch.ones(3, device="sim:0").mul_(2)
    named = (
        r"aten\.add\.Tensor on stream \d+ of sim:0 \(.*test_asynchronous\.py:\d+\) reads memory "
        r"that aten\.mul_\.Tensor on stream 0 of sim:0 \(.*test_asynchronous\.py:\d+\) writes"
    )
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match=named):
        x + 1


def test_a_write_that_nothing_orders_after_a_read_is_refused(sim: Any) -> None:
    x = torch.ones(3, device="sim:0")
    side = sim.Stream("sim:0")
    sim.synchronize("sim:0")
    x + 1
    with sim.stream(side), pytest.raises(RaceError, match=r"mul_.* writes .*add\.Tensor.* reads"):
        x.mul_(2)


def test_an_event_orders_what_was_before_it_only(sim: Any) -> None:
    side = sim.Stream("sim:0")
    x, y = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:0")
    x.mul_(2)
    event = sim.current_stream("sim:0").record_event()
    y.mul_(2)
    side.wait_event(event)
    with sim.stream(side):
        z = x + 1
        with pytest.raises(RaceError, match="nothing orders it"):
            y + 1
    side.synchronize()
    assert z.cpu().tolist() == [3, 3, 3]
    assert event.query()


def test_a_race_in_a_backward_is_raised(sim: Any) -> None:
    x = torch.ones(3, device="sim:0", requires_grad=True)
    y = (x * x).sum()
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match="nothing orders it"):
        y.backward()


def test_only_asynchronous_devices_have_streams_and_they_have_values() -> None:
    refused = pytest.raises(ValueError, match="asynchronous devices compute values")
    with refused, simulate(2, asynchronous=True, values=False):
        pass
    with simulate(2):
        assert not hasattr(torch.get_device_module("sim"), "current_stream")


# --------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(100, device="sim:0"),
        lambda: torch.empty_like(torch.ones(3, device="sim:0")),
        lambda: torch.ones(3, device="sim:0").new_empty(5),
    ],
)
def test_memory_without_values_is_poisoned(machine: Machine, make: Any) -> None:
    assert make().isnan().all()
    assert (torch.empty(3, dtype=torch.int64, device="sim:0").cpu() == -1).all()


def test_memory_that_is_freed_while_another_stream_uses_it_is_found(sim: Any) -> None:
    side = sim.Stream("sim:0")
    x = torch.ones(3, device="sim:0")
    side.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(side):
        y = x + 1
    del x
    named = r"add\.Tensor on stream \d+ .* uses memory that was freed, .* taken by an allocation"
    with pytest.raises(RaceError, match=named):
        sim.synchronize("sim:0")
    assert y.shape == (3,)


@pytest.mark.parametrize("keep", ["record_stream", "wait_stream"])
def test_memory_may_be_kept_for_another_stream(sim: Any, keep: str) -> None:
    side = sim.Stream("sim:0")
    x = torch.ones(1000, device="sim:0")
    side.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(side):
        y = x + 1
    if keep == "record_stream":
        x.record_stream(side)
    else:
        sim.current_stream("sim:0").wait_stream(side)
    del x
    side.synchronize()
    with sim.stream(side):
        assert (y == 2).all()


def test_a_race_that_is_found_by_freeing_is_raised_at_the_latest_on_leaving() -> None:
    entered = simulate(1, asynchronous=True)
    entered.__enter__()
    sim = torch.get_device_module("sim")
    x = torch.ones(3, device="sim:0")
    sim.synchronize()
    with sim.stream(sim.Stream("sim:0")):
        x + 1
    del x
    with pytest.raises(RaceError, match="freed"):
        entered.__exit__(None, None, None)


def test_tensors_that_are_freed_after_leaving_are_let_go_of() -> None:
    with simulate(1, asynchronous=True) as machine:
        kept = torch.ones(3, device="sim:0")
    assert machine.memory_allocated(0) == 12
    assert kept.cpu().tolist() == [1, 1, 1]
    del kept
    gc.collect()
    assert machine.memory_allocated(0) == 0
    assert not torch.ones(3).is_pinned()


# --------------------------------------------------------------------------------------------
# The host's memory


def test_memory_that_is_not_pinned_may_be_changed_at_once(machine: Machine) -> None:
    host, copied = torch.ones(100), torch.empty(100, device="sim:0")
    machine.keep_busy("sim:0", 0.01)
    copied.copy_(host, non_blocking=True)
    host.zero_()
    assert not host.is_pinned()
    assert (copied == 1).all()


def test_pinned_memory_that_is_changed_too_early_names_both_operations(sim: Any) -> None:
    host = torch.ones(100).pin_memory()
    assert host.is_pinned()
    copied = torch.empty(100, device="sim:0").copy_(host, non_blocking=True) * 2
    named = (
        r"aten\.mul_\.Tensor on the host \(.*test_asynchronous\.py:\d+\) writes memory that copy_ "
        r"on stream 0 of sim:0 \(.*test_asynchronous\.py:\d+\) reads"
    )
    with pytest.raises(RaceError, match=named):
        host.mul_(2)
    assert copied.shape == (100,)
    sim.synchronize("sim:0")
    host.mul_(2)


def test_a_copy_whose_source_changed_meanwhile_may_be_dropped_but_not_read(sim: Any) -> None:
    host = torch.ones(100).pin_memory()
    copied, dropped = (
        torch.empty(100, device="sim:0").copy_(host, non_blocking=True) for _ in range(2)
    )
    host.mul_(2)
    del dropped
    with pytest.raises(RaceError, match=r"a copy that is wrong: aten\.mul_.* copy_ on stream 0"):
        copied + 1
    assert (copied.copy_(host) == 2).all()


def test_values_come_to_pinned_memory_when_the_host_waits(machine: Machine, sim: Any) -> None:
    x = torch.ones(100, device="sim:0")
    machine.keep_busy(0, LONG)
    host = x.to("cpu", non_blocking=True)
    x.zero_()
    with pytest.raises(RaceError, match=r"on the host .* reads memory that copy_ on stream 0"):
        host + 1
    assert numpy.isnan(host.numpy()).all()  # behind torch's back
    sim.synchronize("sim:0")
    assert (host == 1).all()
