"""Hooks of either class run on the device of their block, and may use what is at home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees

LAST = "blocks.4.hook_resid_post"
each_kind = pytest.mark.parametrize("kind", ["llama", "gpt2"])


def direction(model: Any) -> torch.Tensor:
    """A vector of the residual stream, at home."""
    return torch.linspace(-1, 1, model.cfg.d_model, device=model.cfg.device)


def steer(model: Any) -> Any:
    vector = direction(model)
    return lambda activation, hook: activation + vector


@each_kind
@pytest.mark.fails_unpatched
def test_a_hook_adds_a_vector_from_home_to_a_block_elsewhere(
    kind: str, machine: Any, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    model, reference = over_devices(kind), on_one(kind)
    assert model.blocks[4].attn.W_O.device == machine.devices[3]
    expected = reference.run_with_hooks(tokens, fwd_hooks=[(LAST, steer(reference))])

    actual = model.run_with_hooks(tokens.to("sim:0"), fwd_hooks=[(LAST, steer(model))])

    assert_agrees(actual, expected, machine.devices[0])


@pytest.mark.fails_unpatched
def test_a_hook_puts_in_what_another_run_has_cached(
    machine: Any, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    def patched(model: Any) -> torch.Tensor:
        at_home = tokens.to(model.cfg.device)
        _, clean = model.run_with_cache(at_home.flip(1))
        stream = clean["blocks.1.hook_resid_post"] + clean[LAST]
        return model.run_with_hooks(at_home, fwd_hooks=[(LAST, lambda a, hook: stream)])

    assert_agrees(patched(over_devices("llama")), patched(on_one("llama")), machine.devices[0])


@pytest.mark.fails_unpatched
def test_a_permanent_hook_and_one_within_a_context(
    machine: Any, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    def steered(model: Any) -> list[torch.Tensor]:
        at_home = tokens.to(model.cfg.device)
        with model.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", steer(model))]):
            inside = model(at_home)
        model.add_perma_hook(LAST, steer(model))
        model.reset_hooks()
        return [inside, model(at_home)]

    expected = steered(on_one("llama"))

    assert_agrees(steered(over_devices("llama")), expected, machine.devices[0])


@pytest.mark.fails_unpatched
def test_gradients_reach_a_vector_at_home(
    machine: Any, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    def gradient(model: Any) -> torch.Tensor:
        vector = direction(model).requires_grad_()
        loss = model.run_with_hooks(
            tokens.to(model.cfg.device),
            return_type="loss",
            fwd_hooks=[(LAST, lambda a, hook: a + vector)],
        )
        return torch.autograd.grad(loss, vector)[0]

    assert_agrees(gradient(over_devices("llama")), gradient(on_one("llama")), machine.devices[0])


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
def test_generation_under_a_hook(
    use_past_kv_cache: bool,
    folded: Any,
    folded_on_one: Any,
    machine: Any,
    tokens: torch.Tensor,
) -> None:
    def generated(model: Any) -> torch.Tensor:
        with model.hooks(fwd_hooks=[("blocks.4.hook_resid_post", steer(model))]):
            return model.generate(
                tokens.to(model.cfg.device),
                max_new_tokens=4,
                do_sample=False,
                stop_at_eos=False,
                use_past_kv_cache=use_past_kv_cache,
                verbose=False,
            )

    expected = generated(folded_on_one("llama"))

    assert_agrees(generated(folded("llama", 4)), expected, machine.devices[0])
