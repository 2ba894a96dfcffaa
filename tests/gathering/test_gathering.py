"""`gather_on`: what is spread is read together on a device that has room for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from kinds import home_of

import tl_devicefix
from tl_devicefix import gather_on

CPU = torch.device("cpu")


@pytest.mark.parametrize("spread", [1, 4])
def test_a_cache_and_the_unembedding_meet(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    expected = reference.run_with_cache(tokens)[1]["resid_post", 3] @ reference.W_U
    _, cache = model.run_with_cache(tokens)

    with gather_on("cpu"):
        assert_agrees(cache["resid_post", 3] @ model.W_U, expected, CPU)
        assert {value.device for value in cache.values()} == {CPU}
    assert_agrees(cache["resid_post", 3] @ model.W_U, expected, home_of(model))


@pytest.mark.parametrize("spread", ["scattered"])
def test_the_embeddings_and_the_unembedding_are_read_at_home_wherever_they_are(
    model: Any, reference: Any
) -> None:
    assert model.unembed.W_U.device != home_of(model)
    for name in ("W_E", "W_U", "b_U"):
        assert_agrees(getattr(model, name), getattr(reference, name), home_of(model))


def test_it_holds_for_its_own_thread_only(model: Any) -> None:
    with gather_on("cpu"), ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: model.W_Q.device).result() == home_of(model)


def test_functional_gradients_of_gathered_weights(model: Any, reference: Any) -> None:
    def gradient(model: Any) -> dict[str, torch.Tensor]:
        def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.nn.utils.stateless._reparametrize_module(model, weights):
                return model.W_Q.pow(2).sum()

        return torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()})

    assert_agrees(gradient(model), gradient(reference))


def test_another_device_than_home_or_the_cpu(model: Any) -> None:
    with gather_on("sim:2"):
        assert model.W_Q.device == torch.device("sim:2")
        with gather_on(1):
            assert model.OV.A.device == torch.device("sim:1")
        assert model.W_Q.device == torch.device("sim:2")
    with pytest.raises(ValueError, match="'sim:9' does not exist"), gather_on("sim:9"):
        pass


def test_what_cannot_fit_is_refused_before_anything_is_copied(
    model: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_capacities", [machine.memory_allocated(0) + 1000] * 4)
    machine.reset_transfers()

    with pytest.raises(
        torch.OutOfMemoryError, match=r"model\.W_in is .* KiB, but sim:0.* has 1\.0 KiB"
    ):
        _ = model.W_in

    assert machine.transfers == []
    with gather_on("cpu"):
        assert model.W_in.device == CPU


def test_what_cannot_fit_into_host_memory_is_refused_too(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory:
        available = 1000

    monkeypatch.setattr(tl_devicefix.gathering.gathering.psutil, "virtual_memory", NoMemory)
    with pytest.raises(torch.OutOfMemoryError, match=r"block by block"), gather_on("cpu"):
        _ = model.W_in


def test_stacked_weights_are_one_copy(model: Any, machine: Any) -> None:
    before = machine.memory_allocated(0)
    machine.reset_peak_memory_stats(0)
    weight = model.W_in
    assert machine.max_memory_allocated(0) - before == weight.nbytes
