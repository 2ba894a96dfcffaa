"""With "sdpa", a Bridge's blocks to which nobody listens build no pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attending import ShapesMade, installed, padded, with_gradients
from comparison import assert_agrees
from hf_models import N_LAYERS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

pytestmark = [
    pytest.mark.skipif(has_hooked_transformer(), reason="a Bridge of TransformerLens 4"),
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
]

ITS_OWN_WAY = "in its own way"
AS_INSTALLED = {
    "gemma-2": "soft cap",
    "gpt-oss": "attention sinks",
    **dict.fromkeys(("bloom", "gpt-neo", "gpt-j"), ITS_OWN_WAY),
}
"""Architecture -> why its blocks take the installed path."""
SDPA = ["llama", "qwen2", "gpt2", "mixtral", "pythia", "gemma", "gemma-3", "phi", "phi-3"]
SDPA += ["mistral", "qwen3", "olmo", "olmo-2", "olmoe", "apertus", "opt"]


@pytest.mark.parametrize("name", [*SDPA, *AS_INSTALLED])
def test_logits_and_gradients(
    name: str, sdpa: Any, tokens: torch.Tensor, fused_blocks: list[int]
) -> None:
    bridge, run = sdpa(name, compatible=False), with_gradients(tokens)
    expected = installed(bridge, run)
    assert not fused_blocks

    actual = run(bridge)

    implementations = tl_devicefix.set_attn_implementation(bridge).blocks.values()
    if name in AS_INSTALLED:
        assert all(AS_INSTALLED[name] in reason for reason in implementations)
        assert not fused_blocks
        assert_agrees(actual, expected, tolerance=0)
    else:
        assert set(implementations) == {"sdpa"}
        assert len(fused_blocks) == N_LAYERS
        assert_agrees(actual, expected)


@pytest.mark.cover
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_padding(
    name: str, compatible: bool, sdpa: Any, tokens: torch.Tensor, fused_blocks: list[int]
) -> None:
    bridge, mask = sdpa(name, compatible=compatible), padded(tokens)
    run = with_gradients(tokens, attention_mask=mask)

    assert_agrees(run(bridge), installed(bridge, run))
    with torch.no_grad():
        expected = installed(bridge, lambda bridge: bridge(tokens, attention_mask=mask))
        fused_blocks.clear()
        assert_agrees(bridge(tokens, attention_mask=mask), expected)
    assert len(fused_blocks) == N_LAYERS


OUTER = ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post")
OTHERS = pytest.mark.full("dozens of forwards and backwards each; in the default run, of one")


@pytest.mark.parametrize(
    ("name", "compatible"),
    [
        ("llama", True),
        pytest.param("llama", False, marks=OTHERS),
        *(
            pytest.param(name, compatible, marks=OTHERS)
            for name in (*SDPA[1:], *AS_INSTALLED)
            for compatible in (False, True)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Backward hooks on hook_scale:UserWarning")
def test_each_hook_point_listened_to_in_turn(
    name: str, compatible: bool, sdpa: Any, tokens: torch.Tensor, fused_blocks: list[int]
) -> None:
    bridge = sdpa(name, compatible=compatible)
    points = [point for point in bridge.run_with_cache(tokens)[1] if "blocks.0." in point]
    for hook in points:
        if name == "olmo" and ".ln" in hook:
            continue  # TransformerLens fails to take a backward hook of a norm without a weight

        def listening(bridge: Any, hook: str = hook) -> tuple[Any, Any]:
            """What the hook point sees forward and backward; gradients of the weights."""
            options = {"names_filter": hook, "return_type": "loss", "incl_bwd": True}
            _, cache = bridge.run_with_cache(tokens, **options)
            gradients = [parameter.grad for parameter in bridge.parameters()]
            bridge.zero_grad(set_to_none=True)
            return dict(cache.items()), gradients

        expected, expected_gradients = installed(bridge, listening)
        fused_blocks.clear()

        seen, gradients = listening(bridge)

        is_within = hook not in ("blocks.0.hook_in", "blocks.0.hook_out", *OUTER)
        goes_without = name not in AS_INSTALLED
        assert len(fused_blocks) == (N_LAYERS - is_within if goes_without else 0)
        tolerance = 0 if hook == "blocks.0.hook_in" or not goes_without else 1e-5
        assert_agrees(seen.pop(hook), expected.pop(hook), tolerance=tolerance)
        assert_agrees([seen, gradients], [expected, expected_gradients])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate(name: str, sdpa: Any, tokens: torch.Tensor, fused_blocks: list[int]) -> None:
    bridge = sdpa(name, compatible=False)
    options = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False}

    def run(bridge: Any) -> Any:
        return bridge.generate(tokens, **options)

    assert_agrees(run(bridge), installed(bridge, run))
    assert len(fused_blocks) == 4 * N_LAYERS


LONG = torch.full((1, 29), 7)
"""As many tokens as no other size is."""


def test_booted_so_over_several_devices(
    machine: Any, boot: Any, bridge_references: Any, fused_blocks: list[int]
) -> None:
    bridge = boot("llama", n_devices=4, attn_implementation="sdpa")

    with ShapesMade() as made:
        actual = bridge(LONG.to("sim:0"))

    assert len(fused_blocks) == N_LAYERS
    assert not made.of_pairs(29)
    assert_agrees(actual, bridge_references("llama", compatible=False)(LONG), machine.devices[0])


@pytest.mark.cover
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "pythia"])
def test_nothing_of_every_query_and_key_is_made(name: str, compatible: bool, sdpa: Any) -> None:
    bridge, run = sdpa(name, compatible=compatible), with_gradients(LONG)

    with ShapesMade() as made:
        run(bridge)
    with ShapesMade() as as_installed:
        installed(bridge, run)

    assert not made.of_pairs(29)
    assert {(1, 1, 29, 29), (1, 4, 29, 29)} <= set(as_installed.of_pairs(29))


@torch.no_grad()
def test_a_block_that_listens_has_the_mask_built(sdpa: Any) -> None:
    bridge = sdpa("llama", compatible=False)
    name = "blocks.0.attn.hook_pattern"

    with ShapesMade() as made:
        _, cache = bridge.run_with_cache(LONG, names_filter=name)

    assert (1, 1, 29, 29) in made.of_pairs(29)
    expected = installed(bridge, lambda bridge: bridge.run_with_cache(LONG, names_filter=name))
    assert_agrees(cache[name], expected[1][name], tolerance=0)


@torch.no_grad()
def test_a_cache_of_the_residual_stream_makes_nothing_of_every_query_and_key(sdpa: Any) -> None:
    bridge = sdpa("llama", compatible=True)
    bridge.run_with_cache(LONG)  # some hooks of transformers' are there from now on

    with ShapesMade() as made:
        _, cache = bridge.run_with_cache(LONG, names_filter=lambda name: "hook_resid_p" in name)

    assert len(cache) == 2 * N_LAYERS
    assert not made.of_pairs(29)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_a_block_that_listens_behind_a_kv_cache(name: str, sdpa: Any, tokens: torch.Tensor) -> None:
    bridge = sdpa(name, compatible=False)

    def run(bridge: Any) -> Any:
        hooks = [("blocks.1.attn.hook_z", lambda value, hook: value * 2)]
        with bridge.hooks(fwd_hooks=hooks):
            first, cache = bridge(tokens, return_type="logits_and_cache")
            second = bridge(tokens[:, :3], past_key_values=cache)
            return first, second, bridge(tokens[:, 3:4], past_key_values=cache)

    assert_agrees(run(bridge), installed(bridge, run))


def test_a_function_for_masks_of_a_user_s_own(sdpa: Any, tokens: torch.Tensor) -> None:
    bridge = sdpa("llama", compatible=False)
    original = ALL_MASK_ATTENTION_FUNCTIONS["eager"]

    def everything(**options: Any) -> torch.Tensor:
        return torch.zeros_like(original(**options))

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = everything
    try:
        actual, expected = bridge(tokens), installed(bridge, lambda bridge: bridge(tokens))
        assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is everything
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]

    assert_agrees(actual, expected)
    assert not torch.allclose(actual, bridge(tokens))
