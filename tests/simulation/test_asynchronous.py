"""`simulate(n, asynchronous=True)`: devices behind the host, in the order of streams and events."""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tl_devicefix.simulation import Machine, RaceError, geometry, simulate
from tl_devicefix.simulation.queues import Queues


@pytest.fixture(params=[0, 1])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with simulate(2, asynchronous=True, seed=request.param) as machine:
        yield machine


@pytest.fixture
def sim(machine: Machine) -> Any:
    """The module of the device, as torch gives it: `sim.Stream("sim:0")`."""
    return torch.get_device_module("sim")


@pytest.fixture
def held(machine: Machine) -> Iterator[Callable[[str], threading.Event]]:
    """`held("sim:0")`: its current stream does not go on until the event that it returns is set."""
    gates = []

    def hold(device: str) -> threading.Event:
        assert machine.asynchronous is not None
        gates.append(threading.Event())
        stream = machine.asynchronous.launcher.current(machine.index_of(device))
        machine.asynchronous.launcher.launch("a hold", gates[-1].wait, stream)
        return gates[-1]

    yield hold
    for gate in gates:
        gate.set()


# --------------------------------------------------------------------------------------------
# Behind the host


def test_the_host_goes_on_and_knows_shapes_before_the_device_has_run(
    machine: Machine, sim: Any, held: Any
) -> None:
    x = torch.ones(3, 4, device="sim:0")
    gate = held("sim:0")

    y = (x @ x.T).softmax(-1)[:, :2]

    assert y.shape == (3, 2)
    assert y.dtype == torch.float32
    assert not sim.current_stream("sim:0").query()
    gate.set()
    assert y.cpu().tolist() == [[1 / 3] * 2] * 3 or torch.allclose(y.cpu(), torch.tensor(1 / 3))
    assert sim.current_stream("sim:0").query()


def test_devices_do_not_wait_for_each_other(sim: Any, held: Any) -> None:
    held("sim:0")
    assert (torch.ones(3, device="sim:1") + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, torch.rand_like])
def test_what_reads_a_shape_only_waits_for_nothing_of_another_device(like: Any, held: Any) -> None:
    x = torch.ones(3, device="sim:0")
    held("sim:0")
    assert like(x, device="sim:1").cpu().shape == x.shape


def test_a_copy_between_devices_waits_for_its_source(sim: Any, held: Any) -> None:
    x = torch.ones(3, device="sim:0")
    gate = held("sim:0")
    y = (x * 2).to("sim:1") + 1
    assert not sim.current_stream("sim:1").query()
    gate.set()
    assert y.tolist() == [3, 3, 3]


def test_what_depends_on_values_waits_for_them(sim: Any, held: Any) -> None:
    x = torch.arange(4, device="sim:0")
    gate = held("sim:0")
    threading.Timer(0.05, gate.set).start()
    assert x[x > 1].tolist() == [2, 3]
    assert torch.nonzero(x).shape == (3, 1)
    assert torch.equal(x, x.clone())


def test_an_operation_that_the_simulation_makes_of_others_waits_for_them(held: Any) -> None:
    x = torch.tensor([0, 1, 1], device="sim:0")
    gate = held("sim:0")
    counts = torch.histc(x * 2, bins=3, min=0, max=2)  # of floats on the CPU
    gate.set()
    assert counts.tolist() == [1, 0, 2]


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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_results_are_exactly_those_of_the_cpu_and_of_devices_that_are_not_behind(
    seed: int,
) -> None:
    expected = train("cpu", "cpu")
    with simulate(2):
        others = train("sim:0", "sim:1")
    with simulate(2, asynchronous=True, seed=seed):
        behind = train("sim:0", "sim:1")
    for one, another, third in zip(behind, others, expected):
        assert torch.equal(one, another)
        assert torch.equal(one, third)


def test_a_deep_copy_may_be_changed_in_place(machine: Machine) -> None:
    layer = torch.nn.Linear(3, 3).to("sim:0")
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert not twin.weight.any()
    assert layer.weight.any()
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
    assert torch.equal(twin.weight, layer.weight)


# --------------------------------------------------------------------------------------------
# Streams and events


def test_a_stream_that_waits_for_another_is_ordered_after_it(sim: Any, held: Any) -> None:
    side = sim.Stream("sim:0")
    gate = held("sim:0")
    x = torch.ones(3, device="sim:0") * 2
    side.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(side):
        y = x + 1
        assert sim.current_stream("sim:0") == side
    assert sim.current_stream("sim:0") == sim.default_stream("sim:0")
    sim.current_stream("sim:0").wait_stream(side)
    gate.set()
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


def test_synchronizing_orders_all_that_comes_after(sim: Any) -> None:
    x = torch.ones(3, device="sim:0") * 2
    sim.synchronize("sim:0")
    with sim.stream(sim.Stream("sim:0")):
        assert (x + 1).tolist() == [3, 3, 3]


