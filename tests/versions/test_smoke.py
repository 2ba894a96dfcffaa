"""The first things that users do, with the installed TransformerLens: `nox -s versions`.

Each result is compared with what the same library gives unpatched, on one CPU.
"""

import pytest
from comparison import assert_agrees
from parameters import in_turn
from runs_of_users import GREEDY

import tl_devicefix

HOOK = "blocks.2.hook_resid_post"


def forward(model, tokens):
    return model(tokens)


def cache(model, tokens):
    return dict(model.run_with_cache(tokens)[1].items())


def hook(model, tokens):
    halve = (HOOK, lambda activation, hook: activation / 2)
    return model.run_with_hooks(tokens, fwd_hooks=[halve])


def generate(model, tokens):
    # An unpatched Bridge forgets its KV cache with transformers 5.24, so it generates without one.
    with_kv_cache = tl_devicefix.report().is_enabled
    return model.generate(tokens, use_past_kv_cache=with_kv_cache, **GREEDY)


def gradients(model, tokens):
    model.zero_grad()
    model(tokens, return_type="loss").backward()
    # An unpatched Bridge of TransformerLens 4.1 and 4.2 gives none to weights of a gated MLP.
    weights = {name: p for name, p in model.named_parameters() if ".mlp." not in name}
    return {name: p.grad for name, p in weights.items() if p.grad is not None}


# GPT-2: LayerNorm, absolute positions. Gemma 2: grouped heads, soft caps, windows, 4 norms.
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("kind", "n_devices", "home"),
    in_turn(["gemma-2", "gpt2"], [(4, "sim:0"), (1, "cpu")]),
)
def test_first_calls_give_what_unpatched_transformer_lens_gives(
    kind, n_devices, home, load, on_one, tokens
):
    model, reference = load(kind, n_devices, folded=True, device=home), on_one(kind, folded=True)
    for call in (forward, cache, hook, generate, gradients):
        with tl_devicefix.disabled():
            expected = call(reference, tokens)
        assert_agrees(call(model, tokens.to(home)), expected)
