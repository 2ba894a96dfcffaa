"""`simulate(n, asynchronous=True)`: devices behind the host, in the order of streams and events."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tl_devicefix.simulation import Busy, Machine, RaceError, Timeline, labelled, simulate

LONG = 0.3
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


# --------------------------------------------------------------------------------------------
# How long all takes, by the devices' own clocks


def seconds(busy: Busy) -> float:
    return busy.end - busy.start


def test_a_device_does_one_thing_at_a_time_and_loses_none_between(
    machine: Machine, sim: Any
) -> None:
    sides = [sim.Stream("sim:0") for _ in range(3)]
    machine.keep_busy(0, LONG)
    for number, side in enumerate(sides * 2):
        with sim.stream(side), labelled(str(number)):
            machine.keep_busy(0, 0.002)
    (first, *_) = machine.timeline
    assert (first.name, first.device, first.stream) == ("keep_busy", torch.device("sim:0"), 0)
    assert seconds(first) == pytest.approx(LONG)
    assert [busy.label for busy in machine.timeline[1:]] == list("012345")
    for one, other in pairwise(machine.timeline):
        assert other.start == pytest.approx(one.end)


def test_operations_take_their_floating_point_operations() -> None:
    x, y = torch.ones(8, 16), torch.ones(16, 4)
    with simulate(1, asynchronous=True, flops_per_second=1e6) as machine:
        product = x.to("sim:0") @ y.to("sim:0")
        assert torch.equal(product.relu().cpu(), x @ y)
    (busy,) = machine.timeline
    assert busy.name == "aten.mm.default"
    assert seconds(busy) == pytest.approx(2 * 8 * 16 * 4 / 1e6)


def test_attention_and_backwards_take_time_too() -> None:
    with simulate(1, asynchronous=True, flops_per_second=1e9) as machine:
        q = torch.rand(1, 2, 6, 4).to("sim:0").requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    forward, backward = machine.timeline
    assert "attention" in forward.name
    assert "backward" in backward.name
    assert seconds(backward) > seconds(forward) > 0


def test_copies_take_their_bytes_on_the_device_that_they_leave() -> None:
    with simulate(2, asynchronous=True, bytes_per_second=1e6) as machine:
        copied = torch.ones(1000).to("sim:0").to("sim:1")
        copied.clone().copy_(copied)  # on one device
        copied.cpu()
    assert [(busy.device.index, busy.is_copy) for busy in machine.timeline] == [
        (0, True),
        (0, True),
        (1, True),
    ]
    assert [seconds(busy) for busy in machine.timeline] == pytest.approx([4000 / 1e6] * 3)


@pytest.mark.parametrize("beside", [True, False])
def test_a_copy_on_a_stream_of_its_own_goes_beside_what_is_computed(beside: bool) -> None:
    with simulate(2, asynchronous=True, bytes_per_second=1e6) as machine:
        sim = torch.get_device_module("sim")
        x, side = torch.ones(2_500, device="sim:0"), sim.Stream("sim:0")
        side.wait_stream(sim.current_stream("sim:0"))
        machine.keep_busy(0, LONG)
        with sim.stream(side if beside else None):
            x.to("sim:1")
    computed, copied = machine.timeline
    assert copied.is_copy
    assert (copied.start < computed.end) == beside


def test_events_tell_the_time_of_the_device(machine: Machine, sim: Any) -> None:
    start, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    start.record()
    machine.keep_busy(0, 0.03)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 30
    assert start.elapsed_time(end) == pytest.approx(-end.elapsed_time(start))


# --------------------------------------------------------------------------------------------
# The timeline


def busy(device: int, start: float, end: float, label: str = "", is_copy: bool = False) -> Busy:
    name = "copy_" if is_copy else "keep_busy"
    return Busy(name, torch.device("sim", device), 0, start, end, is_copy, label)


@pytest.fixture
def timeline(machine: Machine) -> Timeline:
    return Timeline(
        [
            busy(0, 1.0, 2.0, "run 0"),
            busy(0, 2.0, 2.5, "run 0", is_copy=True),
            busy(1, 2.5, 4.0, "run 0"),
            busy(0, 2.0, 3.0, "run 1"),
        ]
    )


def test_the_busy_share_is_of_what_is_computed(timeline: Timeline) -> None:
    assert (timeline.start, timeline.end) == (1.0, 4.0)
    assert timeline.busy_share(0) == pytest.approx(2 / 3)
    assert timeline.busy_share("sim:1") == pytest.approx(1 / 2)
    assert timeline.busy_share(torch.device("sim:1"), start=2, end=3) == pytest.approx(1 / 2)
    assert timeline[2:].busy_share(0, end=4) == pytest.approx(1 / 2)
    assert Timeline().busy_share(0) == 0


def test_a_saved_timeline_is_a_trace_for_perfetto(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    assert names == [(0, "sim:0"), (1, "sim:1"), (0, "stream 0"), (1, "stream 0")]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["cat"] for event in spans] == ["kernel", "gpu_memcpy", "kernel", "kernel"]
    assert spans[0]["name"] == "keep_busy (run 0)"
    first = [spans[0][key] for key in ("pid", "tid", "ts", "dur")]
    assert first == [0, 0, 1e6, 1e6]


# --------------------------------------------------------------------------------------------
# Leaving, and what is refused


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_leaving_waits_for_devices_unless_it_is_by_an_error(error: Any) -> None:
    start, kept = time.monotonic(), []
    try:
        with simulate(2, asynchronous=True) as machine:
            kept.append(torch.ones(3, device="sim:1") * 2)
            machine.keep_busy(0, 100 if error else 0.02)
            kept.append(kept[0].to("cpu", non_blocking=True))
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as caught:
        assert type(caught) is error  # noqa: PT017
    assert 50 > time.monotonic() - start > (0 if error else 0.02)
    assert [tensor.cpu().tolist() for tensor in kept] == [[2, 2, 2]] * 2


@pytest.mark.parametrize("name", ["flops_per_second", "bytes_per_second"])
def test_times_are_refused_where_nothing_is_behind(name: str) -> None:
    with pytest.raises(ValueError, match="give asynchronous=True too"), simulate(2, **{name: 1e9}):
        pass
    with (
        pytest.raises(ValueError, match=f"{name} must be above 0, but is -1"),
        simulate(2, asynchronous=True, **{name: -1}),
    ):
        pass


def test_devices_that_are_not_behind_are_not_kept_busy() -> None:
    with simulate(2) as machine, pytest.raises(RuntimeError, match="only asynchronous devices"):
        machine.keep_busy(0, 1.0)
    with simulate(2, asynchronous=True) as machine:
        for wrong in (-1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="seconds must be 0 or more"):
                machine.keep_busy(0, wrong)
