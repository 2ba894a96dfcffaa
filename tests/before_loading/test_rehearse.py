"""`rehearse`: what a job does at full size, without weights and devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ALL_ARCHITECTURES, load_hooked
from packaging.version import Version

import tl_devicefix
from tl_devicefix import Rehearsal, rehearse
from tl_devicefix.patching.versions import installed

Job = Callable[[Any], Any]
LLAMA_70B = "meta-llama/Llama-2-70b-hf"
TOKENS = torch.arange(18).reshape(2, 9) % 30 + 5


def forward(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS)


def keep_all(model: Any) -> Any:
    with torch.no_grad():
        return model.run_with_cache(TOKENS)


def generate(model: Any) -> None:
    model.generate(TOKENS.to(model.cfg.device), max_new_tokens=3, stop_at_eos=False, verbose=False)


def backward(model: Any) -> None:
    model(TOKENS, return_type="loss").backward()


def steer(model: Any) -> Any:
    vector = torch.ones(model.cfg.d_model, device=model.cfg.device)
    hook = ("blocks.4.hook_resid_post", lambda activation, hook: activation + vector)
    with torch.no_grad():
        return model.run_with_hooks(TOKENS, fwd_hooks=[hook])


def analyse(model: Any) -> Any:
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        return cache.accumulated_resid(apply_ln=True), cache.stack_head_results(), model.W_Q


JOBS = (forward, keep_all, generate, backward, steer, analyse)


@pytest.fixture
def measured(hf_models: Any, references: Any, tokenizer: Any) -> Callable[..., Any]:
    """`measured("llama", job, 3)`: what a loaded model takes on simulated devices, with values."""

    def measure(name: str, job: Job, n_devices: int) -> tuple[Any, list[int], list[int], int]:
        references(name)  # skips where TransformerLens itself cannot read it
        with tl_devicefix.simulate(n_devices) as machine:
            model = load_hooked(
                ALL_ARCHITECTURES[name], hf_models(name), tokenizer, n_devices=n_devices
            )
            weights = [machine.memory_allocated(i) for i in range(n_devices)]
            for index in range(n_devices):
                machine.reset_peak_memory_stats(index)
            machine.reset_transfers()
            _kept = job(model)
            peaks = [machine.max_memory_allocated(i) for i in range(n_devices)]
            return copy.deepcopy(model.cfg), weights, peaks, len(machine.transfers)

    return measure


@pytest.mark.cover(("job", "n_devices"))
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("name", "n_devices"), [("llama", 1), ("llama", 3), ("gpt2", 3), ("pythia", 3), ("gemma-2", 3)]
)
def test_it_takes_what_the_job_takes(
    name: str, job: Job, n_devices: int, measured: Any, tokenizer: Any
) -> None:
    cfg, weights, peaks, transfers = measured(name, job, n_devices)

    rehearsed = rehearse(cfg, job, n_devices, tokenizer=tokenizer)

    assert rehearsed.runs, rehearsed
    assert list(rehearsed.weights) == pytest.approx(weights, rel=0.05)
    assert [peak.bytes for peak in rehearsed.peaks] == pytest.approx(peaks, rel=0.05)
    assert len(rehearsed.transfers) == transfers


@pytest.mark.parametrize("name", ALL_ARCHITECTURES)
def test_parameters_are_laid_out_as_loading_lays_them_out(
    name: str, hf_models: Any, references: Any, tokenizer: Any
) -> None:
    """For what a forward allocates depends on it."""
    references(name)  # skips where TransformerLens itself cannot read it
    loaded = load_hooked(ALL_ARCHITECTURES[name], hf_models(name), tokenizer, device="cpu")
    strides: dict[str, Any] = {}

    def look(model: Any) -> None:
        strides.update({name: order(p) for name, p in model.named_parameters()})

    rehearse(loaded.cfg, look)

    assert strides == {name: order(p) for name, p in loaded.named_parameters()}


def order(tensor: torch.Tensor) -> list[int]:
    """The dimensions longer than 1, slowest first."""
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return sorted(dims, key=tensor.stride, reverse=True)


def test_a_70b_model_runs_caches_and_generates(tokenizer: Any) -> None:
    tokens = torch.zeros(1, 128, dtype=torch.long)

    def job(model: Any) -> Any:
        with torch.no_grad():
            logits, cache = model.run_with_cache(tokens, names_filter=lambda n: "resid_post" in n)
            assert len(cache) == model.cfg.n_layers == 80
            shape = cache.stack_activation("resid_post").shape
        if installed() == Version("3.0.0"):
            return logits.shape, shape, "TransformerLens 3.0.0 cannot generate in bfloat16"
        generated = model.generate(
            tokens.to(model.cfg.device), max_new_tokens=2, stop_at_eos=False, verbose=False
        )
        return logits.shape, shape, generated.shape

    # TransformerLens 2 generates with a tokenizer only.
    rehearsed = rehearse(LLAMA_70B, job, 4, dtype=torch.bfloat16, tokenizer=tokenizer)

    assert rehearsed.result[:2] == ((1, 128, 32000), (80, 1, 128, 8192))
    assert rehearsed.result[2] == (1, 130) or installed() == Version("3.0.0")
    assert sum(rehearsed.weights) == pytest.approx(2 * 68.98e9, rel=0.01)
    assert rehearsed.runs
    assert "it runs" in repr(rehearsed)
    assert rehearsed.timeline[0].component == "embed"


def test_an_operation_on_two_devices_is_reported_with_the_caller_s_own_line() -> None:
    def job(model: Any) -> Any:
        return model.blocks[0].attn.W_O[0] @ model.blocks[11].attn.W_Q[0]  # the line

    rehearsed = rehearse("gpt2", job, n_devices=4)

    assert not rehearsed.runs
    assert "sim:0 and sim:3" in str(rehearsed.error)
    assert "test_rehearse.py" in str(rehearsed.stopped_at)
    assert "# the line" in str(rehearsed.stopped_at)
    assert "it stops at" in repr(rehearsed)


def test_one_within_a_module_is_reported_with_the_module() -> None:
    elsewhere = []

    def job(model: Any) -> Any:
        elsewhere.append(torch.ones(model.cfg.d_model, device="cpu"))
        return model.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.9.hook_resid_post", lambda a, hook: a + elsewhere[0])]
        )

    rehearsed = rehearse("gpt2", job, n_devices=4)

    assert "hook on blocks.9.hook_resid_post mixes devices" in str(rehearsed.error)
    assert "within blocks.9" in str(rehearsed.stopped_at)
    assert "elsewhere[0]" in str(rehearsed.stopped_at)


def test_a_device_without_room_is_reported() -> None:
    def job(model: Any) -> Any:
        return model(torch.zeros(64, 1024, dtype=torch.long))

    rehearsed = rehearse("gpt2", job, n_devices=2, memory="1GiB")

    assert isinstance(rehearsed.error, torch.OutOfMemoryError)
    assert "within blocks." in str(rehearsed.stopped_at)


def test_what_does_not_fit_at_all_is_refused_as_by_a_plan() -> None:
    with pytest.raises(ValueError, match=r"the weights do not fit: sim:0 would hold .* GiB"):
        rehearse(LLAMA_70B, forward, n_devices=4, memory="16GiB")


def test_the_peak_is_where_it_was_and_the_timeline_says_when() -> None:
    def job(model: Any) -> Any:
        with torch.no_grad():
            return model(torch.zeros(8, 256, dtype=torch.long))

    rehearsed = rehearse("gpt2", job, n_devices=2)

    assert rehearsed.peaks[0].module == "unembed"
    assert rehearsed.peaks[1].module.startswith("blocks.")
    names = [moment.component for moment in rehearsed.timeline]
    assert names == [
        "embed",
        "pos_embed",
        *(f"blocks.{i}" for i in range(12)),
        "ln_final",
        "unembed",
    ]
    assert all(len(moment.allocated) == 2 for moment in rehearsed.timeline)


def test_nothing_is_left_of_it() -> None:
    cfg = rehearse("gpt2", lambda model: model.cfg).result
    before = copy.deepcopy(cfg.to_dict())

    rehearse(cfg, lambda model: model.blocks, n_devices=2)

    assert cfg.to_dict() == before
    with tl_devicefix.simulate(1) as machine:
        assert torch.ones(2, device="sim:0").tolist() == [1, 1]
        assert machine.behind.type == "cpu"


def test_a_subclass_and_a_device_map() -> None:
    from transformer_lens import HookedTransformer

    class Mine(HookedTransformer):
        """A user's own."""

    device_map = {"": 0, "blocks.3": 1}
    rehearsed: Rehearsal = rehearse("gpt2", type, n_devices=2, device_map=device_map, cls=Mine)

    assert rehearsed.result is Mine
    assert str(rehearsed.placement.device_of("blocks.3")) == "sim:1"


def test_offloaded_blocks_visit_their_device() -> None:
    limits = {0: "30GiB", "cpu": "200GiB"}

    rehearsed = rehearse(LLAMA_70B, forward, dtype=torch.bfloat16, max_memory=limits)

    resident, peak = rehearsed.weights[0], rehearsed.peaks[0].bytes
    block = rehearsed.placement.components[1].weights
    assert rehearsed.runs
    assert resident + 2 * block < 30 * 2**30
    assert resident + 2 * block < peak < resident + 2.2 * block
    offloaded = [each for each in rehearsed.placement.components if each.offloaded]
    copied = sum(t.bytes for t in rehearsed.transfers if t.source.type == "cpu")
    assert copied == sum(each.weights for each in offloaded) + TOKENS.nbytes


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="run='forward' is no function"):
        rehearse("gpt2", "forward")  # type: ignore[arg-type]


def test_the_caller_s_grad_mode_stays() -> None:
    def job(model: Any) -> None:
        torch.set_grad_enabled(False)

    rehearse("gpt2", job)

    assert torch.is_grad_enabled()
