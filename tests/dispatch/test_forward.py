"""`model(...)` over several devices returns what it does on one, at home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees
from hf_models import N_LAYERS
from kinds import KINDS, every_kind, everywhere, home_of, new_kv_cache

SENTENCES = ["w5 w6 w7", "w8 w9 w10 w11 w12 w13"]


@pytest.mark.cover(("kind", "fails_unpatched"))
@everywhere
def test_logits_and_loss(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    expected = reference(tokens, return_type="both")

    actual = model(tokens, return_type="both")

    assert type(actual) is type(expected)  # an Output, with .logits and .loss
    assert_agrees(actual, expected, home_of(model))


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("loss_per_token", [False, True])
@pytest.mark.parametrize("return_type", ["logits", "loss", "both", None])
def test_every_return_type(
    return_type: str | None, loss_per_token: bool, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    options = {"return_type": return_type, "loss_per_token": loss_per_token}

    assert_agrees(model(tokens, **options), reference(tokens, **options), home_of(model))


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("where", ["cpu", "sim:0", "sim:3"])
@pytest.mark.parametrize("shape", ["batch", "one-dimensional"])
def test_tokens_may_come_from_any_device(
    shape: str, where: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    tokens = tokens if shape == "batch" else tokens[0]

    actual = model(tokens.to(where), return_type="both")

    assert_agrees(actual, reference(tokens, return_type="both"), home_of(model))


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("prepend_bos", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_string(prepend_bos: bool, model: Any, reference: Any) -> None:
    options = {"return_type": "both", "prepend_bos": prepend_bos}

    actual = model(SENTENCES[0], **options)

    assert_agrees(actual, reference(SENTENCES[0], **options), home_of(model))


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("padding_side", ["left", "right"])
@every_kind
def test_strings_are_padded_on_either_side(padding_side: str, model: Any, reference: Any) -> None:
    options = {"return_type": "both", "padding_side": padding_side}

    actual = model(SENTENCES, **options)

    assert_agrees(actual, reference(SENTENCES, **options), home_of(model))


@pytest.mark.cover
@everywhere
def test_an_attention_mask(
    model: Any, reference: Any, tokens: torch.Tensor, mask: torch.Tensor
) -> None:
    expected = reference(tokens, attention_mask=mask, return_type="both")

    actual = model(tokens, attention_mask=mask, return_type="both")

    assert_agrees(actual, expected, home_of(model))


@pytest.mark.parametrize("where", ["sim:0", "sim:3"])
def test_an_attention_mask_may_come_from_any_device(
    where: str, model: Any, reference: Any, tokens: torch.Tensor, mask: torch.Tensor
) -> None:
    expected = reference(tokens, attention_mask=mask, return_type="both")

    actual = model(tokens, attention_mask=mask.to(where), return_type="both")

    assert_agrees(actual, expected, home_of(model))


@pytest.mark.parametrize("spread", [2])
def test_a_mask_that_a_hook_edits_between_blocks(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    def run(model: Any) -> torch.Tensor:
        mask = torch.ones_like(tokens, device=model.cfg.device)

        def pad(value: torch.Tensor, hook: Any) -> None:
            mask[0, :2] = 0

        name = f"blocks.{N_LAYERS - 2}.hook_resid_post"
        logits: torch.Tensor = model.run_with_hooks(
            tokens, attention_mask=mask, fwd_hooks=[(name, pad)]
        )
        return logits

    assert_agrees(run(model), run(reference), home_of(model))


@pytest.mark.cover
@pytest.mark.parametrize("layer", [0, 1, 3, N_LAYERS, -1])
@pytest.mark.parametrize(("kind", "spread"), [("gpt2", 4), ("bloom", "scattered")])
def test_stopping_at_a_layer_returns_the_residual_stream_at_home(
    layer: int, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    expected = reference(tokens, stop_at_layer=layer)

    assert_agrees(model(tokens, stop_at_layer=layer), expected, home_of(model))


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("where", ["cpu", "sim:0", "sim:3"])
@pytest.mark.parametrize("layer", [0, 1, 3, -1])
def test_starting_at_a_layer_takes_a_residual_stream_from_any_device(
    layer: int, where: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    residual = reference(tokens, stop_at_layer=layer)
    options = {"start_at_layer": layer, "return_type": "both"}
    expected = reference(residual, tokens=tokens, **options)

    actual = model(residual.to(where), tokens=tokens.to(where), **options)

    assert_agrees(actual, expected, home_of(model))


@pytest.mark.cover
@everywhere
def test_running_from_one_layer_to_another_with_a_mask(
    model: Any, reference: Any, tokens: torch.Tensor, mask: torch.Tensor
) -> None:
    residual = reference(tokens, attention_mask=mask, stop_at_layer=1)
    layers = {"start_at_layer": 1, "stop_at_layer": 4}
    expected = reference(residual, attention_mask=mask, **layers)
    home = home_of(model)

    actual = model(residual, attention_mask=mask.to(home), **layers)

    assert_agrees(actual, expected, home)


@pytest.mark.cover
@everywhere
def test_a_prompt_in_pieces_with_a_kv_cache(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    expected = reference(tokens)

    kv_cache = new_kv_cache(model, batch_size=len(tokens))
    pieces = [model(piece, past_kv_cache=kv_cache) for piece in tokens.split([4, 1, 4], dim=1)]

    assert_agrees(torch.cat(pieces, dim=1), expected, home_of(model))


def test_keys_and_values_are_kept_where_their_block_is(model: Any, tokens: torch.Tensor) -> None:
    kv_cache = new_kv_cache(model, batch_size=len(tokens))
    empty = [(entry.past_keys.device, entry.past_values.device) for entry in kv_cache.entries]

    model(tokens, past_kv_cache=kv_cache)

    filled = [(entry.past_keys.device, entry.past_values.device) for entry in kv_cache.entries]
    planned = [model.placement.device_of(f"blocks.{i}") for i in range(N_LAYERS)]
    assert empty == filled == [(device, device) for device in planned]


@pytest.mark.fails_unpatched
@every_kind
def test_a_left_padded_prompt_in_pieces_with_a_kv_cache(model: Any, reference: Any) -> None:
    def run(model: Any) -> torch.Tensor:
        kv_cache = new_kv_cache(model, batch_size=2)
        first = model(SENTENCES, padding_side="left", past_kv_cache=kv_cache)
        then = torch.tensor([[20, 21], [22, 23]])
        return torch.cat([first, model(then, past_kv_cache=kv_cache)], dim=1)

    assert_agrees(run(model), run(reference), home_of(model))


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_a_frozen_kv_cache_serves_many_continuations_of_one_prefix(
    model: Any, reference: Any, tokens: torch.Tensor, other_tokens: torch.Tensor
) -> None:
    prefix, *continuations = tokens[:, :5], tokens[:, 5:], other_tokens[:, 5:]
    expected = [reference(torch.cat([prefix, more], dim=1))[:, 5:] for more in continuations]

    kv_cache = new_kv_cache(model, batch_size=len(tokens))
    model(prefix, past_kv_cache=kv_cache)
    kv_cache.freeze()
    actual = [model(more, past_kv_cache=kv_cache) for more in continuations]

    assert kv_cache[3].past_keys.shape[1] == prefix.shape[1]
    assert_agrees(actual, expected, home_of(model))


@every_kind
def test_bfloat16(
    kind: str, load: Any, from_pretrained: Any, toys: Any, tokens: torch.Tensor
) -> None:
    if kind == "attention-only":
        model, reference = load(kind).to(torch.bfloat16), toys("cpu", 1).to(torch.bfloat16)
    else:
        options = {"dtype": torch.bfloat16, **KINDS[kind].options}
        reference = from_pretrained(KINDS[kind].name, device="cpu", **options)
        model = load(kind, **options)

    logits = model(tokens)

    assert logits.dtype == reference(tokens).dtype
    assert_agrees(logits, reference(tokens), home_of(model))


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_fn_takes_the_tokens_from_any_device(
    per_token: bool, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    expected = reference.loss_fn(reference(tokens), tokens, per_token=per_token)

    actual = model.loss_fn(model(tokens), tokens, per_token=per_token)

    assert_agrees(actual, expected, home_of(model))
