"""A block gives the installed activations and gradients, bit for bit, whoever listens to it.

Several hooks at once, hooks that change other things, and changes by hand are in tests/fuzz.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any
from unittest import mock

import block_variants
import pytest
import torch
from block_variants import LLAMA, ROTARY, config_of
from kinds import new_kv_cache
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix.hooked_transformer import known_blocks
from tl_devicefix.hooked_transformer.known_blocks import IS_2

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

IMPLIED = () if IS_2 else ("mixtral", "olmo-2")  # by others that have more
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: its for name, its in block_variants.VARIANTS.items() if name not in IMPLIED},
    "no norm": {"normalization_type": None, "act_fn": "relu"},
    "ungrouped": {**LLAMA, "ungroup_grouped_query_attention": True},
    "qk-norm of every head": {**LLAMA, "n_key_value_heads": None, "use_qk_norm": True},
    "adjacent pairs": {"rotary_adjacent_pairs": True, **ROTARY},
    "parallel with mlp_in": {"parallel_attn_mlp": True, "use_hook_mlp_in": True},
    "mlp_in": {"use_hook_mlp_in": True, "scale_attn_by_inverse_layer_idx": True},
    "attn_result": {**LLAMA, "use_attn_result": True},
    "split inputs": {"use_split_qkv_input": True},
    "attn_in": {**ROTARY, "use_attn_in": True},
}
if not IS_2:
    VARIANTS |= {
        "olmo-2, mlp_in": {**block_variants.VARIANTS["olmo-2"], "use_hook_mlp_in": True},
        "clipped": {**LLAMA, "clip_qkv": 0.5},
        "two rotary bases": {
            **block_variants.VARIANTS["gemma-2"],
            "rotary_base_local": 100,
            "attn_types": ["global", "local"],
        },
        "log-n": {**ROTARY, "use_logn_attn": True, "train_seq_length": 3},
    }
BLOCKS_AS_INSTALLED = {"split inputs", "attn_in"}
ATTENTION_AS_INSTALLED = {"attn_result", "log-n"} | BLOCKS_AS_INSTALLED


def make(name, dtype=torch.float32):
    """A model of a variant; how its weights lie in memory differs from block to block."""
    model = HookedTransformer(config_of({**VARIANTS[name], "dtype": dtype}))
    model.to(dtype)  # a mixture of experts has a router in float32
    generator = torch.Generator().manual_seed(0)
    for path, parameter in model.named_parameters():
        lies = torch.randn(parameter.shape, generator=generator) * 0.5
        parameter.data.copy_(lies)
        if parameter.dim() > 1 and path.startswith("blocks.1."):  # as a checkpoint has it
            parameter.data = parameter.data.mT.contiguous().mT
    return model


shared = cache(make)
"""A model that several tests use: they leave it as it was."""


def tokens(n):
    return torch.randint(0, 40, (2, n), generator=torch.Generator().manual_seed(n))


def padded(n, left=0, right=0):
    """A mask of two rows, of which the second is not padded."""
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, :left] = 0
    mask[0, n - right :] = 0
    return mask


def gradients(model):
    """What a backward pass has left, and leaves no more."""
    result = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def assert_as_installed(run):
    """A run gives what it gives unpatched, bit for bit, or fails with the same error."""
    assert_all_as_installed({"": run})


def assert_all_as_installed(runs):
    """Several runs do; they share one switch to the installed forwards, which takes its time."""
    with tl_devicefix.disabled():
        expected = {key: _outcome(run) for key, run in runs.items()}
    actual = {key: _outcome(run) for key, run in runs.items()}
    for key, expecteds in expected.items():
        assert list(actual[key]) == list(expecteds), key
        for name, value in expecteds.items():
            exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
            if isinstance(value, torch.Tensor):  # which takes long to print: only where it differs
                says = lambda why, of=f"{key} {name}": f"{of}: {why}"  # noqa: E731
                torch.testing.assert_close(actual[key][name], value, **exactly, msg=says)
            else:
                assert actual[key][name] == value, f"{key} {name}"
    return actual


def _outcome(run):
    try:
        return run()
    except (RuntimeError, ValueError) as error:  # as where a hook edits what the backward needs
        return {"error": f"{type(error).__name__}: {error}"}


def run(model, hooks=(), *, n=5, grad=True, log=None, **options):
    """Logits, and with `grad` gradients, of a run with hooks, which fill `log`."""
    seen = {} if log is None else log
    seen.clear()
    with torch.set_grad_enabled(grad), model.hooks(list(hooks)):
        logits = model(tokens(n), **options)
        if grad:
            logits.float().pow(2).sum().backward()
    return {"logits": logits.detach(), **seen, **(gradients(model) if grad else {})}


NOT_ALWAYS_CALLED = (
    *("_in", "_input", "hook_result", "blocks.1.hook_mlp_out"),
    "hook_expert_indices",  # what replaces them is no index
)
"""Points that some variants have and do not call, or that refuse what replaces them."""


def in_each_dtype(variant):
    return [shared(variant), *(shared(variant, dtype) for dtype in DTYPES[1:])]


def with_one_hook(variant):
    """Each hook point of a block alone, every other one with gradients."""
    model, log = shared(variant), {}

    def replace(value, hook):
        log[f"{len(log)} {hook.name}"] = value.detach().clone()
        return value * 1.25 + 0.125

    names = [name for name in model.hook_dict if name.startswith("blocks.1.")]
    return {
        name: partial(run, model, [(name, replace)], grad=bool(i % 2), log=log)
        for i, name in enumerate(names)
    }


def without_hooks(variant):
    """Gradients where nobody listens, inference mode and autocast."""
    masks = (None, padded(5, 2), padded(5, right=1))
    runs = {
        f"{model.cfg.dtype} {mask}": partial(run, model, attention_mask=mask)
        for model, mask in zip(in_each_dtype(variant), masks)
    }
    unpadded = partial(run, shared(variant), grad=False)
    return {
        **runs,
        "inference mode": lambda: torch.inference_mode()(unpadded)(),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(runs[f"{DTYPES[0]} None"])(),
    }


def all_activations(variant):
    """With their gradients, in 16 bits."""
    model = shared(variant, torch.bfloat16)

    def cached():
        _, cache = model.run_with_cache(
            tokens(6), incl_bwd=True, return_type="loss", attention_mask=padded(6, 2)
        )
        assert "blocks.1.attn.hook_pattern_grad" in cache
        return {**cache, **gradients(model)}

    return {"activations": cached}


def with_kv_cache(variant):
    """Three parts of a text behind each other, with and without padding."""
    model = shared(variant)

    def generated(mask, grad):
        cache, seen = new_kv_cache(model, 2), {}
        with torch.set_grad_enabled(grad):
            for start, end in ((0, 4), (4, 5), (5, 7)):
                new = None if mask is None else mask[:, start:end]
                logits = model(tokens(7)[:, start:end], past_kv_cache=cache, attention_mask=new)
                seen[f"logits {start}"] = logits.detach()
            cache.freeze()
            seen["logits frozen"] = model(tokens(2), past_kv_cache=cache).detach()
        for i, entry in enumerate(cache.entries):
            seen |= {f"keys {i}": entry.past_keys, f"values {i}": entry.past_values}
        return seen

    masks = {None: True, padded(7): False, padded(7, left=3): True, padded(7, right=2): False}
    return {f"KV cache {mask}": partial(generated, mask, grad) for mask, grad in masks.items()}


def by_hand(variant):
    """A block and its components, called by themselves."""
    model = shared(variant)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))

    def called():
        block = model.blocks[1]
        with torch.no_grad():
            attended = block.attn(x, x * 2, x * 3, attention_mask=padded(5, 1))
            masked = block.attn(x, x, x, additive_attention_mask=torch.full((2, 1, 1, 5), -1.0))
            results = {"attention": attended, "masked": masked, "norm": block.ln1(x)}
            return {"block": block(x), **results}

    return {"by hand": called}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_a_block(variant):
    with tl_devicefix.disabled():
        # TransformerLens's ALiBi table grows, and the last bits depend on how large it is.
        for model in in_each_dtype(variant):
            model(tokens(9))
    hooked = with_one_hook(variant)
    runs = hooked | without_hooks(variant) | all_activations(variant) | with_kv_cache(variant)

    seen = assert_all_as_installed(runs | by_hand(variant))

    uncalled = {name for name in hooked if not any(key.endswith(name) for key in seen[name])}
    may_be = (*NOT_ALWAYS_CALLED, *(name for name in hooked if ".experts." in name))
    assert [name for name in uncalled if not name.endswith(may_be)] == []
    block = shared(variant).blocks[1]
    of_attention = known_blocks.why_attention_as_installed(block.attn)
    assert (known_blocks.why_as_installed(block) is not None) == (variant in BLOCKS_AS_INSTALLED)
    assert (of_attention is not None) == (variant in ATTENTION_AS_INSTALLED)


@pytest.mark.parametrize("variant", ["gpt2", "no norm"])
def test_a_residual_stream_that_is_a_part_of_another(variant):
    """As `generate` hands the last token's to the blocks; its layout decides how is rounded."""
    model = shared(variant)
    longer = torch.randn(2, 9, model.cfg.d_model, generator=torch.Generator().manual_seed(0))

    def start(grad):
        cache = new_kv_cache(model, 2)
        with torch.set_grad_enabled(grad):
            for part in (longer[:, :-1], longer[:, -1:]):
                logits = model(part, start_at_layer=0, past_kv_cache=cache)
        return {"logits": logits.detach()}

    assert_all_as_installed({str(grad): partial(start, grad) for grad in (False, True)})


