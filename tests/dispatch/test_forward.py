"""A model over several devices gives what it gives on one: kinds that tests/surface has not."""

import pytest
import torch
from comparison import assert_agrees
from devices import device
from hf_models import N_LAYERS, padded
from kinds import home_of, new_kv_cache
from offloads import assert_at_rest
from packaging.version import Version
from parameters import in_turn
from runs_of_users import GREEDY

from tl_devicefix.monkeypatch.versions import installed

pytestmark = pytest.mark.hooked

SENTENCES = ["w5 w6 w7", "w8 w9 w10 w11 w12 w13"]
ANYWAY = [("llama", 1), ("llama", "some of three devices"), ("gpt2", "scattered")]
FAILS = [("llama", 4), ("gpt2", 3), ("bloom", 4), ("unfolded pythia", 3), ("attention-only", 4)]
FAILS = [pytest.param(*where, marks=pytest.mark.fails_unpatched) for where in FAILS]


def from_layer_to_layer(model, tokens):
    mask = padded(tokens).to(home_of(model))
    residual = model(tokens, attention_mask=mask, stop_at_layer=1)
    return residual, model(residual, attention_mask=mask, start_at_layer=1, stop_at_layer=-1)


def in_pieces(model, tokens):
    """A prompt in pieces; then continuations of its frozen prefix."""
    cache, frozen = (new_kv_cache(model, len(tokens)) for _ in range(2))
    pieces = [model(piece, past_kv_cache=cache) for piece in tokens.split([4, 1, 4], dim=1)]
    model(tokens[:, :5], past_kv_cache=frozen)
    frozen.freeze()
    return pieces, [model(tokens[:, 5:] + i, past_kv_cache=frozen) for i in range(2)]


def left_padded_in_pieces(model, tokens):
    cache = new_kv_cache(model, batch_size=2)
    first = model(SENTENCES, padding_side="left", past_kv_cache=cache)
    return first, model(tokens[:, :2], past_kv_cache=cache)


def sampled(model, tokens):
    torch.manual_seed(0)
    sampling = {"do_sample": True, "top_k": 5, "temperature": 0.5, "freq_penalty": 2.0}
    return model.generate(SENTENCES, padding_side="left", **{**GREEDY, **sampling})


CALLS = {
    "a mask": lambda model, tokens: model(tokens, attention_mask=padded(tokens).to(home_of(model))),
    "text": lambda model, tokens: model(SENTENCES, return_type="both", padding_side="right"),
    **{
        call.__name__.replace("_", " "): call
        for call in (from_layer_to_layer, in_pieces, left_padded_in_pieces, sampled)
    },
}


@pytest.mark.parametrize(
    ("call", "kind", "spread"), [*in_turn(CALLS, ANYWAY), *in_turn(CALLS, FAILS)]
)
def test_each_call_gives_one_devices_results_at_home(call, model, reference, tokens):
    """TransformerLens's issues 837, 872 and 1260 too: five layers are not a multiple of 3 or 4."""
    expected = CALLS[call](reference, tokens)
    assert_agrees(CALLS[call](model, tokens), expected, home_of(model))
    if hasattr(model, "placement"):  # or it is a toy on one device
        assert_at_rest(model)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("where", ["cpu", device(3)])
def test_inputs_may_come_from_any_device(where, model, reference, tokens):
    mask = padded(tokens)

    def run(model, where):
        moved, residual = tokens.to(where), reference(tokens, stop_at_layer=3).to(where)
        layers = {"start_at_layer": 3, "return_type": "both"}
        return [
            model(moved, return_type="both"),
            model(moved[0], return_type="both"),
            model(moved, attention_mask=mask.to(where)),
            model(residual, tokens=moved, **layers),
            model.loss_fn(model(moved), moved, per_token=True),
            # Until 3.7, TransformerLens wants these tokens where the logits are, on one device too.
            model.generate(
                moved.to(home_of(model)) if installed() < Version("3.7") else moved,
                freq_penalty=1.0,
                **GREEDY,
            ),
        ]

    expected = run(reference, "cpu")

    assert_agrees(run(model, where), expected, home_of(model))


@pytest.mark.parametrize("spread", [4, "some of three devices"])
def test_keys_and_values_are_kept_where_their_block_is(model, tokens):
    kv_cache = new_kv_cache(model, batch_size=len(tokens))
    planned = [model.placement.device_of(f"blocks.{i}") for i in range(N_LAYERS)]
    for _ in ("empty", "filled"):
        assert [entry.past_keys.device for entry in kv_cache.entries] == planned
        assert [entry.past_values.device for entry in kv_cache.entries] == planned
        model(tokens, past_kv_cache=kv_cache)
