"""Devices behind the host: what nothing orders is a race, and what waits is none."""

import contextlib

import pytest
import torch

from racing import RaceError
from tl_devicefix.demo import selfcheck
from tl_devicefix.placement.workers import each_on_its_device

pytestmark = pytest.mark.once


def test_unordered_use_of_memory_names_both_operations(sim):
    x, y = torch.ones(3, device="sim:0").mul_(2), torch.ones(3, device="sim:0")
    sim.current_stream("sim:0").synchronize()
    x.mul_(2)
    y + 1
    side = r"stream \d+ of sim:0"
    with sim.stream(sim.Stream("sim:0")):
        with pytest.raises(
            RaceError, match=rf"add\S* on {side} reads memory that \S*mul_.* writes"
        ):
            x + 1
        with pytest.raises(RaceError, match=rf"mul_\S* on {side} writes memory that .*add.* reads"):
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
    with pytest.raises(RaceError, match=r"add\.Tensor .* of sim:1 reads .* copy_ .* writes"):
        copied + 1


def test_a_race_in_a_backward_is_raised(sim):
    x = torch.ones(3, device="sim:0", requires_grad=True)
    y = (x * x).sum()
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match="nothing orders it"):
        y.backward()


@pytest.mark.parametrize("keep", ["record_stream", "wait_stream", "nothing"])
def test_memory_freed_while_another_stream_uses_it_is_refused(keep, sim):
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
    refused = pytest.raises(RaceError, match=r"add\.Tensor .* uses memory that was freed")
    with refused if keep == "nothing" else contextlib.nullcontext():
        sim.synchronize("sim:0")


def test_pinned_memory_may_not_be_changed_if_its_copy_is_used(sim):
    host = torch.ones(100).pin_memory()
    copied = torch.empty(100, device="sim:0").copy_(host, non_blocking=True)
    host.mul_(2)
    with pytest.raises(RaceError, match=r"reads what is wrong: aten\.mul_.* the host .* copy_ on"):
        copied + 1
    tripled = copied.copy_(host, non_blocking=True) * 3
    with pytest.raises(RaceError, match=r"aten\.mul_.* the host writes memory that copy_ .* reads"):
        host.mul_(2)
    sim.synchronize("sim:0")
    host.mul_(2)
    assert (tripled == 6).all()


def test_values_are_in_pinned_memory_once_the_host_has_waited(sim):
    host = torch.ones(100, device="sim:0").to("cpu", non_blocking=True)
    for read in (torch.Tensor.sum, torch.Tensor.numpy):
        with pytest.raises(RaceError, match=r"on the host reads memory that copy_ on stream"):
            read(host)
    sim.synchronize("sim:0")
    assert host.sum() == host.numpy().sum() == 100


def test_workers_use_the_caller_s_streams(machine, sim):
    devices, used = machine.devices[:2], []
    streams = [sim.Stream(device) for device in devices]
    with sim.stream(streams[0]), sim.stream(streams[1]):
        each_on_its_device(lambda on: used.append(sim.current_stream(on)), devices, devices)
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
