"""Folded weights in 16 bits are the exactly folded ones, rounded once, and they lie as stored."""

from itertools import product

import pytest
import torch
from architectures import NO_PROCESSING
from hf_models import GROUPED, make_hf_model, save_checkpoint
from model_classes import HookedTransformer
from parameters import in_turn
from transformers import GemmaConfig

pytestmark = [pytest.mark.hooked, pytest.mark.usefixtures("hub")]  # so that nothing is fetched

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def load(hf_models, load):
    """`load("gpt2", torch.float64, torch.bfloat16)`: in float64, from weights in bfloat16.

    In float64, the live model is it too, with the weights rounded first.
    """

    def load_stored(name, dtype, stored, **options):
        dtypes = (stored, torch.float64) if dtype == torch.float64 else (stored,)
        return load(name, hf_model=hf_models(name, *dtypes), dtype=dtype, **options)

    return load_stored


# --------------------------------------------------------------------------------------------
# Rounded once


def last_place(values, dtype):
    """The distance between neighbours in `dtype` around each of the float64 values."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(values, info.eps, dtype=torch.float64), exponent)


def rounded(exact, dtype):
    """Float64 values rounded to 16 bits, still in float64.

    By hand: torch converts float64 to 16 bits by way of float32, which rounds twice.
    """
    unit = last_place(exact, dtype)
    return torch.round(exact / unit) * unit


def units_off(tensor, exact):
    """How far each entry is from the exact one rounded, in units in the last place."""
    expected, tensor_64 = rounded(exact, tensor.dtype), tensor.double()
    larger = torch.maximum(expected.abs(), tensor_64.abs())
    return (tensor_64 - expected).abs() / last_place(larger, tensor.dtype)


def assert_rounded_once(model, exact):
    """At least 99.9 % of a model's entries are the exact ones rounded, the rest their neighbours.

    Folding in float32 leaves an error of some 2**-24, which moves an exact value across the middle
    between two neighbours once in a few thousand times.
    """
    expected = dict(exact.named_parameters())
    n_entries = n_different = 0
    for name, parameter in model.named_parameters():
        # TransformerLens keeps experts, and Apertus's alphas, in float32.
        if parameter.dtype == torch.float32:
            torch.testing.assert_close(
                parameter.double().cpu(), expected[name].double(), rtol=1e-6, atol=1e-6
            )
            continue
        off = units_off(parameter.detach().cpu(), expected[name].detach())
        assert off.max() <= 1, f"{name}: {off.max()} units"
        n_entries += off.numel()
        n_different += int((off > 0).sum())
    assert n_different <= 0.001 * n_entries, f"{n_different} of {n_entries}"


NAMES = ("gpt2", "qwen2", "mixtral", "gemma-2", "pythia", "bloom", "gpt-oss")
NAMES += (pytest.param("apertus", marks=pytest.mark.full("as Mixtral's experts")),)
FORMS = ("hf_model", "checkpoint")
STORED_AND_LOADED = [
    *((dtype, dtype) for dtype in DTYPES),
    *product([torch.float32], DTYPES),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(
    ("name", "form", "stored", "dtype"), in_turn(NAMES, FORMS, STORED_AND_LOADED)
)
def test_every_folded_weight_is_the_exact_one_rounded_once(
    name, form, stored, dtype, load, checkpoints, machine
):
    """TransformerLens lets transformers round it first, and rounds the folded weights again."""
    exact = load(name, torch.float64, stored, device="cpu")

    if form == "checkpoint":
        named = str(dtype).removeprefix("torch.")
        path = checkpoints(name, stored)
        model = HookedTransformer.from_pretrained(path, dtype=named, n_devices=3)
    else:
        model = load(name, dtype, stored, n_devices=3)

    assert model.cfg.dtype == model.W_E.dtype == model.W_U.dtype == dtype
    assert_rounded_once(model, exact)


@pytest.mark.parametrize(("name", "dtype"), in_turn(["gpt2", "gemma-2"], DTYPES))
def test_unprocessed_weights_of_the_stored_dtype_are_not_rounded(name, dtype, load, machine):
    exact = load(name, torch.float64, dtype, device="cpu", **NO_PROCESSING)

    model = load(name, dtype, dtype, n_devices=3, **NO_PROCESSING)

    expected = dict(exact.named_parameters())
    for key, parameter in model.named_parameters():
        # A Gemma's embedding is scaled and its norms have 1 added: these are rounded.
        assert (units_off(parameter.detach().cpu(), expected[key].detach()) == 0).all(), key


def test_a_gemma_s_embedding_is_scaled_in_the_dtype_asked_for(tokenizer, tmp_path):
    config = GemmaConfig(**{**GROUPED, "hidden_size": 24}, head_dim=8)  # no square, as 16 is
    hf_model = make_hf_model(config, torch.bfloat16)
    save_checkpoint(hf_model, tokenizer, tmp_path)

    model = HookedTransformer.from_pretrained(tmp_path, device="cpu", **NO_PROCESSING)

    expected = hf_model.get_input_embeddings().weight.float() * 24**0.5
    torch.testing.assert_close(model.W_E, expected, rtol=1e-6, atol=0)


# --------------------------------------------------------------------------------------------
# Laid out as stored


def test_loaded_weights_keep_their_stored_memory_layout(load, checkpoints, machine):
    """TransformerLens shows most matrices transposed, and transposes them back to use them."""
    live = load("qwen2", torch.float32, torch.float32, n_devices=3)
    path, options = checkpoints("qwen2"), NO_PROCESSING
    for model in (live, HookedTransformer.from_pretrained(path, n_devices=3, **options)):
        assert model.W_E.is_contiguous()
        assert model.W_U.T.is_contiguous()
        for block in model.blocks:
            attn, mlp = block.attn, block.mlp
            of_heads = [w.transpose(1, 2) for w in (attn.W_Q, attn._W_K, attn._W_V)]
            of_linear = [mlp.W_in.T, mlp.W_gate.T, mlp.W_out.T, attn.W_O.permute(2, 0, 1)]
            assert all(weight.is_contiguous() for weight in (*of_heads, *of_linear))
