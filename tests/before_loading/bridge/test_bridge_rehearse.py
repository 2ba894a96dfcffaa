"""`rehearse` and `estimate` of a Bridge: what a job does at full size, without weights and devices.

What is the same for HookedTransformer is tested in tests/before_loading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import tl_devicefix
from tl_devicefix.before_loading.rehearsal import rehearse

Job = Callable[[Any], Any]
LLAMA_70B = "meta-llama/Llama-2-70b-hf"
TOKENS = torch.arange(18).reshape(2, 9) % 30 + 5
FAMILIES = ["qwen2", "gpt2", "gemma-2", "pythia"]


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
            return weights, peaks, n_large(machine.transfers)

    return measure


def n_large(transfers: Any) -> int:
    """Without those of tokens: accelerate takes them by way of a device that it takes by chance."""
    return sum(each.bytes > 2 * TOKENS.nbytes for each in transfers)


def rehearsed_as(name: str, job: Job, n_devices: int, hf_models: Any, **options: Any) -> Any:
    return rehearse(hf_models(name).config, job, n_devices, cls=TransformerBridge, **options)


@pytest.mark.parametrize(
    ("name", "n_devices", "job"),
    [
        ("llama", 1, generate),
        *(("llama", 3, job) for job in JOBS),
        *((name, 3, job) for name in FAMILIES for job in (keep_all, fold)),
    ],
)
def test_it_takes_what_the_job_takes(
    name: str, n_devices: int, job: Job, measured: Any, hf_models: Any
) -> None:
    weights, peaks, transfers = measured(name, job, n_devices)

    rehearsed = rehearsed_as(name, job, n_devices, hf_models)

    assert rehearsed.runs, rehearsed
    assert list(rehearsed.weights) == pytest.approx(weights, rel=0.05)
    assert [peak.bytes for peak in rehearsed.peaks] == pytest.approx(peaks, rel=0.05)
    assert n_large(rehearsed.transfers) == transfers


def test_a_70b_model_runs_caches_and_generates() -> None:
    tokens = torch.zeros(1, 128, dtype=torch.long)

    def job(bridge: Any) -> Any:
        with torch.no_grad():
            logits, cache = bridge.run_with_cache(
                tokens, names_filter=lambda name: name.endswith("hook_resid_post")
            )
            shape = cache.stack_activation("resid_post").shape
        generated = bridge.generate(tokens, max_new_tokens=2, stop_at_eos=False, verbose=False)
        return logits.shape, shape, generated.shape

    rehearsed = rehearse(LLAMA_70B, job, 4, dtype=torch.bfloat16, cls=TransformerBridge)

    assert rehearsed.result == ((1, 128, 32000), (80, 1, 128, 8192), (1, 130)), rehearsed
    assert sum(rehearsed.weights) == pytest.approx(2 * 68.98e9, rel=0.01)
    assert rehearsed.timeline[0].component == "embed"


def test_compatibility_mode_takes_little_more_than_the_weights() -> None:
    options: Any = {"dtype": torch.bfloat16, "hf_config_overrides": {"num_hidden_layers": 4}}
    rehearsed = rehearse("EleutherAI/pythia-1.4b", fold, 2, cls=TransformerBridge, **options)

    assert rehearsed.runs, rehearsed
    largest = max(component.weights for component in rehearsed.placement.components)
    for peak, held in zip(rehearsed.peaks, rehearsed.weights):
        assert peak.bytes - held < 4 * largest  # in float32, twice


def test_each_component_is_in_the_timeline_once() -> None:
    rehearsed = rehearse("gpt2", forward, n_devices=2, cls=TransformerBridge)

    names = [moment.component for moment in rehearsed.timeline]
    blocks = [f"blocks.{index}" for index in range(12)]
    assert names == ["embed", "pos_embed", *blocks, "ln_final", "unembed"]
    assert rehearsed.peaks[1].module.startswith("blocks.")
    assert "_original_component" not in repr(rehearsed)


def test_an_operation_on_two_devices_is_reported_with_the_caller_s_own_line() -> None:
    def job(bridge: Any) -> Any:
        return bridge.blocks[0].attn.W_O[0] @ bridge.blocks[11].attn.W_Q[0]  # the line

    rehearsed = rehearse("gpt2", job, n_devices=4, cls=TransformerBridge)

    assert "sim:0 and sim:3" in str(rehearsed.error)
    assert "# the line" in str(rehearsed.stopped_at)


def test_a_device_without_room_is_reported_with_the_module() -> None:
    def job(bridge: Any) -> Any:
        return bridge(torch.zeros(64, 1024, dtype=torch.long))

    rehearsed = rehearse("gpt2", job, n_devices=2, memory="1GiB", cls=TransformerBridge)

    assert isinstance(rehearsed.error, torch.OutOfMemoryError)
    assert "within blocks." in str(rehearsed.stopped_at)


def test_offloaded_blocks_visit_their_device() -> None:
    limits = {0: "30GiB", "cpu": "200GiB"}

    rehearsed = rehearse(
        LLAMA_70B, forward, dtype=torch.bfloat16, max_memory=limits, cls=TransformerBridge
    )

    assert rehearsed.runs, rehearsed
    block = rehearsed.placement.components[2].weights
    resident, peak = rehearsed.weights[0], rehearsed.peaks[0].bytes
    assert resident + 2 * block < 30 * 2**30
    assert resident + 2 * block < peak < resident + 2.3 * block
    offloaded = sum(each.weights for each in rehearsed.placement.components if each.offloaded)
    copied = sum(each.bytes for each in rehearsed.transfers if each.source.type == "cpu")
    assert copied == offloaded + TOKENS.nbytes


def test_the_config_s_fields_may_be_others_as_for_booting() -> None:
    def look(bridge: Any) -> Any:
        return bridge.cfg.n_ctx, bridge.cfg.n_layers

    options: Any = {"n_ctx": 64, "hf_config_overrides": {"num_hidden_layers": 2}}
    rehearsed = rehearse("EleutherAI/pythia-70m", look, cls=TransformerBridge, **options)

    assert rehearsed.result == (64, 2)


def test_a_local_checkpoint_brings_its_tokenizer(checkpoints: Any) -> None:
    rehearsed = rehearse(
        str(checkpoints("llama")), lambda bridge: bridge("a b").shape[0], cls=TransformerBridge
    )
    assert rehearsed.result == 1, rehearsed


def test_what_is_no_class_or_option_of_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is no class of models here: give .*TransformerBridge"):
        rehearse("gpt2", forward, cls=dict)
    with pytest.raises(TypeError, match="no argument 'fold_ln' for a TransformerBridge"):
        rehearse("gpt2", forward, cls=TransformerBridge, fold_ln=True)
