"""With "sdpa", what hooks and users do to a model has the effect that it has as installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from either_way import assert_either_way

import tl_devicefix


def silence_a_head(value: torch.Tensor, hook: Any) -> torch.Tensor:
    value[:, :, 1] = 0
    return value


@pytest.mark.parametrize("name", ["q", "k", "v", "rot_q", "rot_k", "z"])
def test_edits_in_place_have_their_gradients(name: str, on_cpu: Any, tokens: torch.Tensor) -> None:
    def run(model: Any) -> Any:
        with model.hooks(fwd_hooks=[(f"blocks.1.attn.hook_{name}", silence_a_head)]):
            loss = model(tokens, return_type="loss")
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.autograd.grad(loss, weights, allow_unused=True)

    assert_either_way(on_cpu("llama"), run)


def test_a_hook_that_adds_another(on_cpu: Any, tokens: torch.Tensor) -> None:
    def run(model: Any) -> Any:
        def add(query: torch.Tensor, hook: Any) -> None:
            point = model.blocks[1].attn.hook_pattern
            point.add_hook(lambda pattern, hook: torch.ones_like(pattern) / 7, prepend=True)

        return model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_q", add)])

    model = on_cpu("llama")
    before = model(tokens)

    assert_either_way(model, run)
    assert not torch.allclose(run(model), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_edited_between_forwards(
    mode: Any, on_cpu: Any, tokens: torch.Tensor
) -> None:
    @mode()
    def run(model: Any) -> Any:
        mask = torch.ones_like(tokens)
        first = model(tokens, attention_mask=mask)
        copied = copy.deepcopy(mask)
        copied[0, :3] = 0
        second = model(tokens, attention_mask=copied)
        mask[1, :2] = 0
        return first, second, model(tokens, attention_mask=mask)

    assert_either_way(on_cpu("llama"), run)


def test_within_autocast(on_cpu: Any, tokens: torch.Tensor) -> None:
    model = on_cpu("llama")
    exact = model(tokens)

    def distance(way: str) -> float:
        with (
            tl_devicefix.set_attn_implementation(model, way),
            torch.autocast("cpu", torch.bfloat16),
        ):
            logits = model(tokens).detach()
        assert logits.dtype == torch.bfloat16
        return float((logits.float() - exact).abs().mean())

    assert 0 < distance("sdpa") <= 1.1 * distance("eager")


def test_a_mask_that_is_changed_where_torch_does_not_count_is_seen(
    on_cpu: Any, tokens: torch.Tensor
) -> None:
    array = torch.ones_like(tokens).numpy()
    mask = torch.from_numpy(array)

    def run(model: Any) -> Any:
        array[:] = 1
        unpadded = model(tokens, attention_mask=mask)
        array[0, :3] = 0
        padded = model(tokens, attention_mask=mask)
        mask.data[0, :2] = 1
        return unpadded, padded, model(tokens, attention_mask=mask)

    assert_either_way(on_cpu("llama"), run)


@pytest.mark.parametrize("name", ["q", "rot_k"])
def test_a_hook_that_asks_for_scores_gets_scores(
    name: str, on_cpu: Any, tokens: torch.Tensor
) -> None:
    model, result = on_cpu("llama"), []
    attention = model.blocks[1].attn

    def ask(value: torch.Tensor, hook: Any) -> None:
        heads = value.new_ones(1, 4, attention.cfg.n_heads, attention.cfg.d_head)
        keys = value.new_ones(1, 4, attention.cfg.n_key_value_heads, attention.cfg.d_head)
        result.append(attention.calculate_attention_scores(heads, keys))

    with tl_devicefix.set_attn_implementation(model, "sdpa"):
        model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.1.attn.hook_{name}", ask)])

    assert type(result[0]) is torch.Tensor
    assert result[0].shape == (1, attention.cfg.n_heads, 4, 4)