@pytest.mark.parametrize("variant", ["gpt2", "no norm", "llama folded"])
def test_what_is_edited_in_place_before_attention_is_edited_there_alone(variant):
    model = make(variant)
    model.requires_grad_(False)

    def before(module, args, kwargs):
        kwargs["query_input"][:, 0] = 0.5

    model.blocks[1].attn.register_forward_pre_hook(before, with_kwargs=True)

    assert_as_installed(lambda: dict(model.run_with_cache(tokens(5))[1]))


def test_a_copy_of_a_model_has_its_own_hooks():
    model = make("llama")
    before = run(model, grad=False)["logits"]
    copied = copy.deepcopy(model)
    copied.add_hook("blocks.1.hook_resid_mid", lambda activation, hook: activation * 0.5)
    assert not torch.equal(run(copied, grad=False)["logits"], before)
    assert torch.equal(run(model, grad=False)["logits"], before)
    model.add_hook("blocks.0.hook_resid_mid", lambda activation, hook: activation * 0.5)
    assert_as_installed(lambda: run(copied, grad=False))


def test_a_prompt_longer_than_the_tables():
    model = make("llama")
    for block in model.blocks:
        for name in ("rotary_sin", "rotary_cos"):
            setattr(block.attn, name, getattr(block.attn, name)[:4])

    tables = copy.deepcopy(model)
    assert_as_installed(lambda: run(copy.deepcopy(tables), grad=False, n=9))
    expected = run(copy.deepcopy(tables), grad=False, n=9)["logits"]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    counted = mock.patch.object(torch.nn.functional, sdpa.__name__, wraps=sdpa)
    with tl_devicefix.set_attn_implementation(model, "sdpa"), counted as fused:
        torch.testing.assert_close(run(model, grad=False, n=9)["logits"], expected)
    assert fused.call_count == len(model.blocks) or IS_2


def test_the_installed_blocks_are_known():
    versions = known_blocks.KNOWN.get(known_blocks.digest())
    assert versions is not None, (
        f"the blocks of the installed TransformerLens have the digest {known_blocks.digest()}: "
        "compare what has changed, then add it to KNOWN"
    )


def test_blocks_of_an_unknown_transformer_lens_run_as_installed(monkeypatch):
    monkeypatch.setattr(known_blocks, "KNOWN", {})
    model = make("llama")
    with mock.patch("tl_devicefix.hooked_transformer.forward.run_block") as run_block:
        assert_as_installed(lambda: run(model))
    blocks = tl_devicefix.set_attn_implementation(model, "sdpa").blocks
    assert not run_block.called
    assert all("does not know the blocks of" in reason for reason in blocks.values())
