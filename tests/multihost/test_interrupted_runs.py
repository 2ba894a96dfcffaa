"""Runs that an error, an interrupt or a lost host ends: it is told, and the next run is right."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from local_hosts import LocalConnection, hosts

from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.placement.hosts import HostLost, joined

Z = "blocks.2.attn.hook_z"
PLACES = {"": "cpu", "blocks.2": "node-b/cpu", "blocks.3": "node-b/cpu"}


@pytest.fixture
def own_host() -> Iterator[LocalConnection]:
    """node-b, for one test."""
    with hosts("node-b") as (connection,):
        yield connection


@pytest.fixture
def model(spread: Any) -> Any:
    return spread("llama")


@pytest.fixture
def assert_right(alone: Any, tokens: torch.Tensor) -> Callable[[Any], None]:
    """Check that a model gives what it should, and that no run is left on its host."""

    def check(model: Any) -> None:
        gc.collect()
        with torch.no_grad():
            assert torch.equal(model(tokens), alone("llama")(tokens))
        until = time.monotonic() + 60
        while _waiting() and time.monotonic() < until:
            time.sleep(0.01)
        assert not _waiting()

    return check


def _waiting() -> list[threading.Thread]:
    """Threads of runs that wait at a hook point."""
    return [thread for thread in threading.enumerate() if "_run_in_thread" in thread.name]


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(x: torch.Tensor, hook: Any) -> None:
        assert _waiting()
        raise error

    return hook


@pytest.mark.parametrize(
    ("error", "graph"), [(ValueError("of the user's"), True), (KeyboardInterrupt(), False)]
)
def test_a_hook_that_raises(
    error: BaseException, graph: bool, model: Any, tokens: torch.Tensor, assert_right: Any
) -> None:
    with pytest.raises(type(error)) as raised, torch.set_grad_enabled(graph):
        model.run_with_hooks(tokens, fwd_hooks=[(Z, raising(error))])

    assert raised.value is error
    del raised
    error.__traceback__ = None  # which has the run
    assert_right(model)


def test_an_error_in_a_block(model: Any, tokens: torch.Tensor, assert_right: Any) -> None:
    with pytest.raises(RuntimeError, match=r"size|shape"):
        model.run_with_hooks(tokens, fwd_hooks=[(Z, lambda x, hook: x[:, :, :, :-1])])

    assert_right(model)


def test_an_error_in_backward(model: Any, tokens: torch.Tensor, assert_right: Any) -> None:
    def fail(gradient: torch.Tensor, hook: Any) -> None:
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"), model.hooks(bwd_hooks=[(Z, fail)]):
        model(tokens, return_type="loss").backward()

    assert_right(model)


# --------------------------------------------------------------------------------------------
# What a host keeps


def kept(host: LocalConnection) -> int:
    """How many models, runs and activations a host keeps, once it is told what it need not."""
    gc.collect()
    (own,) = joined()
    host.call("forget", list(own.forgotten))
    own.forgotten.clear()
    return len(host.worker._kept)


def test_a_host_keeps_what_somebody_may_use_and_no_model_that_is_gone(
    load: Any, own_host: LocalConnection, tokens: torch.Tensor
) -> None:
    model = load("llama", device_map=PLACES)
    names = [Z, "blocks.3.hook_resid_pre"]
    before = kept(own_host)
    for _ in range(3):
        cache = model.run_with_cache(tokens, names_filter=names)[1]
        loss = model(tokens, return_type="loss")
        loss.backward()
        assert kept(own_host) >= before + len(names) + 1
        del cache, loss

    of_last_run = 0 if has_hooked_transformer() else 2  # a Bridge keeps its last KV cache
    assert kept(own_host) <= before + of_last_run
    del model
    assert kept(own_host) == 0


# --------------------------------------------------------------------------------------------
# A lost host


LOST_AT: dict[str, Callable[..., Any]] = {
    "begin": lambda model, tokens: model(tokens),
    "proceed": lambda model, tokens: model.run_with_hooks(
        tokens, fwd_hooks=[(Z, lambda x, hook: x * 2)]
    ),
    "backward": lambda model, tokens: model(tokens, return_type="loss").backward(),
    "kept": lambda model, tokens: model.run_with_cache(tokens, names_filter=[Z])[1][Z] * 2,
    "weight": lambda model, tokens: model.W_Q.sum(),
}
"""What a host is asked for -> what asks it."""


@pytest.mark.parametrize("method", LOST_AT)
def test_a_lost_host_is_told_as_such(
    method: str,
    model: Any,
    tokens: torch.Tensor,
    assert_right: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = _losing(method, monkeypatch)

    with pytest.raises(HostLost) as raised:
        LOST_AT[method](model, tokens)

    assert raised.value is lost
    monkeypatch.undo()  # as if it had only been slow
    del raised
    lost.__traceback__ = None
    assert_right(model)


@pytest.mark.parametrize("method", ["free_memory", "differences", "load"])
def test_a_host_that_is_lost_while_a_model_is_loaded(
    method: str,
    load: Any,
    own_host: LocalConnection,
    assert_right: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = _losing(method, monkeypatch)

    with pytest.raises(HostLost) as raised:
        load("llama", device_map=PLACES)

    assert raised.value is lost
    monkeypatch.undo()
    assert_right(load("llama", device_map=PLACES))


def _losing(method: str, monkeypatch: pytest.MonkeyPatch) -> HostLost:
    """Have a host be lost when it is asked for something."""
    lost, call = HostLost("node-b is lost", "node-b"), LocalConnection.call

    def call_or_lose(self: LocalConnection, called: str, *arguments: Any) -> Any:
        if called == method:
            raise lost
        return call(self, called, *arguments)

    monkeypatch.setattr(LocalConnection, "call", call_or_lose)
    return lost
