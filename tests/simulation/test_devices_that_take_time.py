"""Asynchronous devices that take time: how long, one thing at a time, and what is told of it.

No test here measures how long something took: times are those of the devices' own clocks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_devicefix.simulation import Busy, Machine, Timeline, labelled, simulate
from tl_devicefix.simulation.queues import Queues, Task, Work

SHORT, LONG = 0.01, 0.5
"""Seconds; long enough for the host to do something meanwhile, however busy it is."""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with simulate(2, asynchronous=True) as machine:
        yield machine


@pytest.fixture
def sim(machine: Machine) -> Any:
    return torch.get_device_module("sim")


def seconds(busy: Busy) -> float:
    return busy.end - busy.start


def synchronize(machine: Machine) -> Timeline:
    for device in machine.devices:
        torch.get_device_module("sim").synchronize(device)
    return machine.timeline


# --------------------------------------------------------------------------------------------
# How long


def test_a_device_is_kept_busy_for_a_time_and_the_host_goes_on(machine: Machine, sim: Any) -> None:
    machine.keep_busy("sim:1", LONG)
    assert not sim.current_stream("sim:1").query()
    sim.synchronize("sim:1")
    (busy,) = machine.timeline
    assert (busy.name, busy.device, busy.stream) == ("keep_busy", torch.device("sim:1"), 0)
    assert seconds(busy) == pytest.approx(LONG)


def test_values_come_after_what_keeps_their_device_busy(machine: Machine) -> None:
    x = torch.ones(3, device="sim:0")
    machine.keep_busy(0, SHORT)
    y = x * 2
    assert not machine.timeline
    assert y.tolist() == [2, 2, 2]
    assert len(machine.timeline) == 1


def test_a_device_does_one_thing_at_a_time(machine: Machine) -> None:
    for _ in range(20):
        machine.keep_busy(0, 0.001)
    timeline = synchronize(machine)
    assert len(timeline) == 20
    for one, other in pairwise(timeline):
        assert other.start >= one.end


def test_no_time_is_lost_between_what_waits_for_its_device() -> None:
    tasks = [Task((0, 0), lambda: None, work=Work("a block", "", 0.001)) for _ in range(50)]
    start = end = time.monotonic() + 1000  # until when it does something else
    for task in tasks:
        task.begin(end)
        end = task.end
    assert end - start == pytest.approx(50 * 0.001)


def test_streams_of_a_device_take_turns_in_the_order_they_were_given_to(
    machine: Machine, sim: Any
) -> None:
    sides = [sim.Stream("sim:0") for _ in range(3)]
    machine.keep_busy(0, 0.05)
    for number, side in enumerate(sides * 2):
        with sim.stream(side), labelled(str(number)):
            machine.keep_busy(0, 0.002)
    timeline = synchronize(machine)[1:]
    assert [each.label for each in timeline] == list("012345")
    assert all(other.start >= one.end for one, other in pairwise(timeline))


def test_devices_are_busy_at_once(machine: Machine) -> None:
    machine.keep_busy(0, LONG)
    machine.keep_busy(1, LONG)
    one, other = synchronize(machine)
    assert max(one.start, other.start) < min(one.end, other.end)


def test_a_device_that_waits_for_another_begins_when_that_has_ended(
    machine: Machine, sim: Any
) -> None:
    machine.keep_busy(0, SHORT)
    sim.current_stream("sim:1").wait_stream(sim.current_stream("sim:0"))
    machine.keep_busy(1, SHORT)
    one, other = synchronize(machine)
    assert other.start >= one.end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_take_their_floating_point_operations(dtype: torch.dtype) -> None:
    x, y = torch.ones(8, 16, dtype=dtype), torch.ones(16, 4, dtype=dtype)
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


def test_an_operation_that_draws_no_random_numbers_is_not_waited_for() -> None:
    with simulate(1, asynchronous=True) as machine:
        q = torch.ones(1, 2, 6, 4, device="sim:0")
        machine.keep_busy(0, LONG)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert not torch.get_device_module("sim").current_stream().query()


def test_copies_take_their_bytes_on_the_device_that_they_leave() -> None:
    with simulate(2, asynchronous=True, bytes_per_second=1e6) as machine:
        there = torch.ones(1000).to("sim:0").to("sim:1")
        there.clone().copy_(there)  # on one device
        there.cpu()
    assert [(each.device.index, each.is_copy) for each in machine.timeline] == [
        (0, True),
        (0, True),
        (1, True),
    ]
    assert [seconds(each) for each in machine.timeline] == pytest.approx([4000 / 1e6] * 3)


def test_a_copy_on_a_stream_of_its_own_goes_beside_what_is_computed() -> None:
    with simulate(2, asynchronous=True, bytes_per_second=1e6) as machine:
        sim = torch.get_device_module("sim")
        x = torch.ones(25_000, device="sim:0")
        sides = [sim.Stream(device) for device in ("sim:0", "sim:1")]
        sides[0].wait_stream(sim.current_stream("sim:0"))
        machine.keep_busy(0, LONG)
        with sim.stream(sides[1]), sim.stream(sides[0]):
            x.to("sim:1")
        computed, copied = sorted(synchronize(machine), key=lambda busy: busy.is_copy)
    assert copied.is_copy
    assert computed.start <= copied.start
    assert copied.start < computed.end


def test_a_copy_waits_for_its_stream() -> None:
    with simulate(2, asynchronous=True, bytes_per_second=1e6) as machine:
        x = torch.ones(100, device="sim:0")
        machine.keep_busy(0, SHORT)
        x.to("sim:1")
    computed, copied = machine.timeline
    assert copied.start >= computed.end


def test_where_devices_take_time_nothing_is_late() -> None:
    def lateness(machine: Machine) -> set[float]:
        assert machine.asynchronous is not None
        launcher = machine.asynchronous.launcher
        return {
            launcher.launch("a copy", lambda: None, (0, 0), is_copy=True).late for _ in range(20)
        }

    with simulate(1, asynchronous=True) as machine:
        assert len(lateness(machine)) > 1
        machine.keep_busy(0, 0.001)
        assert lateness(machine) == {0.0}
    with simulate(1, asynchronous=True, flops_per_second=math.inf) as machine:
        assert lateness(machine) == {0.0}


def test_numbers_are_the_cpus() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
    x = torch.randn(4, 6)
    layers(x).sum().backward()
    expected = [layers(x), *(parameter.grad for parameter in layers.parameters())]
    with simulate(2, asynchronous=True, flops_per_second=1e7, bytes_per_second=1e7):
        layers.zero_grad()
        layers[:2].to("sim:0")
        layers[2].to("sim:1")
        logits = layers[2](layers[:2](x.to("sim:0")).to("sim:1"))
        logits.sum().backward()
        found = [logits, *(parameter.grad for parameter in layers.parameters())]
        for one, other in zip(expected, found):
            assert torch.equal(one, other.cpu())


# --------------------------------------------------------------------------------------------
# Events


def test_events_tell_the_time_of_the_device(machine: Machine, sim: Any) -> None:
    start, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    start.record()
    machine.keep_busy(0, 0.03)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 30
    assert start.elapsed_time(end) == pytest.approx(-end.elapsed_time(start))
    later = sim.Event(enable_timing=True)
    later.record()  # where nothing is left to run, it is there at once
    assert end.elapsed_time(later) >= 0


def test_events_without_times_are_refused(machine: Machine, sim: Any) -> None:
    plain, recorded, never = sim.Event(), sim.Event(enable_timing=True), sim.Event(True)
    plain.record()
    recorded.record()
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        recorded.elapsed_time(plain)
    with pytest.raises(RuntimeError, match="must be recorded"):
        recorded.elapsed_time(never)
    machine.keep_busy(0, LONG)
    never.record()
    with pytest.raises(RuntimeError, match="synchronize them"):
        recorded.elapsed_time(never)


# --------------------------------------------------------------------------------------------
# The timeline


def test_without_times_nothing_is_recorded() -> None:
    with simulate(2, asynchronous=True) as machine:
        (torch.ones(3, 3, device="sim:0") @ torch.ones(3, 3, device="sim:0")).to("sim:1")
    assert machine.timeline == []
    with simulate(2) as machine:
        assert machine.timeline == []


def busy(device: int, start: float, end: float, label: str = "", is_copy: bool = False) -> Busy:
    name = "copy_" if is_copy else "keep_busy"
    return Busy(name, torch.device("sim", device), 0, start, end, is_copy, label, late=0.0)


@pytest.fixture
def timeline(machine: Machine) -> Timeline:
    return Timeline(
        [
            busy(0, 1.0, 2.0, "run 0"),
            busy(0, 2.0, 2.5, "run 0", is_copy=True),
            busy(1, 2.5, 4.0, "run 0"),
            busy(0, 2.0, 3.0, "run <1>"),
        ]
    )


def test_the_busy_share_is_of_what_is_computed(timeline: Timeline) -> None:
    assert (timeline.start, timeline.end) == (1.0, 4.0)
    assert timeline.busy_share(0) == pytest.approx(2 / 3)
    assert timeline.busy_share("sim:1") == pytest.approx(1 / 2)
    assert timeline.busy_share(torch.device("sim:1"), start=2, end=3) == pytest.approx(1 / 2)
    assert timeline.busy_seconds(0) == pytest.approx(2)
    assert timeline[2:].busy_share(0, end=4) == pytest.approx(1 / 2)
    assert Timeline().busy_share(0) == 0


def test_labels_say_who_gave_what(machine: Machine) -> None:
    with labelled("run 0"):
        machine.keep_busy(0, 0.001)
        with labelled("run 1"):
            machine.keep_busy(0, 0.001)
    machine.keep_busy(0, 0.001)
    assert [each.label for each in synchronize(machine)] == ["run 0", "run 1", ""]


def test_a_saved_timeline_is_a_trace_as_the_profiler_writes_them(
    timeline: Timeline, tmp_path: Path
) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3) + 1
    profile.export_chrome_trace(str(tmp_path / "profiled.json"))
    timeline.save(tmp_path / "trace.json")
    profiled, saved = (
        json.loads((tmp_path / name).read_text()) for name in ("profiled.json", "trace.json")
    )
    assert set(saved) <= set(profiled)
    for phase in ("X", "M"):
        theirs = [event for event in profiled["traceEvents"] if event["ph"] == phase]
        ours = [event for event in saved["traceEvents"] if event["ph"] == phase]
        assert ours
        for event in ours:
            assert set(event) == set(theirs[0])
    first = next(event for event in saved["traceEvents"] if event["ph"] == "X")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (0, 0, 1e6, 1e6)


# --------------------------------------------------------------------------------------------
# Leaving, and what is refused


def test_leaving_waits_for_what_devices_are_busy_with() -> None:
    with simulate(2, asynchronous=True) as machine:
        machine.keep_busy(0, 0.02)
        machine.keep_busy(1, 0.01)
    assert sorted(map(seconds, machine.timeline)) == pytest.approx([0.01, 0.02])


def test_leaving_by_an_error_runs_what_there_is_and_takes_no_time() -> None:
    kept: list[Any] = []

    def leave() -> None:
        with simulate(2, asynchronous=True) as machine:
            machine.keep_busy(0, 100)
            machine.keep_busy(0, 100)
            kept.extend((machine, torch.ones(3, device="sim:0") * 2))
            raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        leave()
    machine, values = kept
    assert [each.late < 0 for each in machine.timeline] == [True, True]
    assert values.tolist() == [2, 2, 2]


def test_an_interrupt_drops_what_devices_are_busy_with() -> None:
    queues = Queues(1, seed=0)
    tasks = [queues.submit((0, 0), int, work=Work("a block", "", 100.0)) for _ in range(2)]
    queues._end(drop=True)
    assert all(task.done for task in tasks)
    assert not queues.timeline


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
    with simulate(2) as machine, pytest.raises(RuntimeError, match="Only asynchronous devices"):
        machine.keep_busy(0, 1.0)
    with simulate(2, asynchronous=True) as machine:
        for wrong in (-1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="kept busy for some seconds, but not for"):
                machine.keep_busy(0, wrong)
        machine.keep_busy(0, 0)
    assert not machine.timeline
    with pytest.raises(RuntimeError, match="within it"):
        machine.keep_busy(0, 1.0)
