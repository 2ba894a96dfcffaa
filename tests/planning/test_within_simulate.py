"""`estimate` and `dry_run` inside `with simulate(...)`: it is as it was afterwards."""

import pytest
import torch
import torch.fx.experimental._config as meta_config
from by_name import CONFIG

from tl_devicefix import dry_run, estimate, simulate


def forward(model):
    return model(torch.zeros(1, 4, dtype=torch.long))


def interrupted():
    def interrupt(model):
        forward(model)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dry_run(CONFIG, interrupt, 3)


PLANNING = {
    "an estimate": lambda: estimate(CONFIG, 2, seq_len=4),
    "a job that is interrupted": interrupted,
    "a dry run in one": lambda: dry_run(CONFIG, lambda _: dry_run(CONFIG, forward, 2)),
}


@pytest.fixture
def outer():
    with simulate(4, "8GiB") as machine:
        yield machine


def counts(machine):
    kinds = (machine.memory_allocated, machine.max_memory_allocated, machine.mem_get_info)
    return (
        [kind(i) for kind in kinds for i in range(len(machine.devices))],
        list(machine.transfers),
        torch.get_device_module("sim").device_count(),
        torch.get_device_module("sim").current_device(),
        meta_config.meta_nonzero_assume_all_nonzero,
        torch.Tensor.register_hook,
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("run", PLANNING.values(), ids=PLANNING)
def test_planning_leaves_the_outer_simulated_machine_unchanged(run, outer):
    kept = torch.arange(6.0, device="sim:3", requires_grad=True)
    moved = kept.detach().to("sim:1")
    torch.get_device_module("sim").set_device(2)
    before = counts(outer)

    run()

    assert counts(outer) == before
    assert str((kept * 2).device) == "sim:3"
    assert torch.ones(2, device="sim").device.index == 2
    (kept * moved.to("sim:3")).sum().backward()
    assert kept.grad is not None
    assert kept.grad.tolist() == moved.tolist() == [0, 1, 2, 3, 4, 5]
    assert outer.is_open


def test_planning_gives_the_same_inside_and_outside_simulate():
    with simulate(4):
        inside = estimate(CONFIG, 2, seq_len=4), dry_run(CONFIG, forward, 3)
    outside = estimate(CONFIG, 2, seq_len=4), dry_run(CONFIG, forward, 3)
    assert inside[0] == outside[0]
    assert repr(inside[1]) == repr(outside[1])


def test_dry_run_refuses_tensors_of_the_outer_machine(outer):
    vector = torch.ones(1, device="sim:0")
    dry = dry_run(CONFIG, lambda model: forward(model) + vector, 2)
    assert "belong to different simulated machines" in str(dry.error)
    dry = dry_run(CONFIG, lambda _: simulate(2).__enter__())
    assert "entered already, with 1 device" in str(dry.error)
