"""`mix_devices`: scripts that were written for one device run over four, and give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from torch import nn
from transformer_lens import ActivationCache

import tl_devicefix

LAYERS = range(5)


def kept(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What hooks of every block kept, on the block's device."""
    here: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return name, lambda activation, hook: here.update({name: activation})

    hooks = [keep(f"blocks.{layer}.hook_resid_post") for layer in LAYERS]
    model.run_with_hooks(tokens, fwd_hooks=hooks)
    return here


def residuals(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    here = kept(model, tokens)
    return [here[f"blocks.{i}.hook_resid_post"] for i in LAYERS]


def at_home(model: Any, like: torch.Tensor) -> torch.Tensor:
    values = torch.linspace(-1, 1, like.numel()).view(like.shape)
    return values.to(model.cfg.device)


def stacked(model: Any, tokens: torch.Tensor) -> Any:
    return torch.stack(residuals(model, tokens))


def a_weight_and_a_cached_activation(model: Any, tokens: torch.Tensor) -> Any:
    cache = model.run_with_cache(tokens)[1]
    return cache["blocks.4.attn.hook_z"][..., 0, :] @ model.blocks[4].attn.W_O[0]


def a_bias_and_what_is_gathered(model: Any, tokens: torch.Tensor) -> Any:
    return model.accumulated_bias(3) + model.blocks[4].attn.b_O


def weights_of_two_blocks(model: Any, tokens: torch.Tensor) -> Any:
    return torch.einsum("hde,hef->hdf", model.blocks[4].attn.W_Q, model.blocks[0].attn.W_O)


def all_parameters(model: Any, tokens: torch.Tensor) -> Any:
    return sum((p**2).sum() for p in model.parameters())


def a_cache_of_kept_activations(model: Any, tokens: torch.Tensor) -> Any:
    cache = ActivationCache(kept(model, tokens), model)
    return cache["blocks.4.hook_resid_post"] @ model.W_U


def modules_called_by_hand(model: Any, tokens: torch.Tensor) -> Any:
    # On a tensor at home, as one read from a cache is.
    cache = model.run_with_cache(tokens)[1]
    block, stream = model.blocks[4], cache["blocks.4.hook_resid_pre"]
    return [block.mlp(stream), block.ln1(stream)]


def gradients_of_several_blocks(model: Any, tokens: torch.Tensor) -> Any:
    loss = model(tokens, return_type="loss") + 1e-3 * all_parameters(model, tokens)
    (loss + torch.stack(residuals(model, tokens)).square().mean()).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    gradients = [next(iter(block.mlp.parameters())).grad for block in model.blocks]
    return [norm, torch.stack(gradients)]


def assert_close(model: Any, tokens: torch.Tensor) -> Any:
    def compare(activation: torch.Tensor, hook: Any) -> None:
        torch.testing.assert_close(activation, activation.to(model.cfg.device))
        torch.testing.assert_close([activation], [activation.to(model.cfg.device)])

    return model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.hook_resid_post", compare)])


def pytorch_s_hooks(model: Any, tokens: torch.Tensor) -> Any:
    like = residuals(model, tokens)[0]
    whole = at_home(model, like)

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        return output + whole if isinstance(output, torch.Tensor) else (output[0] + whole,)

    handle = model.blocks[4].mlp.register_forward_hook(change)
    logits = model(tokens)
    handle.remove()
    return logits


def pytorch_s_hooks_of_gradients(model: Any, tokens: torch.Tensor) -> Any:
    whole = at_home(model, residuals(model, tokens)[0])
    mlp, weight = model.blocks[4].mlp, next(model.blocks[3].mlp.parameters())
    of_weight = at_home(model, weight)
    mlp.register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * whole + whole,))
    mlp.register_full_backward_pre_hook(lambda m, grad_out: (whole.clone(),))
    weight.register_hook(lambda gradient: gradient * of_weight)
    loss = model(tokens, return_type="loss")
    loss.backward()
    return [weight.grad, *(p.grad for p in mlp.parameters())]


def in_place_and_out(model: Any, tokens: torch.Tensor) -> Any:
    streams = [each.detach().clone() for each in residuals(model, tokens)]
    vector, where = at_home(model, streams[0][0, 0]), torch.tensor([0, 2], device=model.cfg.device)
    devices = [each.device for each in streams]
    streams[1].add_(vector)
    streams[2][:, where] = streams[4][:, where]
    streams[3].copy_(vector)
    torch.add(streams[0], streams[4], out=streams[2])
    torch._foreach_add_(streams, [streams[1].clone() for _ in streams])
    assert [each.device for each in streams] == devices
    return [*streams, streams[4][streams[0] > 0], streams[4].index_select(1, where)]


SCRIPTS = (
    *(stacked, a_weight_and_a_cached_activation, a_bias_and_what_is_gathered),
    *(weights_of_two_blocks, all_parameters, a_cache_of_kept_activations),
    *(modules_called_by_hand, gradients_of_several_blocks, assert_close),
    *(pytorch_s_hooks, pytorch_s_hooks_of_gradients, in_place_and_out),
)


@pytest.fixture(autouse=True)
def mixing(machine: Any) -> Iterator[Any]:
    with tl_devicefix.mix_devices() as mixing:
        yield mixing


NOT_BY_A_PATCH = (weights_of_two_blocks, a_weight_and_a_cached_activation, modules_called_by_hand)
"""Those that may work without patches: unpatched, tensors may lie together by chance."""


def marked(script: Callable[..., Any]) -> Any:
    marks = () if script in NOT_BY_A_PATCH else pytest.mark.fails_unpatched
    return pytest.param(script, marks=marks, id=script.__name__)


@pytest.mark.parametrize("script", [marked(script) for script in SCRIPTS])
def test_a_script_for_one_device(
    script: Callable[..., Any], over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    kind = "gpt2" if script is a_bias_and_what_is_gathered else "llama"  # which has biases
    reference = on_one(kind)
    expected = script(reference, tokens)
    for module in reference.modules():  # which other tests use too
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    for parameter in reference.parameters():
        parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    reference.zero_grad()

    assert_agrees(script(over_devices(kind), tokens.to("sim:0")), expected, tolerance=1e-4)
