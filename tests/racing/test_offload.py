"""Offloaded blocks on devices that run behind the host: nothing is changed or freed too early."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from comparison import assert_agrees, assert_same_weights
from kinds import home_of
from offloads import assert_at_rest
from packaging.version import Version

from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.offload import BlockCopy, Place

pytestmark = pytest.mark.hooked

DEVICE = "sim:0"


@pytest.fixture
def spread():
    return "all of one device"


def gradient(model, residual):
    residual.requires_grad_()
    model(residual, start_at_layer=1).square().sum().backward()
    return residual.grad


RUNS = {
    "forward": lambda model, residual: model(residual, start_at_layer=1),
    "block": lambda model, residual: model.blocks[-1](residual),
    "part": lambda model, residual: model.blocks[-1].mlp(residual),
    "backward": gradient,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_weights_may_be_changed_once_a_run_has_returned(run, load, reference, tokens):
    # Without gradients of weights, because the host would wait for them.
    model = load("llama", "all of one device").requires_grad_(False)
    residual = reference(tokens, stop_at_layer=1).detach()
    arrived = run(model, residual.to(DEVICE))
    for parameter in model.blocks.parameters():
        parameter.mul_(0)
    assert_agrees(arrived, run(reference, residual), home_of(model))


def test_unused_copies_arrive_before_their_memory_is_reused(load, reference, tokens):
    def result(model):
        def run_another(activation, hook):
            if torch.is_grad_enabled():  # not in the run that it starts itself
                with torch.no_grad():
                    return activation + model(tokens, stop_at_layer=1)

        @torch.no_grad()
        def halve_next(activation, hook):
            model.blocks[3].mlp.W_out.mul_(0.5)

        hooks = [("blocks.0.hook_resid_mid", run_another), ("blocks.2.hook_resid_pre", halve_next)]
        return model.run_with_hooks(tokens, fwd_hooks=hooks)

    model = load("llama", "all of one device")
    assert_agrees(result(model), result(reference))
    assert_same_weights(model, reference)
    assert_at_rest(model)


def test_each_copy_waits_for_kernels_queued_since_the_last(machine):
    module = torch.nn.Module()
    weights = [torch.full((64,), float(i)).pin_memory() for i in range(3)]

    def queueing():
        for weight in weights:
            temporary = torch.ones(64, device=DEVICE) * 2  # as another thread may do meanwhile
            del temporary
            yield Place(module, "weight", weight)

    copies = BlockCopy(queueing(), torch.device(DEVICE))
    copies.swap_in()
    assert_agrees([copy.weight + 1 for copy in copies.weights], [weight + 1 for weight in weights])


def test_weights_are_copied_on_a_stream_of_their_own(model, machine, sim, tokens):
    at_home = tokens.to(DEVICE)
    machine.executor.copies.clear()
    with torch.no_grad():
        model(at_home)
    streams = machine.executor.copies
    assert len(streams) == len(list(model.blocks.parameters()))
    assert len(set(streams)) == 1
    assert sim.current_stream(DEVICE) not in streams


def test_threads_may_run_one_model_on_streams_of_their_own(model, reference, tokens, sim):
    sim.synchronize(DEVICE)
    within = threading.Barrier(4, timeout=60)

    def meet(activation, hook):
        within.wait()  # so that all of them run block 0 with the same weights

    def run(index):
        with torch.no_grad(), sim.stream(sim.Stream(DEVICE)):
            return model(tokens.roll(index, 1).to(DEVICE)).cpu()

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_mid", meet)]), ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))

    assert_agrees(results, [reference(tokens.roll(index, 1)) for index in range(4)])
    assert_at_rest(model)


def test_fused_block_on_a_stream_of_its_own_shares_no_mask(load, reference, tokens, sim):
    model = load("llama", "all of one device", fuse_blocks=installed() >= Version("3.8"))
    mask = torch.ones_like(tokens)
    mask[0, 4] = 0  # without padding, there is no mask to share
    at_home = mask.to(DEVICE)

    def run_the_next(activation, hook):
        side = sim.Stream(DEVICE)
        side.wait_stream(sim.current_stream(DEVICE))
        activation.record_stream(side)
        with sim.stream(side):
            model.blocks[1](activation, attention_mask=at_home)

    with torch.no_grad(), model.hooks([("blocks.0.hook_resid_pre", run_the_next)]):
        logits = model(tokens.to(DEVICE), attention_mask=at_home)
    sim.synchronize(DEVICE)  # before what both streams read is freed

    assert_agrees(logits, reference(tokens, attention_mask=mask))
