"""Devices behind the host: what nothing orders is a race, and what waits is none."""

import contextlib

import pytest
import torch

from racing import RaceError, asynchronous
from tl_devicefix.demo import selfcheck
from tl_devicefix.placement.workers import each_on_its_device


@pytest.fixture
def machine():
    with asynchronous(2) as machine:
        yield machine


@pytest.fixture
def sim(machine):
    """The module of the device, as torch gives it: `sim.Stream("sim:0")`."""
    return torch.get_device_module("sim")


PLACE = r"stream \d+ of sim:0 \(.*test_detector\.py:\d+\)"


def test_unordered_use_of_memory_names_both_operations(sim):
    x, y = torch.ones(3, device="sim:0").mul_(2), torch.ones(3, device="sim:0")
    sim.current_stream("sim:0").synchronize()
    x.mul_(2)
    y + 1
    with sim.stream(sim.Stream("sim:0")):
        named = rf"add\.Tensor on {PLACE} reads memory that aten\.mul_\.Tensor on {PLACE} writes"
        with pytest.raises(RaceError, match=named):
            x + 1
        named = rf"mul_\.Tensor on {PLACE} writes memory that aten\.add\.Tensor on {PLACE} reads"
        with pytest.raises(RaceError, match=named):
            y.mul_(2)


def test_an_event_orders_what_was_before_it_only(sim):
    x, y = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:0")
    x.mul_(2)
    event = sim.current_stream("sim:0").record_event()
    y.mul_(2)
    side = sim.Stream("sim:0")
    side.wait_event(event)
    with sim.stream(side):
        assert (x + 1).tolist() == [3, 3, 3]
        with pytest.raises(RaceError, match="nothing orders it"):
            y + 1


def test_a_copy_between_devices_waits_and_is_waited_for(sim):
    x = torch.ones(3, device="sim:0")
    assert ((x * 2).to("sim:1") + 1).tolist() == [3, 3, 3]
    with sim.stream(sim.Stream("sim:1")):
        assert torch.zeros_like(x, device="sim:1").tolist() == [0, 0, 0]  # reads no values
        copied = (x * 2).to("sim:1")
    with pytest.raises(RaceError, match=r"add\.Tensor .* of sim:1 .* reads .* copy_ .* writes"):
        copied + 1


def test_a_race_in_a_backward_is_raised(sim):
    x = torch.ones(3, device="sim:0", requires_grad=True)
    y = (x * x).sum()
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match="nothing orders it"):
        y.backward()


@pytest.mark.parametrize("keep", ["record_stream", "wait_stream", "nothing"])
def test_memory_freed_while_another_stream_uses_it_is_refused(keep):
    refused = pytest.raises(RaceError, match=r"add\.Tensor .* uses memory that was freed")
    with refused if keep == "nothing" else contextlib.nullcontext(), asynchronous(1):
        sim = torch.get_device_module("sim")
        side, main = sim.Stream("sim:0"), sim.current_stream("sim:0")
        x = torch.ones(1000, device="sim:0")
        side.wait_stream(main)
        with sim.stream(side):
            x + 1
        if keep == "record_stream":
            x.record_stream(side)
        elif keep == "wait_stream":
            main.wait_stream(side)
        del x


def test_pinned_memory_may_not_be_changed_during_its_copy(sim):
    host = torch.ones(100).pin_memory()
    copied = torch.empty(100, device="sim:0").copy_(host, non_blocking=True) * 2
    named = r"aten\.mul_\.Tensor on the host .* writes memory that copy_ on stream .* reads"
    with pytest.raises(RaceError, match=named):
        host.mul_(2)
    sim.synchronize("sim:0")
    host.mul_(2)
    assert (copied == 2).all()


def test_copy_of_a_changed_source_may_be_dropped_but_not_read(sim):
    host = torch.ones(100).pin_memory()
    copied, dropped = (
        torch.empty(100, device="sim:0").copy_(host, non_blocking=True) for _ in range(2)
    )
    host.mul_(2)
    del dropped
    with pytest.raises(RaceError, match=r"a copy that is wrong: aten\.mul_.* copy_ on stream"):
        copied + 1
    assert (copied.copy_(host) == 2).all()


def test_values_are_in_pinned_memory_once_the_host_has_waited(sim):
    host = torch.ones(100, device="sim:0").to("cpu", non_blocking=True)
    for read in (torch.Tensor.sum, torch.Tensor.numpy):
        with pytest.raises(RaceError, match=r"on the host .* reads memory that copy_ on stream"):
            read(host)
    sim.synchronize("sim:0")
    assert host.sum() == host.numpy().sum() == 100


def test_workers_use_the_caller_s_streams(machine, sim):
    streams, used = [sim.Stream(device) for device in machine.devices], []
    for stream in streams:
        sim.set_stream(stream)
    each_on_its_device(
        lambda device: used.append(sim.current_stream(device)), machine.devices, machine.devices
    )
    assert set(used) == set(streams)


def test_the_selfcheck_looks_whether_gradients_keep_their_memory(machine, capsys, monkeypatch):
    for name in ("_check_copy", "_check_parity"):
        monkeypatch.setattr(selfcheck, name, lambda *_: True)
    monkeypatch.setattr(selfcheck, "_BUSY", (2, 1))
    monkeypatch.setattr(selfcheck, "_COPY_ELEMENTS", 3)
    assert selfcheck.run_selfcheck("sim")
    assert "gradients between streams of sim:1: ok" in capsys.readouterr().out
    register = torch.Tensor.register_hook
    monkeypatch.setattr(torch.Tensor, "register_hook", lambda x, _: register(x, torch.zeros_like))
    assert not selfcheck.run_selfcheck("sim")
    assert "gradients between streams of sim:1: 3 WRONG" in capsys.readouterr().out
