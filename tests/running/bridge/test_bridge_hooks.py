"""Hooks of a Bridge run on the device of their block, and may use what is at home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees

LAST = "blocks.4.hook_out"
each_kind = pytest.mark.parametrize("kind", ["llama", "gpt2"])


def direction(bridge: Any) -> torch.Tensor:
    """A vector of the residual stream, at home."""
    return torch.linspace(-1, 1, bridge.cfg.d_model, device=bridge.cfg.device)


def steer(bridge: Any) -> Any:
    vector = direction(bridge)
    return lambda activation, hook: activation + vector


@each_kind
@pytest.mark.fails_unpatched
def test_a_hook_adds_a_vector_from_home_to_a_block_elsewhere(
    kind: str, machine: Any, dispatched: Any, references: Any, tokens: torch.Tensor
) -> None:
    bridge, reference = dispatched(kind), references(kind)
    assert bridge.blocks[4].attn.W_O.device == machine.devices[3]
    expected = reference.run_with_hooks(tokens, fwd_hooks=[(LAST, steer(reference))])

    actual = bridge.run_with_hooks(tokens.to("sim:0"), fwd_hooks=[(LAST, steer(bridge))])

    assert_agrees(actual, expected, machine.devices[0])


@pytest.mark.fails_unpatched
def test_a_hook_puts_in_what_another_run_has_cached(
    machine: Any, dispatched: Any, references: Any, tokens: torch.Tensor
) -> None:
    def patched(bridge: Any) -> torch.Tensor:
        at_home = tokens.to(bridge.cfg.device)
        _, clean = bridge.run_with_cache(at_home.flip(1))
        stream = clean["blocks.1.hook_out"] + clean[LAST]
        return bridge.run_with_hooks(at_home, fwd_hooks=[(LAST, lambda a, hook: stream)])

    assert_agrees(patched(dispatched("llama")), patched(references("llama")), machine.devices[0])


@pytest.mark.fails_unpatched
def test_a_permanent_hook_and_one_within_a_context(
    machine: Any, dispatched: Any, boot: Any, tokens: torch.Tensor
) -> None:
    def steered(bridge: Any) -> list[torch.Tensor]:
        at_home = tokens.to(bridge.cfg.device)
        with bridge.hooks(fwd_hooks=[("blocks.2.hook_in", steer(bridge))]):
            inside = bridge(at_home)
        bridge.add_perma_hook(LAST, steer(bridge))
        bridge.reset_hooks()
        return [inside, bridge(at_home)]

    expected = steered(boot("llama", device="cpu"))

    assert_agrees(steered(dispatched("llama")), expected, machine.devices[0])


@pytest.mark.fails_unpatched
def test_gradients_reach_a_vector_at_home(
    machine: Any, dispatched: Any, references: Any, tokens: torch.Tensor
) -> None:
    def gradient(bridge: Any) -> torch.Tensor:
        vector = direction(bridge).requires_grad_()
        loss = bridge.run_with_hooks(
            tokens.to(bridge.cfg.device),
            return_type="loss",
            fwd_hooks=[(LAST, lambda a, hook: a + vector)],
        )
        return torch.autograd.grad(loss, vector)[0]

    assert_agrees(gradient(dispatched("llama")), gradient(references("llama")), machine.devices[0])


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
def test_generation_under_a_hook(
    use_past_kv_cache: bool, boot: Any, machine: Any, tokens: torch.Tensor
) -> None:
    def generated(bridge: Any) -> torch.Tensor:
        with bridge.hooks(fwd_hooks=[("blocks.4.hook_resid_post", steer(bridge))]):
            return bridge.generate(
                tokens.to(bridge.cfg.device),
                max_new_tokens=4,
                do_sample=False,
                stop_at_eos=False,
                use_past_kv_cache=use_past_kv_cache,
                verbose=False,
            )

    expected = generated(boot("llama", compatible=True, device="cpu"))

    assert_agrees(
        generated(boot("llama", compatible=True, n_devices=4)), expected, machine.devices[0]
    )
