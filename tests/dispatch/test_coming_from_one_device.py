"""docs/single_device_code.md: what works within `mix_devices`, and what to write without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from transformer_lens import ActivationCache

import tl_devicefix

Call = Callable[[Any, torch.Tensor], Any]


def cached(model: Any, tokens: torch.Tensor) -> ActivationCache:
    return model.run_with_cache(tokens)[1]


def kept_by_hooks(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}
    model.reset_hooks()
    hooks = model.get_caching_hooks(cache=kept)[1]
    model.run_with_hooks(tokens, fwd_hooks=hooks)
    return kept


def residuals_kept(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    return [kept_by_hooks(model, tokens)[f"blocks.{i}.hook_resid_post"] for i in range(5)]


def with_pytorch_hook(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Call:
    def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        vector = torch.ones(model.cfg.d_model, device=model.cfg.device)
        handle = model.blocks[4].register_forward_hook(
            lambda block, args, output: change(output, vector)
        )
        try:
            return model(tokens)
        finally:
            handle.remove()

    return run


def at_home(model: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(model.cfg.device)


ROWS: dict[str, tuple[Call, Call]] = {
    "a block's weight and a cached activation": (
        lambda model, tokens: (
            cached(model, tokens)["z", 4][..., 0, :] @ model.blocks[4].attn.W_O[0]
        ),
        lambda model, tokens: cached(model, tokens)["z", 4][..., 0, :] @ model.W_O[4, 0],
    ),
    "a block's bias and what is gathered": (
        lambda model, tokens: model.accumulated_bias(3) + model.blocks[4].attn.b_O,
        lambda model, tokens: model.accumulated_bias(3) + at_home(model, model.blocks[4].attn.b_O),
    ),
    "weights of two blocks": (
        lambda model, tokens: model.blocks[0].attn.W_O[0] @ model.blocks[4].attn.W_Q[1],
        lambda model, tokens: model.W_O[0, 0] @ model.W_Q[4, 1],
    ),
    "all parameters": (
        lambda model, tokens: sum(p.pow(2).sum() for p in model.parameters()),
        lambda model, tokens: sum(at_home(model, p.pow(2).sum()) for p in model.parameters()),
    ),
    "what hooks kept": (
        lambda model, tokens: torch.stack(residuals_kept(model, tokens)),
        lambda model, tokens: torch.stack(
            [at_home(model, each) for each in residuals_kept(model, tokens)]
        ),
    ),
    "what hooks kept in a dict": (
        lambda model, tokens: torch.stack(residuals_kept(model, tokens)),
        lambda model, tokens: ActivationCache(kept_by_hooks(model, tokens), model).stack_activation(
            "resid_post"
        ),
    ),
    "an MLP called by hand": (
        lambda model, tokens: model.blocks[4].mlp(cached(model, tokens)["normalized", 4, "ln2"]),
        lambda model, tokens: model.blocks[4].mlp(
            cached(model, tokens)["normalized", 4, "ln2"].to(model.blocks[4].mlp.W_in.device)
        ),
    ),
    "a PyTorch hook": (
        with_pytorch_hook(lambda output, vector: output + vector),
        with_pytorch_hook(lambda output, vector: output + vector.to(output.device)),
    ),
}


@pytest.mark.parametrize("kind", ["gpt2"])
@pytest.mark.parametrize("row", ROWS)
def test_what_fails_works_within_mix_devices_and_what_to_write_without(
    row: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    on_one_device, instead = ROWS[row]
    with pytest.raises(RuntimeError, match="same device"):
        on_one_device(model, tokens)
    expected = on_one_device(reference, tokens)
    with tl_devicefix.mix_devices():
        assert_agrees(on_one_device(model, tokens), expected)
    assert_agrees(instead(model, tokens), expected)


def test_a_whole_block_fetches_what_it_is_called_with(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    def call(model: Any) -> torch.Tensor:
        return model.blocks[4](cached(model, tokens)["resid_pre", 4])

    assert_agrees(call(model), call(reference))
    assert call(model).device == model.placement.device_of("blocks.4")


def test_changing_what_is_read_from_a_cache_changes_a_copy_and_what_to_write(
    model: Any, tokens: torch.Tensor
) -> None:
    cache, name = cached(model, tokens), "blocks.4.hook_resid_post"

    cache["resid_post", 4][:] = 0
    assert cache["resid_post", 4].count_nonzero() > 0

    cache.cache_dict[name] = torch.zeros_like(cache["resid_post", 4])
    assert cache["resid_post", 4].count_nonzero() == 0
