"""`rehearse` and `estimate` of a Bridge: what a job does at full size, without weights and devices.

What is the same for HookedTransformer is tested in tests/rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import tl_devicefix
from tl_devicefix.rehearsal import rehearse

Job = Callable[[Any], Any]
LLAMA_70B = "meta-llama/Llama-2-70b-hf"
TOKENS = torch.arange(18).reshape(2, 9) % 30 + 5
FAMILIES = ["llama", "qwen2", "gpt2", "gemma-2", "pythia"]


def forward(bridge: Any) -> Any:
    with torch.no_grad():
        return bridge(TOKENS.to(bridge.cfg.device))


def keep_all(bridge: Any) -> Any:
    with torch.no_grad():
        return bridge.run_with_cache(TOKENS.to(bridge.cfg.device))


def generate(bridge: Any) -> None:
    prompt = TOKENS.to(bridge.cfg.device)
    bridge.generate(prompt, max_new_tokens=3, stop_at_eos=False, verbose=False)


def backward(bridge: Any) -> None:
    bridge(TOKENS.to(bridge.cfg.device), return_type="loss").backward()


def steer(bridge: Any) -> Any:
    vector = torch.ones(bridge.cfg.d_model, device=bridge.cfg.device)
    hook = ("blocks.4.hook_resid_post", lambda activation, hook: activation + vector)
    with torch.no_grad():
        return bridge.run_with_hooks(TOKENS.to(bridge.cfg.device), fwd_hooks=[hook])


def fold(bridge: Any) -> Any:
    bridge.enable_compatibility_mode()
    return forward(bridge)


JOBS = (forward, keep_all, generate, backward, steer, fold)


@pytest.fixture
def measured(boot: Any) -> Callable[..., Any]:
    """`measured("llama", job, 3)`: what a booted Bridge takes on simulated devices, with values."""

    def measure(name: str, job: Job, n_devices: int) -> tuple[list[int], list[int], int]:
        with tl_devicefix.simulate(n_devices) as machine:
            bridge = boot(name, n_devices=n_devices)
            weights = [machine.memory_allocated(i) for i in range(n_devices)]
            for index in range(n_devices):
                machine.reset_peak_memory_stats(index)
            machine.reset_transfers()
            _kept = job(bridge)
            peaks = [machine.max_memory_allocated(i) for i in range(n_devices)]
            return weights, peaks, len(machine.transfers)

    return measure


def rehearsed_as(name: str, job: Job, n_devices: int, hf_models: Any, **options: Any) -> Any:
    return rehearse(hf_models(name).config, job, n_devices, cls=TransformerBridge, **options)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("name", "n_devices"), [("llama", 1), *((name, 3) for name in FAMILIES)])
def test_it_takes_what_the_job_takes(
    name: str, n_devices: int, job: Job, measured: Any, hf_models: Any
) -> None:
    weights, peaks, transfers = measured(name, job, n_devices)

    rehearsed = rehearsed_as(name, job, n_devices, hf_models)

    assert rehearsed.runs, rehearsed
    assert list(rehearsed.weights) == pytest.approx(weights, rel=0.05)
    assert [peak.bytes for peak in rehearsed.peaks] == pytest.approx(peaks, rel=0.05)
    assert len(rehearsed.transfers) == transfers
