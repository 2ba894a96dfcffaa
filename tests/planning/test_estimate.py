"""`plan` and `estimate` by a name: a HookedTransformer, or with TransformerLens 4 a Bridge."""

import pytest
import torch
from by_name import a_bridge_by_name, layers, peaks_of
from hf_models import D_VOCAB, N_CTX, make_hf_model, save_checkpoint
from model_classes import load_of
from transformers import LlamaConfig

from tl_devicefix import estimate, plan, simulate
from tl_devicefix.__main__ import main
from tl_devicefix.checkpoints.hub import known_config
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.planning.estimation import Job

BILLIONS = {
    "gpt2": 0.124, "EleutherAI/gpt-neo-2.7B": 2.651, "EleutherAI/gpt-j-6B": 6.051,
    "EleutherAI/pythia-12b": 11.85, "facebook/opt-66b": 65.72, "microsoft/phi-2": 2.780,
    "microsoft/Phi-3-mini-4k-instruct": 3.821, "mistralai/Mixtral-8x7B-v0.1": 46.70,
    "google/gemma-2-9b": 9.242, "Qwen/Qwen2.5-72B": 72.71,
}  # fmt: skip
"""The published numbers of parameters, a tied embedding counted once."""


@pytest.mark.parametrize("name", BILLIONS)
def test_a_plan_weighs_the_published_number_of_parameters(name):
    """K and V of grouped-query attention stay grouped.

    A HookedTransformer has an unembedding matrix even if it is tied, and every bias, if only zeros:
    for these at most 0.2% more.
    """
    config = known_config(name)
    with simulate(4, "1TiB") as machine:
        placement = plan(name, n_devices=4)
        assert machine.max_memory_allocated(0) == 0
        if name == "gpt2" and not has_hooked_transformer():
            assert placement == plan(config, n_devices=4)

    count = sum(component.weights for component in placement.components) / 4
    if config.tie_word_embeddings:
        count -= config.vocab_size * config.hidden_size
    assert count == pytest.approx(1e9 * BILLIONS[name], rel=0.01)
    assert len(placement.devices) == 4


# A Bridge is estimated with an unembedding of its own, but booted with a tied one.
TIED = "gpt2" if has_hooked_transformer() else "llama"


SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def run(model, job):
    tokens = torch.zeros(job.batch_size, job.seq_len, dtype=torch.long, device=model.cfg.device)
    options = {"names_filter": job.keeps, "return_type": "loss" if job.gradients else "logits"}
    with torch.set_grad_enabled(job.gradients):
        output, cache = model.run_with_cache(tokens, **options, return_cache_object=False)
    if job.gradients:
        output.backward()
    return output, cache


@pytest.mark.parametrize(
    ("name", "cache", "n_devices"),
    [("llama", "all", 1), ("pythia", "resid_post,z", 3), (TIED, "all", 3)],
)
def test_estimate_equals_the_memory_of_a_loaded_model(name, cache, n_devices, loaded):
    sizes = {"batch_size": 16, "seq_len": N_CTX // 2, "cache": cache}
    with simulate(n_devices) as machine:
        model, config = loaded(name, n_devices)
        weights = [machine.memory_allocated(index) for index in range(n_devices)]
        peaks = peaks_of(machine, lambda: run(model, Job(**sizes)))
    result = estimate(config, n_devices, **sizes)
    assert [item.weights for item in result.devices] == pytest.approx(weights, rel=0.05)
    assert [item.peak for item in result.devices] == pytest.approx(peaks, rel=0.001)


def test_the_row_of_loading_is_an_upper_bound(checkpoints):
    # A HookedTransformer's load needs slices in float32; a Bridge's merges experts.
    checkpoint = str(checkpoints("llama" if has_hooked_transformer() else "mixtral"))
    result = estimate(checkpoint, 2, seq_len=1).devices
    with simulate(2) as machine:
        load_of()(checkpoint, n_devices=2)
        peaks = [machine.max_memory_allocated(index) for index in range(2)]
    assert [item.module for item in result] == ["loading, at most"] * 2
    assert all(peak <= item.peak for peak, item in zip(peaks, result))


@a_bridge_by_name
def test_a_converted_bridge_is_loaded_into_cpu_memory():
    config = LlamaConfig(**SHAPE, vocab_size=D_VOCAB, dtype=torch.bfloat16)
    for dtype, module in (("bfloat16", "the weights, pinned"), ("float32", "loading, at most")):
        result = estimate(config, dtype=dtype, seq_len=8, device_map={"": 0, "blocks.1": "cpu"})
        assert result.devices[-1].module == module
    assert result.devices[-1].peak > sum(item.weights for item in result.placement.components)


@pytest.mark.fuses
def test_estimate_of_fused_blocks_has_no_attention_patterns(tokenizer, tmp_path):
    config = LlamaConfig(**SHAPE, vocab_size=D_VOCAB, max_position_embeddings=2048)
    long_llama = str(save_checkpoint(make_hf_model(config), tokenizer, tmp_path))
    sizes = {"seq_len": 2048, "gradients": True}
    with simulate(2) as machine:
        model = load_of()(long_llama, n_devices=2, fuse_blocks=True)
        peaks = peaks_of(machine, lambda: run(model, Job(**sizes)))

    result = estimate(long_llama, 2, **sizes, fuse_blocks=True)
    installed = estimate(long_llama, 2, **sizes)

    assert [item.peak for item in result.devices] == pytest.approx(peaks, rel=0.001)
    for less, more in zip(result.devices, installed.devices):
        assert less.peak - less.weights < 4 * 2048**2 * 4 < more.peak - more.weights


def kv_cache(name, few, many, **options):
    """What more tokens to generate take in four layers."""

    def peak(n_layers, new):
        options.update(batch_size=16, seq_len=8, max_new_tokens=new, **layers(n_layers))
        return estimate(name, **options).devices[0].peak

    return peak(6, many) - peak(6, few) - (peak(2, many) - peak(2, few))


def test_estimate_counts_a_kv_cache_of_all_tokens():
    expected = 16 * 2 * 400 * (2 * 64) * 4 * 4  # keys and values of grouped heads
    # A HookedTransformer has keys rotated, too, while a block runs.
    assert expected <= kv_cache("Qwen/Qwen2-0.5B", 500, 900) < 2.5 * expected


@a_bridge_by_name
def test_attention_in_a_window_caches_the_window():
    expected = 16 * 2 * 2000 * (4 * 256) * 2 * 2  # every other block sees all tokens
    assert kv_cache("google/gemma-2-2b", 5000, 7000, dtype="bfloat16") == expected


def test_estimate_counts_gradients_of_weights_and_activations():
    plain, with_gradients = (
        estimate("gpt2", seq_len=8, gradients=g, **layers(4, "n_layer")).devices[0]
        for g in (False, True)
    )
    assert plain.peak < 2 * plain.weights < with_gradients.peak


def test_the_command_takes_a_longer_context_and_fused_blocks(capsys, checkpoints):
    longer = ["estimate", str(checkpoints("llama")), "--seq-len", "1100"]
    assert main(longer) == 2
    assert main([*longer, "--n-ctx", "2048", "--fuse-blocks"]) == 0
    assert "1100 tokens, fused blocks" in capsys.readouterr().out
