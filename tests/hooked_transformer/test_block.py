"""A block gives the installed activations and gradients, bit for bit, whoever listens to it.

Several hooks at once, hooks that change other things, and changes by hand are in tests/fuzz.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from block_variants import (
    ATTENTION_AS_INSTALLED,
    BLOCKS_AS_INSTALLED,
    DTYPES,
    VARIANTS,
    Recorder,
    Seen,
    assert_all_as_installed,
    assert_as_installed,
    gradients,
    make,
    padded,
    points,
    run,
    shared,
    tokens,
)
from kinds import new_kv_cache

import tl_devicefix
from tl_devicefix.hooked_transformer import known_blocks

NOT_ALWAYS_CALLED = (
    *("_in", "_input", "hook_result", "blocks.1.hook_mlp_out"),
    "hook_expert_indices",  # what replaces them is no index
)
"""Points that some variants have and do not call, or that refuse what replaces them."""
Runs = dict[str, Callable[[], Seen]]


def in_each_dtype(variant: str) -> list[Any]:
    return [shared(variant), *(shared(variant, dtype) for dtype in DTYPES[1:])]


def with_one_hook(variant: str) -> Runs:
    """Each hook point of a block alone, every other one with gradients."""
    model, log = shared(variant), dict[str, Any]()
    names = [name for name in points(model) if name.startswith("blocks.1.")]
    hooks = {name: [(name, Recorder(log).replace)] for name in names}
    return {
        name: partial(run, model, hooks[name], grad=bool(i % 2), log=log)
        for i, name in enumerate(names)
    }


def without_hooks(variant: str) -> Runs:
    """Gradients where nobody listens, inference mode and autocast."""
    masks = (None, padded(5, 2), padded(5, right=1))
    runs: Runs = {
        f"{model.cfg.dtype} {mask}": partial(run, model, attention_mask=mask)
        for model, mask in zip(in_each_dtype(variant), masks)
    }
    unpadded = partial(run, shared(variant), grad=False)
    return {
        **runs,
        "inference mode": lambda: torch.inference_mode()(unpadded)(),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(runs[f"{DTYPES[0]} None"])(),
    }


def all_activations(variant: str) -> Runs:
    """With their gradients, in 16 bits."""
    model = shared(variant, torch.bfloat16)

    def cached() -> Seen:
        _, cache = model.run_with_cache(
            tokens(6), incl_bwd=True, return_type="loss", attention_mask=padded(6, 2)
        )
        assert "blocks.1.attn.hook_pattern_grad" in cache
        return {**cache, **gradients(model)}

    return {"activations": cached}


def with_kv_cache(variant: str) -> Runs:
    """Three parts of a text behind each other, with and without padding."""
    model = shared(variant)

    def generated(mask: torch.Tensor | None, grad: bool) -> Seen:
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


def by_hand(variant: str) -> Runs:
    """A block and its components, called by themselves."""
    model = shared(variant)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))

    def called() -> Seen:
        block = model.blocks[1]
        with torch.no_grad():
            attended = block.attn(x, x * 2, x * 3, attention_mask=padded(5, 1))
            masked = block.attn(x, x, x, additive_attention_mask=torch.full((2, 1, 1, 5), -1.0))
            return {
                "block": block(x),
                "attention": attended,
                "masked": masked,
                "norm": block.ln1(x),
            }

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


@pytest.mark.parametrize("variant", ["LN", "no norm"])
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


@pytest.mark.parametrize("variant", ["LN", "no norm", "RMSPre, grouped"])
def test_what_is_edited_in_place_before_attention_is_edited_there_alone(variant):
    model = make(variant)
    model.requires_grad_(False)

    def before(module, args, kwargs):
        kwargs["query_input"][:, 0] = 0.5

    model.blocks[1].attn.register_forward_pre_hook(before, with_kwargs=True)

    assert_as_installed(lambda: dict(model.run_with_cache(tokens(5))[1]))


def test_a_copy_of_a_model_has_its_own_hooks():
    model = make("RMS, grouped")
    before = run(model, grad=False)["logits"]
    copied = copy.deepcopy(model)
    copied.add_hook("blocks.1.hook_resid_mid", lambda activation, hook: activation * 0.5)
    assert not torch.equal(run(copied, grad=False)["logits"], before)
    assert torch.equal(run(model, grad=False)["logits"], before)
    model.add_hook("blocks.0.hook_resid_mid", lambda activation, hook: activation * 0.5)
    assert_as_installed(lambda: run(copied, grad=False))


def test_a_prompt_longer_than_the_tables():
    model = make("RMS, grouped")
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
    assert fused.call_count == len(model.blocks) or known_blocks.IS_2


def test_the_installed_blocks_are_known():
    versions = known_blocks.KNOWN.get(known_blocks.digest())

    assert versions is not None, (
        f"the blocks of the installed TransformerLens have the digest {known_blocks.digest()}: "
        "compare what has changed, then add it to KNOWN"
    )


def test_blocks_of_an_unknown_transformer_lens_run_as_installed(
    monkeypatch,
):
    monkeypatch.setattr(known_blocks, "KNOWN", {})
    model = make("RMS, grouped")
    with mock.patch("tl_devicefix.hooked_transformer.block.run_block") as run_block:
        assert_as_installed(lambda: run(model))
    blocks = tl_devicefix.set_attn_implementation(model, "sdpa").blocks

    assert not run_block.called
    assert all("does not know the blocks of" in reason for reason in blocks.values())
