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

LONG = 0.3
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


# --------------------------------------------------------------------------------------------
# How long


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
