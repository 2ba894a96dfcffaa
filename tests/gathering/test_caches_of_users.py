"""`ActivationCache(kept_by_hooks, model)`: it is read at home, as that of `run_with_cache` is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformer_lens import ActivationCache

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

HOME = "sim:0"


@pytest.fixture(params=["HookedTransformer", "TransformerBridge"])
def model(
    request: Any, hf_models: Any, tokenizer: Any, checkpoints: Any, monkeypatch: Any
) -> Iterator[Any]:
    """A model on four devices, of either class."""
    with tl_devicefix.simulate(4):
        if request.param == "HookedTransformer":
            if not has_hooked_transformer():
                pytest.skip("this TransformerLens has no HookedTransformer")
            from transformer_lens import HookedTransformer

            yield HookedTransformer.from_pretrained(checkpoints("llama"), n_devices=4)
        else:
            if not has_bridge():
                pytest.skip("this TransformerLens has no TransformerBridge")
            from transformer_lens.model_bridge import TransformerBridge

            bridge = TransformerBridge.boot_transformers(str(checkpoints("llama")), n_devices=4)
            bridge.enable_compatibility_mode(disable_warnings=True)
            yield bridge


def keeping(kept: dict[str, torch.Tensor], name: str) -> Any:
    """A hook that keeps what it sees, by the name that it is asked for: a Bridge's have others."""

    def keep(activation: torch.Tensor, hook: Any) -> None:
        kept[name] = activation.detach()

    return keep


def keep(model: Any, tokens: torch.Tensor, *names: str) -> dict[str, torch.Tensor]:
    """What hooks have kept in a plain dict, by the hooks' names."""
    kept: dict[str, torch.Tensor] = {}
    wanted = names or tuple(f"blocks.{i}.hook_resid_post" for i in range(model.cfg.n_layers))
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[(name, keeping(kept, name)) for name in wanted])
    return kept


def test_what_is_read_is_at_home(model: Any, tokens: torch.Tensor) -> None:
    kept = keep(model, tokens)
    as_it_was = {name: (id(each), each.device) for name, each in kept.items()}
    assert len({device for _, device in as_it_was.values()}) == 4
    cache = ActivationCache(kept, model)
    reads = {
        "shorthand": cache["resid_post", 3],
        "negative": cache["resid_post", -1],
        "name": cache["blocks.3.hook_resid_post"],
        "values": list(cache.values())[-1],
        "items": dict(cache.items())["blocks.4.hook_resid_post"],
    }
    assert {how: each.device for how, each in reads.items()} == dict.fromkeys(
        reads, torch.device(HOME)
    )
    assert cache.cache_dict is kept
    assert {name: (id(each), each.device) for name, each in kept.items()} == as_it_was
    assert (cache["resid_post", 4] @ model.W_U).device == torch.device(HOME)


def test_it_is_that_of_run_with_cache(model: Any, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        _, expected = model.run_with_cache(tokens)
    cache = ActivationCache(keep(model, tokens), model)
    for name in cache.cache_dict:
        assert torch.equal(cache[name], expected[name])
        assert cache[name].device == expected[name].device
    stack, theirs = cache.stack_activation("resid_post"), expected.stack_activation("resid_post")
    assert torch.equal(stack, theirs)
    assert stack.device == theirs.device


def test_attribution_patching(model: Any, tokens: torch.Tensor) -> None:
    """As in TransformerLens's demo: caches of activations and of gradients, filled by hooks."""
    acts: dict[str, torch.Tensor] = {}
    grads: dict[str, torch.Tensor] = {}
    model.reset_hooks()
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    fwd = [(name, keeping(acts, name)) for name in names]
    bwd = [(name, keeping(grads, name)) for name in names]
    with model.hooks(fwd_hooks=fwd, bwd_hooks=bwd):
        model(tokens)[0, -1, 5].backward()
    act, grad = ActivationCache(acts, model), ActivationCache(grads, model)
    attributions = [
        ((act["resid_post", layer].flip(0) - act["resid_post", layer]) * grad["resid_post", layer])
        .sum(-1)
        .mean(0)
        for layer in range(model.cfg.n_layers)
    ]
    assert torch.stack(attributions).device == torch.device(HOME)


def test_of_one_block_that_is_elsewhere(model: Any, tokens: torch.Tensor) -> None:
    kept = keep(model, tokens, "blocks.4.hook_resid_post")
    assert kept["blocks.4.hook_resid_post"].device != torch.device(HOME)
    assert ActivationCache(kept, model)["resid_post", 4].device == torch.device(HOME)


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
def test_where_it_was_moved_it_stays(model: Any, tokens: torch.Tensor, device: str) -> None:
    there = torch.device(device)
    kept = keep(model, tokens)
    moved = ActivationCache(kept, model).to(device)
    with torch.no_grad():
        _, asked = model.run_with_cache(tokens, device=device)
        _, cached = model.run_with_cache(tokens)
    by_hand = ActivationCache({name: each.to(device) for name, each in kept.items()}, model)
    for cache in (moved, asked, cached.to(device), by_hand):
        assert cache["resid_post", 0].device == there
        assert cache["resid_post", 4].device == there
        assert {each.device for each in cache.values()} == {there}
        assert cache.stack_activation("resid_post").device == there
    assert len({each.device for each in kept.values()}) == 4


def test_methods_that_change_it_leave_it_where_it_is(model: Any, tokens: torch.Tensor) -> None:
    kept = keep(model, tokens[:1])
    devices = {name: each.device for name, each in kept.items()}
    cache = ActivationCache(kept, model)
    sliced = cache.apply_slice_to_batch_dim(0)
    cache.remove_batch_dim()
    for each in (sliced, cache):
        assert {name: value.device for name, value in each.cache_dict.items()} == devices
        assert each["resid_post", 4].device == torch.device(HOME)
        assert each["resid_post", 4].shape == (tokens.shape[1], model.cfg.d_model)


def test_it_is_gathered_where_one_says(model: Any, tokens: torch.Tensor) -> None:
    cache = ActivationCache(keep(model, tokens), model)
    with tl_devicefix.gather_on("cpu"):
        assert cache["resid_post", 4].device.type == "cpu"
        assert {each.device.type for each in cache.values()} == {"cpu"}


def test_its_model_may_be_anything_that_has_what_is_read() -> None:
    """As in TransformerLens's own tests: a cache asks its model for weights, not for parameters."""
    attn = SimpleNamespace(W_O=torch.ones(2, 4, 8))
    stub: Any = SimpleNamespace(
        cfg=SimpleNamespace(n_layers=1, n_heads=2), blocks=[SimpleNamespace(attn=attn)]
    )
    cache = ActivationCache({"blocks.0.attn.hook_z": torch.ones(1, 3, 2, 4)}, stub)
    cache.compute_head_results()
    assert torch.equal(cache["blocks.0.attn.hook_result"], torch.full((1, 3, 2, 8), 4.0))
