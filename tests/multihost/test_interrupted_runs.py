"""Runs that an error, an interrupt or a lost host ends: it is told, and the next run is right."""

import gc
import threading

import pytest
import torch
from local_hosts import LocalHost, hosts

from tl_devicefix.multihost.hosts import HostLost

Z = "blocks.2.attn.hook_z"
PLACES = {"": "cpu", "blocks.2": "node-b/cpu", "blocks.3": "node-b/cpu"}


@pytest.fixture
def model(spread):
    return spread("llama")


@pytest.fixture
def assert_right(alone, tokens):
    """Check that a model gives what it should, and that no run is left on its host."""

    def check(model):
        gc.collect()
        with torch.no_grad():
            assert torch.equal(model(tokens), alone("llama")(tokens))
        for thread in _waiting():
            thread.join(60)
        assert not _waiting()

    return check


def _waiting():
    """Threads of runs that wait at a hook point."""
    return [thread for thread in threading.enumerate() if "_run_in_thread" in thread.name]


def ended_by_a_hook(error, model, tokens):
    def fail(x, hook):
        assert _waiting()
        raise error

    model.run_with_hooks(tokens, fwd_hooks=[(Z, fail)])


def ended_in_a_block(error, model, tokens):
    model.run_with_hooks(tokens, fwd_hooks=[(Z, lambda x, hook: x[:, :, :, :-1])])


def ended_in_backward(error, model, tokens):
    def fail(gradient, hook):
        raise error

    with model.hooks(bwd_hooks=[(Z, fail)]):
        model(tokens, return_type="loss").backward()


@pytest.mark.parametrize(
    ("run", "graph", "error"),
    [
        (ended_by_a_hook, True, ValueError("of the user's")),
        (ended_by_a_hook, False, KeyboardInterrupt()),
        (ended_in_a_block, True, RuntimeError()),  # of torch's, as the shape is another
        (ended_in_backward, True, ValueError("of the user's")),
    ],
)
def test_after_an_error_the_next_run_is_right(run, graph, error, model, tokens, assert_right):
    with pytest.raises(type(error)) as raised, torch.set_grad_enabled(graph):
        run(error, model, tokens)
    assert raised.value is error or run is ended_in_a_block
    del raised
    error.__traceback__ = None  # which has the run
    assert_right(model)


def kept(host):
    """How many models, runs and activations a host keeps, once it is told what it need not."""
    gc.collect()
    host.call("free_memory", 0)  # any call tells it
    return len(host.worker._kept)


def test_host_frees_tensors_and_models_that_nobody_holds(load, tokens):
    names = [Z, "blocks.3.hook_resid_pre"]
    with hosts(node_b=1) as (own_host,):
        model = load("llama", device_map=PLACES)
        before = kept(own_host)
        for _ in range(3):
            cache = model.run_with_cache(tokens, names_filter=names)[1]
            loss = model(tokens, return_type="loss")
            loss.backward()
            assert kept(own_host) >= before + len(names) + 1
            del cache, loss

        assert kept(own_host) == before
        del model
        gc.collect()
        assert kept(own_host) == 0


def loaded(load, *_):
    return load("llama", device_map=PLACES)


LOST_AT = {
    "begin": lambda load, model, tokens: model(tokens),
    "proceed": lambda load, model, tokens: model.run_with_hooks(
        tokens, fwd_hooks=[(Z, lambda x, hook: x * 2)]
    ),
    "backward": lambda load, model, tokens: model(tokens, return_type="loss").backward(),
    "fetch": lambda load, model, tokens: model.run_with_cache(tokens, names_filter=[Z])[1][Z] * 2,
    "fetch a weight": lambda load, model, tokens: model.W_Q.sum(),
    **dict.fromkeys(("free_memory", "differences", "load"), loaded),
}
"""What a host is asked for -> what asks it."""


@pytest.mark.once
@pytest.mark.parametrize("method", LOST_AT)
def test_call_to_a_lost_host_raises_host_lost(
    method, load, model, tokens, assert_right, monkeypatch
):
    lost, send = HostLost("node-b is lost"), LocalHost.send

    def send_or_lose(self, called, *arguments):
        if called == method.split()[0]:
            raise lost
        return send(self, called, *arguments)

    monkeypatch.setattr(LocalHost, "send", send_or_lose)
    with pytest.raises(HostLost) as raised:
        LOST_AT[method](load, model, tokens)

    assert raised.value is lost
    monkeypatch.undo()  # as if it had only been slow
    del raised
    lost.__traceback__ = None
    assert_right(loaded(load) if method == "load" else model)
