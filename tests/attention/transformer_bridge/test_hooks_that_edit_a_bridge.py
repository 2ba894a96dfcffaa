"""With "sdpa", what hooks and users do to a Bridge has the effect that it has as installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from either_way import assert_either_way
from hf_models import D_VOCAB, N_CTX, N_LAYERS

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

pytestmark = [
    pytest.mark.skipif(has_hooked_transformer(), reason="a Bridge of TransformerLens 4"),
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
]


def gradients(bridge: Any, tokens: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    logits = bridge(tokens, **options)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    weights = [parameter for parameter in bridge.parameters() if parameter.requires_grad]
    return [g for g in torch.autograd.grad(loss, weights, allow_unused=True) if g is not None]


def silence_a_head(value: torch.Tensor, hook: Any) -> torch.Tensor:
    value[:, :, 1] = 0
    return value


@pytest.mark.parametrize("name", ["q", "k", "v", "z"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_edits_in_place_have_their_gradients(
    kind: str, name: str, references: Any, tokens: torch.Tensor
) -> None:
    def run(bridge: Any) -> Any:
        with bridge.hooks(fwd_hooks=[(f"blocks.1.attn.hook_{name}", silence_a_head)]):
            return gradients(bridge, tokens)

    assert_either_way(references(kind), run)


def test_a_hook_that_adds_another(references: Any, tokens: torch.Tensor) -> None:
    bridge = references("llama")

    def run(bridge: Any) -> Any:
        def add(query: torch.Tensor, hook: Any) -> None:
            point = bridge.blocks[1].attn.hook_pattern
            point.add_hook(lambda pattern, hook: torch.ones_like(pattern) / 7)

        try:
            return bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_q", add)])
        finally:
            bridge.reset_hooks()

    before = bridge(tokens)

    assert_either_way(bridge, run)
    assert not torch.allclose(run(bridge), before)


def test_dropout_of_patterns_in_training(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("gpt2", compatible=True, device="cpu").train()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0  # queries that see no key

    def run(bridge: Any) -> Any:
        torch.manual_seed(0)
        return gradients(bridge, tokens, attention_mask=mask)

    assert_either_way(bridge, run)
    assert all(torch.isfinite(tensor).all() for tensor in run(bridge))


def test_a_hook_of_torch_s_sees_the_pattern(references: Any, tokens: torch.Tensor) -> None:
    bridge, seen = references("llama"), []
    attention = bridge.blocks[1].attn
    with tl_devicefix.set_attn_implementation(bridge, "sdpa") as implementations:
        handle = attention.register_forward_hook(lambda module, args, output: seen.append(output))
        bridge(tokens)
        assert implementations.blocks["blocks.1.attn"] == "eager: attn has hooks"
        handle.remove()
        assert implementations.blocks["blocks.1.attn"] == "sdpa"

    assert [type(tensor) for tensor in seen[0]] == [torch.Tensor] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_a_mask_that_is_edited_between_forwards(
    dtype: torch.dtype, mode: Any, references: Any, tokens: torch.Tensor
) -> None:
    @mode()
    def run(bridge: Any) -> Any:
        mask = torch.ones_like(tokens, dtype=dtype)
        first = bridge(tokens, attention_mask=mask)
        mask[0, :3] = 0
        return first, bridge(tokens, attention_mask=mask)

    assert_either_way(references("llama"), run)


@torch.no_grad()
def test_a_mask_that_a_hook_edits_before_a_block_has_it_built(
    references: Any, tokens: torch.Tensor
) -> None:
    def run(bridge: Any) -> Any:
        mask = torch.ones_like(tokens, dtype=torch.bool)

        def edit(query: torch.Tensor, hook: Any) -> None:
            mask[0, :3] = False

        listening = ("blocks.1.attn.hook_pattern", lambda pattern, hook: None)
        hooks = [("blocks.0.attn.hook_q", edit), listening]
        return bridge.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks)

    assert_either_way(references("llama"), run)


def test_copies_attend_as_the_bridge_does(
    boot: Any, tokens: torch.Tensor, fused_blocks: list[int]
) -> None:
    bridge = boot("gpt2", device="cpu")
    with tl_devicefix.set_attn_implementation(bridge, "sdpa"):
        bridge(tokens)
        copied = copy.deepcopy(bridge)
    fused_blocks.clear()

    assert_agrees(copied(tokens), bridge(tokens))
    assert len(fused_blocks) == N_LAYERS


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sixteen_bits_are_no_further_from_float32(
    kind: str, references: Any, fused_blocks: list[int]
) -> None:
    prompts = torch.randint(0, D_VOCAB, (128, N_CTX), generator=torch.Generator().manual_seed(0))
    bridge = references(kind, dtype=torch.bfloat16)

    def distance(way: str) -> float:
        with tl_devicefix.set_attn_implementation(bridge, way):
            return float((bridge(prompts).float() - exact).abs().mean())

    with torch.no_grad():
        exact = references(kind)(prompts)
        assert 0 < distance("sdpa") <= 1.02 * distance("eager")
    assert len(fused_blocks) == N_LAYERS
