"""With "sdpa", blocks to which nobody listens build no pattern, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attending import ShapesMade, installed, with_gradients
from comparison import assert_agrees
from hf_models import N_CTX, N_LAYERS, padded
from kinds import GREEDY, home_of
from torch.nn.modules.module import register_module_forward_hook

import tl_devicefix


@pytest.mark.parametrize("of_all_modules", [False, True])
def test_pytorch_s_own_hooks_see_what_was_installed(of_all_modules, sdpa, tokens):
    def run(model):
        seen: list[Any] = []
        attentions = [block.attn for block in model.blocks]
        points = [p for attn in attentions for p in (attn.hook_pattern, attn.hook_attn_scores)]
        if of_all_modules:
            look = lambda module, _, value: seen.append(value.sum()) if module in points else None  # noqa: E731
            handles = [register_module_forward_hook(look)]
        else:
            before = lambda _, args: seen.append(args[0].sum())  # noqa: E731
            handles = [point.register_forward_pre_hook(before) for point in points]
        try:
            return with_gradients(tokens)(model), seen
        finally:
            for handle in handles:
                handle.remove()

    model = sdpa("llama")
    actual = run(model)

    assert actual[1]
    assert_agrees(actual, installed(model, run), tolerance=0)


@pytest.mark.parametrize(
    ("kind", "option", "n_fused"),
    [
        *(("llama", "use_attn_result", 0), ("llama", "use_split_qkv_input", 0)),
        *(("gpt2", "use_attn_in", 0), ("llama", "ungroup_grouped_query_attention", N_LAYERS)),
    ],
)
def test_options_of_a_model(kind, option, n_fused, sdpa, tokens, fused_blocks):
    model, run = copy.deepcopy(sdpa(kind)), with_gradients(tokens)
    getattr(model, f"set_{option}")(True)
    assert_agrees(run(model), installed(model, run))
    assert len(fused_blocks) == n_fused


def test_what_is_changed_by_hand(on_cpu, tokens):
    for name, value in (
        ("mask", torch.ones(N_CTX, N_CTX, dtype=torch.bool)),  # only TransformerLens 2 reads it
        *(("IGNORE", torch.tensor(-1.0)), ("hook_pattern", torch.nn.Dropout(p=1.0))),
        ("attn_scale", torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None]),
    ):
        model = copy.deepcopy(on_cpu("llama"))
        unchanged = model(tokens)
        setattr(model.blocks[1].attn, name, value)

        expected = model(tokens)

        assert name == "mask" or not torch.allclose(expected, unchanged), name
        with tl_devicefix.set_attn_implementation(model, "sdpa"):
            assert_agrees(model(tokens), expected)


def test_transforms_of_functions_take_the_installed_path(sdpa):
    block = sdpa("llama").blocks[0]
    residual = torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(0))

    def run(block):
        return [
            torch.func.grad(lambda x: block(x).sum())(residual[0]),
            torch.func.jvp(block, (residual[0],), (residual[1],)),
            torch.func.vmap(block)(residual),
        ]

    actual = run(block)

    with tl_devicefix.set_attn_implementation(block, "eager"):
        assert_agrees(actual, run(block), tolerance=0)


@pytest.mark.parametrize(("kind", "spread"), [("llama", 4), ("bloom", "some of one device")])
def test_forwards_and_generated_text(model, reference, tokens, machine, fused_blocks):
    mask, greedy = padded(tokens), {**GREEDY, "max_new_tokens": 6}

    def run(model):
        text = model.generate(tokens.to(home_of(model)), **greedy)
        return [model(tokens), model(tokens, attention_mask=mask), text]

    with tl_devicefix.set_attn_implementation(model, "sdpa"):
        actual = run(model)

    assert len(fused_blocks) == 8 * N_LAYERS
    assert_agrees(actual, run(reference), home_of(model))


@pytest.mark.parametrize(("name", "is_padded"), [("llama", True), ("mistral", False)])
def test_a_mask_is_made_once_for_all_blocks(name, is_padded, sdpa):
    tokens = torch.full((1, 29), 7)
    options = {"attention_mask": padded(tokens)} if is_padded else {}
    model = sdpa(name)
    with ShapesMade() as made, torch.no_grad():
        model(tokens, **options)
    made_for_masks = [n for name, n in made.operations.items() if name == "aten.le.Tensor"]
    assert made_for_masks in ([1], [])  # TransformerLens 2 keeps one


def test_for_a_while(on_cpu, tokens, fused_blocks):
    model = on_cpu("gpt2")
    before = model(tokens)

    with tl_devicefix.set_attn_implementation(model, "sdpa"):
        with tl_devicefix.set_attn_implementation(model, "eager"):
            assert_agrees(model(tokens), before, tolerance=0)
        model(tokens)
        assert len(fused_blocks) == N_LAYERS
    with pytest.raises(IndexError), tl_devicefix.set_attn_implementation(model, "sdpa"):
        model(tokens + 1000)

    assert_agrees(model(tokens), before, tolerance=0)
    assert len(fused_blocks) == N_LAYERS
    assert set(tl_devicefix.set_attn_implementation(model).blocks.values()) == {"eager"}


def test_a_run_in_flight_attends_as_its_own_view_does(sdpa, tokens, fused_blocks):
    model = sdpa("gpt2")

    def run(view, way):
        tl_devicefix.set_attn_implementation(view, way)
        return view(tokens)

    for _ in tl_devicefix.pipeline_map(model, run, ["eager", "sdpa", "eager"]):
        pass

    assert len(fused_blocks) == N_LAYERS
    assert set(tl_devicefix.set_attn_implementation(model).blocks.values()) == {"sdpa"}


def test_what_is_in_the_way_is_said(on_cpu, tokens, fused_blocks):
    model = copy.deepcopy(on_cpu("llama"))
    model.blocks[1].attn.IGNORE = torch.tensor(-1e5)
    model.add_hook("blocks.3.attn.hook_pattern", lambda value, hook: None)
    implementations = tl_devicefix.set_attn_implementation(model, "sdpa")
    lines = repr(implementations).splitlines()
    assert lines[1] == "blocks.1.attn  eager: its IGNORE is not minus infinity"
    assert lines[2] == "blocks.2.attn  sdpa"
    assert lines[3] == "blocks.3.attn  eager: hook_pattern has hooks"
    with tl_devicefix.disabled():
        model(tokens)
        assert not fused_blocks
        assert implementations.blocks["blocks.2.attn"] == "eager: TransformerLens is unpatched"
        with pytest.raises(RuntimeError, match=r"call tl_devicefix\.enable"):
            tl_devicefix.set_attn_implementation(model, "sdpa")


def test_a_way_that_is_not_there(on_cpu, from_pretrained):
    with pytest.raises(ValueError, match="attn_implementation must be 'sdpa' or 'eager', but"):
        tl_devicefix.set_attn_implementation(on_cpu("gpt2"), "spda")
    with pytest.raises(ValueError, match="must be 'sdpa' or 'eager', but is 'flash'"):
        from_pretrained("gpt2", attn_implementation="flash")
    with pytest.raises(ValueError, match="no module of the Linear attends"):
        tl_devicefix.set_attn_implementation(torch.nn.Linear(1, 1), "sdpa")
