"""`run_with_cache`: every activation as on one device, read at home, kept where it was computed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from hf_models import N_LAYERS
from kinds import everywhere, home_of
from transformer_lens import ActivationCache

import tl_devicefix

RESIDUALS = [f"blocks.{i}.hook_resid_post" for i in range(N_LAYERS)]
OPTIONS: dict[str, dict[str, Any]] = {
    "names_filter, a name": {"names_filter": "blocks.3.hook_resid_post"},
    "names_filter, names": {"names_filter": ["hook_embed", "blocks.4.attn.hook_pattern"]},
    "names_filter, a function": {"names_filter": lambda name: name.endswith("hook_z")},
    "stop_at_layer": {"stop_at_layer": 3},
    "pos_slice, an index": {"pos_slice": -1},
    "pos_slice, a range": {"pos_slice": (1, 4)},
    "return_cache_object": {"return_cache_object": False},
    "incl_bwd": {"incl_bwd": True, "return_type": "loss"},
}


@pytest.mark.cover(("kind", "fails_unpatched"))
@everywhere
def test_every_activation(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    expected = reference.run_with_cache(tokens)

    logits, cache = model.run_with_cache(tokens)

    assert_agrees((logits, cache), expected, home_of(model))


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(
    options: dict[str, Any], model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    expected_output, expected = reference.run_with_cache(tokens, **options)

    output, cache = model.run_with_cache(tokens, **options)

    assert isinstance(cache, ActivationCache) == isinstance(expected, ActivationCache)
    assert_agrees((output, cache), (expected_output, expected), home_of(model))


@pytest.mark.fails_unpatched
def test_remove_batch_dim(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    _, expected = reference.run_with_cache(tokens[:1], remove_batch_dim=True)

    _, max_in_flight = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    _, later = model.run_with_cache(tokens[:1])
    later.remove_batch_dim()

    assert_agrees(max_in_flight, expected, home_of(model))
    assert_agrees(later, expected, home_of(model))


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("device", ["cpu", "sim:3"])
def test_activations_go_to_the_device_that_is_asked_for(
    device: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    _, expected = reference.run_with_cache(tokens)

    logits, cache = model.run_with_cache(tokens, device=device)

    assert logits.device == home_of(model)
    assert_agrees(cache, expected, torch.device(device))


@pytest.mark.parametrize("spread", [4, "scattered"])
def test_activations_are_kept_where_they_were_computed(model: Any, tokens: torch.Tensor) -> None:
    _, cache = model.run_with_cache(tokens)

    for name in cache:
        if name.startswith("blocks."):
            kept = dict.__getitem__(cache.cache_dict, name)
            assert kept.device == model.placement.device_of(name), name


@pytest.mark.fails_unpatched
def test_a_slice_that_is_made_within_gather_on_is_read_at_home_afterwards(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    _, expected = reference.run_with_cache(tokens)
    _, cache = model.run_with_cache(tokens)

    with tl_devicefix.gather_on("cpu"):
        first = cache.apply_slice_to_batch_dim(0)
        assert first["resid_post", 4].device == torch.device("cpu")

    assert_agrees(first, expected.apply_slice_to_batch_dim(0), home_of(model))


def test_reading_a_cache_leaves_nothing_behind_at_home(
    model: Any, machine: Any, tokens: torch.Tensor
) -> None:
    _, cache = model.run_with_cache(tokens)
    before = [machine.memory_allocated(device) for device in machine.devices]

    for name, activation in cache.items():
        assert activation.device == cache[name].device == home_of(model)
    del activation

    assert [machine.memory_allocated(device) for device in machine.devices] == before


def test_a_cache_is_a_mapping(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    _, expected = reference.run_with_cache(tokens)
    _, cache = model.run_with_cache(tokens)

    assert list(cache) == list(cache.keys()) == list(expected)
    assert len(cache) == len(expected)
    assert "blocks.3.hook_resid_post" in cache
    assert "blocks.9.hook_resid_post" not in cache
    assert_agrees(list(cache.values()), list(expected.values()), home_of(model))
    assert_agrees([v for _, v in cache.items()], list(expected.values()), home_of(model))


def updated(cache: Any) -> dict[str, torch.Tensor]:
    copied: dict[str, torch.Tensor] = {}
    copied.update(cache)
    return copied


COPIES = {
    "dict": dict,
    "**": lambda cache: {**cache},
    "|": lambda cache: cache | {},
    "update": updated,
    "copy": copy.copy,
    "setdefault": lambda cache: {name: cache.setdefault(name) for name in cache},
    "popitem": lambda cache: dict(cache.popitem() for _ in range(len(cache))),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_cache_is_at_home_too(
    copied: Any, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    options = {"names_filter": RESIDUALS, "return_cache_object": False}
    _, expected = reference.run_with_cache(tokens, **options)
    _, cache = model.run_with_cache(tokens, **options)

    actual = copied(cache)

    assert_agrees({name: actual[name] for name in expected}, expected, home_of(model))


def test_a_cache_can_be_saved_and_loaded(
    model: Any, reference: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """By default, torch loads nothing but plain dicts and tensors."""
    options = {"names_filter": RESIDUALS, "return_cache_object": False}
    _, expected = reference.run_with_cache(tokens, **options)
    _, cache = model.run_with_cache(tokens, **options)

    torch.save(cache, tmp_path / "cache.pt")

    assert_agrees(torch.load(tmp_path / "cache.pt", map_location="cpu"), expected)


@pytest.mark.parametrize(("kind", "spread"), [("llama", 4), ("gpt2", "scattered")])
def test_a_logit_lens_by_hand(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    """Components can be called by themselves, with what is at home."""

    def lens(model: Any) -> list[torch.Tensor]:
        _, cache = model.run_with_cache(tokens)
        residuals = [cache["resid_post", layer] for layer in range(N_LAYERS)]
        return [model.unembed(model.ln_final(residual)) for residual in residuals]

    assert_agrees(lens(model), lens(reference), home_of(model))


@pytest.mark.fails_unpatched
def test_caching_hooks_of_ones_own(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    """`get_caching_hooks` with `hooks()`, as in TransformerLens's attribution patching demo."""

    def run(model: Any) -> dict[str, torch.Tensor]:
        cache, forward, backward = model.get_caching_hooks(
            lambda name: "resid" in name, incl_bwd=True
        )
        with model.hooks(fwd_hooks=forward, bwd_hooks=backward):
            model(tokens, return_type="loss").backward()
        return cache

    assert_agrees(run(model), run(reference), home_of(model))


def test_a_cache_that_the_user_brings_holds_plain_tensors_where_they_were_computed(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    _, expected = reference.run_with_cache(tokens)
    mine: dict[str, torch.Tensor] = {}

    cache, forward, _ = model.get_caching_hooks(cache=mine)
    with model.hooks(fwd_hooks=forward):
        model(tokens)

    assert cache is mine
    assert_agrees(mine, dict(expected.items()))
    name = "blocks.4.hook_resid_post"
    assert mine[name].device == model.placement.device_of(name) != home_of(model)
