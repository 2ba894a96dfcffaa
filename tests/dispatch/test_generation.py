"""`generate` and `generate_stream` over several devices write what they do on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees
from kinds import every_kind, home_of, on_one_device
from transformer_lens import HookedTransformer

SENTENCES = ["w5 w6 w7", "w8 w9 w10 w11 w12 w13"]
GREEDY = {"do_sample": False, "stop_at_eos": False}
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "temperature": {"temperature": 0.5},
    "freq_penalty": {"freq_penalty": 2.0},
}


def generate(model: Any, prompt: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(prompt, **{"max_new_tokens": 4, "verbose": False, **options})


@pytest.mark.cover(("kind", "use_past_kv_cache"))
@pytest.mark.parametrize("use_past_kv_cache", [True, False])
@pytest.mark.parametrize("spread", [3, "scattered"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "unfolded pythia"])
def test_tokens(use_past_kv_cache: bool, model: Any, reference: Any, tokens: torch.Tensor) -> None:
    options = {"use_past_kv_cache": use_past_kv_cache, **GREEDY}

    actual = generate(model, tokens.to(home_of(model)), **options)

    assert_agrees(actual, generate(reference, tokens, **options), home_of(model))


@pytest.mark.parametrize("where", ["cpu", "sim:0", "sim:3"])
def test_a_prompt_from_any_device(
    where: str, model: Any, models: Any, reference: Any, tokens: torch.Tensor
) -> None:
    options = {"freq_penalty": 1.0, "stop_at_eos": False}
    on_one_device(generate, models("llama", 1), tokens.to(where), **options)

    actual = generate(model, tokens.to(where), **options)

    assert_agrees(actual, generate(reference, tokens, **options), home_of(model))


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("use_past_kv_cache", [True, False])
@every_kind
def test_strings_of_unequal_length_are_padded_on_the_left(
    use_past_kv_cache: bool, model: Any, reference: Any
) -> None:
    options = {"padding_side": "left", "use_past_kv_cache": use_past_kv_cache, **GREEDY}

    texts = generate(model, SENTENCES, **options)

    assert all(text.startswith(sentence) for text, sentence in zip(texts, SENTENCES))
    assert texts == generate(reference, SENTENCES, **options)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("return_type", ["str", "tokens", "embeds"])
def test_a_string_and_every_return_type(return_type: str, model: Any, reference: Any) -> None:
    options = {"return_type": return_type, **GREEDY}

    actual = generate(model, SENTENCES[0], **options)

    assert_agrees(actual, generate(reference, SENTENCES[0], **options), home_of(model))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_of_embeddings(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    options = {"return_type": "tokens", **GREEDY}

    actual = generate(model, model.embed(tokens), **options)

    assert_agrees(actual, generate(reference, reference.embed(tokens), **options), home_of(model))


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_sampling_with_a_seed(
    sampling: dict[str, Any], model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    expected = generate(reference, tokens, stop_at_eos=False, **sampling)

    actual = generate(model, tokens.to(home_of(model)), stop_at_eos=False, **sampling)

    assert_agrees(actual, expected, home_of(model))


def test_finished_sequences_are_padded_with_the_end_token(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    first_word = generate(reference, tokens, **GREEDY)[0, tokens.shape[1]].item()
    options = {"do_sample": False, "stop_at_eos": True, "eos_token_id": first_word}

    actual = generate(model, tokens.to(home_of(model)), **options)

    assert (actual[0, tokens.shape[1] :] == first_word).all()
    assert_agrees(actual, generate(reference, tokens, **options), home_of(model))


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bfloat16(use_past_kv_cache: bool, kind: str, load: Any, from_pretrained: Any) -> None:
    reference = from_pretrained(kind, dtype=torch.bfloat16, device="cpu")
    options = {"use_past_kv_cache": use_past_kv_cache, "padding_side": "left", **GREEDY}
    expected = on_one_device(generate, reference, SENTENCES, **options)

    model = load(kind, dtype=torch.bfloat16)

    assert generate(model, SENTENCES, **options) == expected


@pytest.mark.skipif(
    not hasattr(HookedTransformer, "generate_stream"),
    reason="this TransformerLens has no generate_stream",
)
class TestStream:
    @pytest.mark.parametrize("use_past_kv_cache", [True, False])
    @pytest.mark.parametrize("spread", [3, "scattered"])
    @pytest.mark.parametrize("kind", ["gpt2", "bloom"])
    def test_tokens_arrive_in_parts(
        self, use_past_kv_cache: bool, model: Any, reference: Any, tokens: torch.Tensor
    ) -> None:
        options = {"use_past_kv_cache": use_past_kv_cache, **GREEDY}

        actual = stream(model, tokens, **options)

        assert len(actual) > 1
        assert_agrees(actual, stream(reference, tokens, **options), home_of(model))

    def test_a_string_with_sampling(self, model: Any, reference: Any) -> None:
        options = {"top_k": 5, "freq_penalty": 1.0}

        actual = stream(model, SENTENCES[0], **options)

        assert_agrees(actual, stream(reference, SENTENCES[0], **options), home_of(model))


def stream(model: Any, prompt: Any, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(
        model.generate_stream(
            prompt, max_new_tokens=5, max_tokens_per_yield=2, verbose=False, **options
        )
    )
