"""Devices behind the host: what nothing orders is a race, and what waits is none."""

from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from racing import RaceError, asynchronous
from tl_devicefix.demo import selfcheck
from tl_devicefix.placement.workers import each_on_its_device

pytestmark = pytest.mark.hooked


@pytest.fixture
def machine():
    with asynchronous(2) as machine:
        yield machine


@pytest.fixture
def sim(machine):
    """The module of the device, as torch gives it: `sim.Stream("sim:0")`."""
    return torch.get_device_module("sim")


def test_the_host_goes_on_and_waits_for_values(sim):
    x = torch.ones(3, 4, device="sim:0")
    y = (x @ x.T).softmax(-1)[:, :2]
    assert y.shape == (3, 2)
    assert not sim.current_stream("sim:0").query()
    torch.testing.assert_close(y.cpu(), torch.full((3, 2), 1 / 3))
    assert sim.current_stream("sim:0").query()


def test_devices_wait_for_each_other_only_for_copied_values(sim):
    x = torch.ones(3, device="sim:0")
    assert (torch.ones(3, device="sim:1") + 1).tolist() == [2, 2, 2]
    for like in (torch.zeros_like, torch.ones_like, torch.rand_like):  # which read no values
        assert like(x, device="sim:1").cpu().shape == x.shape
    assert not sim.current_stream("sim:0").query()
    y = (x * 2).to("sim:1") + 1
    assert not sim.current_stream("sim:1").query()
    assert y.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "operation", [lambda x: x[x > 1], torch.nonzero, lambda x: torch.equal(x, x.clone())]
)
def test_operation_that_depends_on_values_waits_for_them(sim, operation):
    operation(torch.arange(4, device="sim:0"))
    assert sim.current_stream("sim:0").query()


def test_unordered_read_after_a_write_names_both_operations(sim):
    x = torch.ones(3, device="sim:0").mul_(2)
    named = (
        r"aten\.add\.Tensor on stream \d+ of sim:0 \(.*test_detector\.py:\d+\) reads memory "
        r"that aten\.mul_\.Tensor on stream 0 of sim:0 \(.*test_detector\.py:\d+\) writes"
    )
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match=named):
        x + 1


def test_unordered_write_after_a_read_is_refused(sim):
    x = torch.ones(3, device="sim:0")
    sim.synchronize("sim:0")
    x + 1
    named = r"mul_.* writes .*add\.Tensor.* reads"
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match=named):
        x.mul_(2)


def test_an_event_orders_what_was_before_it_only(sim):
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


def test_a_race_in_a_backward_is_raised(sim):
    x = torch.ones(3, device="sim:0", requires_grad=True)
    y = (x * x).sum()
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match="nothing orders it"):
        y.backward()


def test_memory_without_values_is_poisoned(machine):
    x = torch.ones(3, device="sim:0")
    for made in (torch.empty(100, device="sim:0"), torch.empty_like(x), x.new_empty(5)):
        assert made.isnan().all()
    assert (torch.empty(3, dtype=torch.int64, device="sim:0").cpu() == -1).all()


@pytest.mark.parametrize("keep", ["record_stream", "wait_stream", "nothing"])
def test_memory_freed_while_another_stream_uses_it_is_refused(sim, keep):
    side, main = sim.Stream("sim:0"), sim.current_stream("sim:0")
    x = torch.ones(1000, device="sim:0")
    side.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(side):
        y = x + 1
        assert sim.current_stream("sim:0") == side
    assert sim.current_stream("sim:0") == main
    if keep == "record_stream":
        x.record_stream(side)
    elif keep == "wait_stream":
        main.wait_stream(side)
    del x
    if keep == "nothing":
        named = r"add\.Tensor on stream \d+ .* uses memory that was freed, .* taken by an alloc"
        with pytest.raises(RaceError, match=named):
            side.synchronize()
    with sim.stream(side):
        assert (y == 2).all()


def test_race_found_by_freeing_is_raised_on_leaving():
    entered = asynchronous(1)
    entered.__enter__()
    sim = torch.get_device_module("sim")
    x = torch.ones(3, device="sim:0")
    sim.synchronize()
    with sim.stream(sim.Stream("sim:0")):
        x + 1
    del x
    with pytest.raises(RaceError, match="freed"):
        entered.__exit__(None, None, None)


@pytest.mark.parametrize("pinned", [False, True])
def test_pinned_memory_changed_during_its_copy_names_both_calls(sim, pinned):
    host = torch.ones(100).pin_memory() if pinned else torch.ones(100)
    assert host.is_pinned() == pinned
    copied = torch.empty(100, device="sim:0").copy_(host, non_blocking=True) * 2
    if pinned:
        named = (
            r"aten\.mul_\.Tensor on the host \(.*test_detector\.py:\d+\) writes memory that copy_ "
            r"on stream 0 of sim:0 \(.*test_detector\.py:\d+\) reads"
        )
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
    with pytest.raises(RaceError, match=r"a copy that is wrong: aten\.mul_.* copy_ on stream 0"):
        copied + 1
    assert (copied.copy_(host) == 2).all()


def test_values_come_to_pinned_memory_when_the_host_waits(sim):
    x = torch.ones(100, device="sim:0")
    host = x.to("cpu", non_blocking=True)
    x.zero_()
    with pytest.raises(RaceError, match=r"on the host .* reads memory that copy_ on stream 0"):
        host + 1
    assert numpy.isnan(host.numpy()).all()  # behind torch's back
    sim.synchronize("sim:0")
    assert (host == 1).all()


def test_streams_that_threads_are_within_are_their_own(sim):
    side, default = sim.Stream("sim:1"), sim.current_stream("sim:1")
    with ThreadPoolExecutor(1) as pool, sim.stream(side):
        assert sim.current_device() == 1
        assert pool.submit(sim.current_device).result() == 0
        assert pool.submit(sim.current_stream, "sim:1").result() == default
        assert sim.current_stream("sim:1") == side
    assert sim.current_device() == 0


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
