"""What a job takes without a pattern: `attn_implementation="sdpa"` of `estimate` and `dry_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import D_VOCAB, make_hf_model, save_checkpoint
from transformers import LlamaConfig

from tl_devicefix import dry_run, estimate, simulate
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.planning.estimation import Job

N_TOKENS = 2048
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    """A checkpoint of a narrow Llama that reads long texts."""
    config = LlamaConfig(**SIZES, **HEADS, vocab_size=D_VOCAB, max_position_embeddings=N_TOKENS)
    directory: Path = tmp_path_factory.mktemp("llama")
    return str(save_checkpoint(make_hf_model(config), tokenizer, directory))


@pytest.fixture
def load():
    if has_hooked_transformer():
        from transformer_lens import HookedTransformer

        return HookedTransformer.from_pretrained
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers


def run(model: Any, job: Job) -> Any:
    tokens = torch.zeros(1, job.seq_len, dtype=torch.long, device=model.cfg.device)
    with torch.set_grad_enabled(job.gradients):
        kind = "loss" if job.gradients else "logits"
        output = model.run_with_cache(tokens, names_filter=job.keeps, return_type=kind)[0]
    if job.gradients:
        output.backward()
    return output


@pytest.mark.parametrize("gradients", [False, True])
def test_it_is_what_a_loaded_model_takes(gradients, llama, load):
    job = Job(seq_len=N_TOKENS, gradients=gradients)
    with simulate(2) as machine:
        model = load(llama, n_devices=2, attn_implementation="sdpa")
        run(model, Job(seq_len=8))  # TransformerLens 2 keeps a mask, which is looked at once
        for index in range(2):
            machine.reset_peak_memory_stats(index)
        _kept = run(model, job)
        peaks = [machine.max_memory_allocated(index) for index in range(2)]
        del model, _kept

    result = estimate(llama, 2, seq_len=N_TOKENS, gradients=gradients, attn_implementation="sdpa")
    installed = estimate(llama, 2, seq_len=N_TOKENS, gradients=gradients)

    assert [item.peak for item in result.devices] == pytest.approx(peaks, rel=0.001)
    pattern = HEADS["num_attention_heads"] * N_TOKENS**2 * 4
    for less, more in zip(result.devices, installed.devices):
        assert less.peak - less.weights < pattern < more.peak - more.weights


def test_a_dry_run_builds_a_pattern_where_somebody_listens(llama):
    tokens = torch.zeros(1, 512, dtype=torch.long)
    hook = ("blocks.1.attn.hook_pattern", lambda value, hook: None)
    pattern = HEADS["num_attention_heads"] * 512**2 * 4

    @torch.no_grad()
    def listen(model):
        return model.run_with_hooks(tokens.to(model.cfg.device), fwd_hooks=[hook])

    @torch.no_grad()
    def read(model):
        at_home = tokens.to(model.cfg.device)
        return model(at_home, attention_mask=torch.ones_like(at_home))

    peaks = []
    for job in (read, listen):
        dry = dry_run(llama, job, attn_implementation="sdpa")
        assert dry.runs, dry
        peaks.append(dry.devices[0].peak - dry.devices[0].weights)

    assert peaks[0] < pattern < peaks[1]