def test_reading_what_another_stream_writes_is_refused(sim: Any) -> None:
    side = sim.Stream("sim:0")
    x = torch.ones(3, device="sim:0")
    side.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(side):
        x.mul_(2)
    with pytest.raises(RaceError, match=r"copy_ on stream 0 .* reads memory that aten\.mul_"):
        x.cpu()
    sim.synchronize("sim:0")


def test_devices_that_are_not_asynchronous_have_no_streams(sim: Any) -> None:
    assert hasattr(sim, "Stream")
    with (
        pytest.raises(ValueError, match="asynchronous devices compute values"),
        simulate(2, asynchronous=True, values=False),
    ):
        pass


def test_without_asynchronous_devices_torch_has_no_streams_of_them() -> None:
    with simulate(2):
        assert not hasattr(torch.get_device_module("sim"), "Stream")
        assert not hasattr(torch.get_device_module("sim"), "current_stream")


# --------------------------------------------------------------------------------------------
# Memory


def test_freed_memory_is_handed_out_again_at_once(held: Any) -> None:
    x = torch.ones(3, device="sim:0")
    held("sim:0")
    y = x * 2
    address = y.data_ptr()
    del y
    assert (x * 3).data_ptr() == address


def test_memory_without_values_is_poisoned() -> None:
    with simulate(1, asynchronous=True):
        for _ in range(2):
            x = torch.empty(100, device="sim:0")
            assert x.isnan().all()
            assert (torch.empty(3, dtype=torch.int64, device="sim:0").cpu() == -1).all()
            x.fill_(1.0)
            del x


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
def test_memory_may_be_kept_for_another_stream(sim: Any, held: Any, keep: str) -> None:
    side = sim.Stream("sim:0")
    x = torch.ones(1000, device="sim:0")
    address = x.data_ptr()
    side.wait_stream(sim.current_stream("sim:0"))
    with sim.stream(side):
        gate = held("sim:0")
        y = x + 1
    if keep == "record_stream":
        x.record_stream(side)
    else:
        sim.current_stream("sim:0").wait_stream(side)
    del x
    other = torch.full((1000,), 7.0, device="sim:0")
    assert (other.data_ptr() == address) == (keep == "wait_stream")
    gate.set()
    side.synchronize()
    with sim.stream(side):
        assert (y == 2).all()
    again = torch.empty(1000, device="sim:0")
    assert (again.data_ptr() == address) == (keep == "record_stream")


def test_a_race_that_is_found_by_freeing_is_raised_at_the_latest_on_leaving() -> None:
    def leave() -> None:
        with simulate(1, asynchronous=True):
            module = torch.get_device_module("sim")
            x = torch.ones(3, device="sim:0")
            module.synchronize()
            with module.stream(module.Stream("sim:0")):
                x + 1
            del x

    with pytest.raises(RaceError, match="freed"):
        leave()


# --------------------------------------------------------------------------------------------
# The host's memory


def test_memory_that_is_not_pinned_may_be_changed_at_once(sim: Any, held: Any) -> None:
    host, there = torch.ones(100), torch.empty(100, device="sim:0")
    gate = held("sim:0")
    there.copy_(host, non_blocking=True)
    host.zero_()
    gate.set()
    assert not host.is_pinned()
    assert (there == 1).all()


def test_pinned_memory_is_read_when_the_queue_gets_there(sim: Any, held: Any) -> None:
    host, there = torch.ones(100).pin_memory(), torch.empty(100, device="sim:0")
    assert host.is_pinned()
    gate = held("sim:0")
    there.copy_(host, non_blocking=True)
    host.numpy()[:] = 5  # behind torch's back
    gate.set()
    assert (there == 5).all()


def test_pinned_memory_that_is_changed_too_early_names_both_operations(sim: Any) -> None:
    host = torch.ones(100).pin_memory()
    there = torch.empty(100, device="sim:0").copy_(host, non_blocking=True) * 2
    named = (
        r"aten\.mul_\.Tensor on the host \(.*test_asynchronous\.py:\d+\) writes memory that copy_ "
        r"on stream 0 of sim:0 \(.*test_asynchronous\.py:\d+\) reads"
    )
    with pytest.raises(RaceError, match=named):
        host.mul_(2)
    assert there.shape == (100,)
    sim.synchronize("sim:0")
    host.mul_(2)


def test_a_copy_whose_source_changed_meanwhile_may_be_dropped_but_not_read(sim: Any) -> None:
    host = torch.ones(100).pin_memory()
    there, dropped = (
        torch.empty(100, device="sim:0").copy_(host, non_blocking=True) for _ in range(2)
    )
    host.mul_(2)
    del dropped
    with pytest.raises(RaceError, match=r"reads what is wrong: aten\.mul_.* copy_ on stream 0"):
        there + 1
    assert (there.copy_(host) == 2).all()


def test_what_comes_to_pinned_memory_is_not_there_at_once(sim: Any) -> None:
    host = torch.ones(100, device="sim:0").to("cpu", non_blocking=True)
    with pytest.raises(RaceError, match=r"on the host .* reads memory that copy_ on stream 0"):
        host + 1
    sim.synchronize("sim:0")
    assert (host == 1).all()


# --------------------------------------------------------------------------------------------
# What fails


def test_an_error_on_a_device_s_thread_reaches_the_host(sim: Any) -> None:
    table, rows = torch.ones(3, 2, device="sim:1"), torch.tensor([5], device="sim:1")
    wrong = torch.nn.functional.embedding(rows, table)
    with pytest.raises(RuntimeError, match=r"aten\.embedding.* on stream 0 of sim:1 .* failed"):
        wrong.cpu()
    assert (table + 1).tolist() == [[2, 2]] * 3


def test_an_error_on_a_device_s_thread_is_raised_at_the_latest_on_leaving() -> None:
    def leave() -> None:
        with simulate(1, asynchronous=True):
            rows = torch.tensor([5], device="sim:0")
            torch.nn.functional.embedding(rows, torch.ones(3, 2, device="sim:0"))

    with pytest.raises(RuntimeError, match=r"aten\.embedding"):
        leave()


def test_errors_of_shapes_are_raised_at_once(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="size of tensor a"):
        torch.ones(2, device="sim:0") + torch.ones(3, device="sim:0")


def test_a_race_in_a_backward_is_raised(sim: Any) -> None:
    x = torch.ones(3, device="sim:0", requires_grad=True)
    y = (x * x).sum()
    with sim.stream(sim.Stream("sim:0")), pytest.raises(RaceError, match="nothing orders it"):
        y.backward()


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sim:")]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_runs_after_leaving_and_what_is_kept_has_its_values(error: Any) -> None:
    kept = []
    try:
        with simulate(2, asynchronous=True):
            assert running() == ["sim:0", "sim:1"]
            kept.append(torch.ones(3, device="sim:1") * 2)
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as caught:
        assert type(caught) is error  # noqa: PT017
    assert not running()
    assert kept[0].cpu().tolist() == [2, 2, 2]
    assert not torch.ones(3).is_pinned()


def test_an_interrupt_while_the_host_waits_ends_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    def interrupted(self: Queues, task: Any) -> None:
        raise KeyboardInterrupt

    def wait() -> None:
        with simulate(1, asynchronous=True) as machine:
            assert machine.asynchronous is not None
            machine.asynchronous.launcher.launch("a hold", gate.wait, (0, 0))
            x = torch.ones(3, device="sim:0")
            monkeypatch.setattr(Queues, "wait", interrupted)
            threading.Timer(0.05, gate.set).start()
            x.cpu()

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not running()


def test_tensors_that_are_freed_after_leaving_are_let_go_of() -> None:
    with simulate(1, asynchronous=True) as machine:
        kept = torch.ones(3, device="sim:0")
    assert machine.memory_allocated(0) == 12
    del kept
    gc.collect()
    assert machine.memory_allocated(0) == 0


def test_the_same_seed_delays_the_same_operations() -> None:
    def delays(seed: int) -> list[float]:
        queues = Queues(1, seed)
        try:
            return [queues.submit((0, 0), int, is_copy=True).late for _ in range(20)]
        finally:
            queues.finish()

    assert delays(1) == delays(1) != delays(2)
    assert re.search(r"0\.0", str(delays(1)))


def test_forward_mode_differentiation_starts_from_zeros(machine: Machine) -> None:
    def derivative(x: torch.Tensor) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([(2 * x @ x.T).sin().softmax(-1), torch.ones_like(x)], -1)

        return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]

    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(derivative(x.to("sim:1")).cpu(), derivative(x))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, device="sim:1").to_sparse(),
        lambda: torch.ones(3, 3, device="sim:1").to_sparse_csr(),
        lambda: torch.ones(3).to_sparse().to("sim:1"),
        lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), device="sim:1"),
    ],
)
def test_sparse_tensors_are_refused_at_once(machine: Machine, make: Callable[[], Any]) -> None:
    with pytest.raises(NotImplementedError, match="asynchronous simulated devices have no sparse"):
        make()


def test_what_operations_give_is_not_remembered_without_end(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "_MOST", 8)
    monkeypatch.setattr(geometry, "_outcomes", {})
    for size in range(20):
        assert (torch.ones(size, device="sim:0") + 1).shape == (size,)
        assert len(geometry._outcomes) <= 8
    assert geometry._outcomes
