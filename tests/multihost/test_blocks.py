"""A block of another rank that nobody looks into is run by one command, as it would be here."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_models import N_LAYERS
from kinds import KeyValueCacheEntry, new_kv_cache
from test_traffic import far_blocks, names
from torch import nn
from torch.nn.utils import parametrize
from transformer_lens.components import AbstractAttention

from tl_devicefix.multihost import peers
from tl_devicefix.multihost.commands import set_as, settings

FAR = N_LAYERS - 1
EQUAL = {"rtol": 0, "atol": 0}
ROUNDED = {"rtol": 1e-4, "atol": 1e-6}


def another_part_of_a_storage(block: Any) -> None:
    weight = block.mlp.W_in
    both = torch.stack([weight.detach(), weight.detach() * 2])
    weight.data = both[0]
    with torch.no_grad():
        block(torch.ones(1, 2, block.cfg.d_model, device=weight.device))
    weight.data = both[1]


def a_parameter(block: Any) -> None:
    block.mlp.W_in = nn.Parameter(block.mlp.W_in.detach() * 2)


def rectified_at_random(block: Any) -> None:
    block.mlp.act_fn = functools.partial(F.rrelu, lower=-1.0, upper=1.0, training=True)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a module": lambda block: setattr(block, "ln2", nn.Identity()),
    "a setting of one": lambda block: setattr(block.ln2, "eps", 1.0),
    "a setting of all": lambda block: setattr(block.cfg, "use_split_qkv_input", True),
    "a number": lambda block: setattr(block.attn, "attn_scale", 2 * block.attn.attn_scale),
    "values in place": lambda block: block.mlp.W_in.data.mul_(2),
    "a parameter": a_parameter,
    "another part of a storage": another_part_of_a_storage,
    "a function that draws": rectified_at_random,
    "a function of a user's": lambda block: setattr(block.mlp, "act_fn", lambda x: x.sigmoid()),
    "a hook of torch": lambda block: block.mlp.register_forward_hook(lambda *args: args[2] * 2),
    "a parametrization": lambda block: parametrize.register_parametrization(
        block.mlp, "W_in", nn.Softplus()
    ),
}


def after(change: Callable[[Any], object], model: Any, tokens: torch.Tensor) -> list[Any]:
    """What a model gives with a block that is changed, with and without gradients, and draws."""
    block = model.blocks[FAR]
    model(tokens)  # its rank has a copy of the block
    change(block)
    torch.manual_seed(0)
    with torch.no_grad():
        result = [model(tokens).cpu()]
    loss = model(tokens, return_type="loss")
    loss.backward()
    result += [loss.detach().cpu(), torch.rand(3)]
    return [result, [item.grad.cpu() for item in block.parameters() if item.grad is not None]]


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_by_hand_counts(what: str, model: Any, tokens: torch.Tensor) -> None:
    changed, alone = copy.deepcopy(model), copy.deepcopy(model).to("cpu")

    (result, gradients), expected = (
        after(CHANGES[what], item, tokens) for item in (changed, alone)
    )

    torch.testing.assert_close(result, expected[0])
    torch.testing.assert_close(gradients, expected[1], **ROUNDED)


def doubled(function: Any) -> Any:
    """A user's own, in the place of it and with its name."""

    @functools.wraps(function)
    def twice(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return twice


def louder(append: Any) -> Any:
    return lambda entry, keys, values: append(entry, keys * 2, values)


@pytest.mark.parametrize(
    ("of", "name", "replace"),
    [
        (AbstractAttention, "calculate_z_scores", doubled),
        (KeyValueCacheEntry, "append", louder),
        (F, "softmax", doubled),
        (torch.Tensor, "softmax", lambda _: lambda x, *args, **kwargs: x.sigmoid()),
    ],
)
def test_what_is_put_into_a_class_or_into_torch_counts(
    of: Any,
    name: str,
    replace: Any,
    model: Any,
    tokens: torch.Tensor,
    commands: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = copy.deepcopy(model).to("cpu")

    def logits(model: Any) -> torch.Tensor:
        return model(tokens, past_kv_cache=new_kv_cache(model, len(tokens))).cpu()

    with torch.no_grad():
        plain = logits(model)
        with monkeypatch.context() as replacing:
            replacing.setattr(of, name, replace(getattr(of, name)))
            commands.clear()
            changed = logits(model)
            torch.testing.assert_close(changed, logits(alone), **EQUAL)
        assert of is F or not torch.equal(changed, plain)
        assert "call" not in names(commands)  # of another rank, which lacks the change
        if of is torch.Tensor:  # by the others, blocks run as installed here too
            (text,) = caplog.messages
            assert text.startswith("torch.Tensor.softmax was replaced on this rank, but not on the")

        model(tokens)
        assert "call" in names(commands)


def test_what_a_forward_sets_in_a_block_is_set_here(
    load_over: Any, on_cpu: Any, tokens: torch.Tensor
) -> None:
    alone, model = on_cpu("bloom"), load_over("bloom")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).cpu(), alone(tokens))

    expected = alone.blocks[FAR].attn.alibi
    torch.testing.assert_close(model.blocks[FAR].attn.alibi.cpu(), expected, **EQUAL)


def test_a_residual_stream_that_lies_otherwise(model: Any) -> None:
    block, alone = model.blocks[FAR], copy.deepcopy(model).to("cpu").blocks[FAR]
    residual = torch.randn(3, 2, model.cfg.d_model).transpose(0, 1)

    with torch.no_grad():
        result, expected = block(residual.to(block.mlp.W_in.device)), alone(residual)

    assert result.stride() == expected.stride()
    torch.testing.assert_close(result.cpu(), expected, **ROUNDED)


def test_all_settings_of_torch_are_set() -> None:
    before = settings()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cudnn.benchmark = torch.backends.opt_einsum.enabled = False
        changed = settings()
        for values in (before, changed):
            set_as(values)
            assert settings() == values
    finally:
        set_as(before)
    assert changed != before


def test_settings_of_torch_are_rank_0_s(machine: Any) -> None:
    small = torch.full((3,), 1e-38, device="sim:3")
    try:
        assert torch.set_flush_denormal(True)
        flushed = (small / 8).any().item()
    finally:
        torch.set_flush_denormal(False)
    assert not flushed
    assert (small / 8).any().item()


def test_values_go_with_their_command_whenever_all_is_sent(
    model: Any, reference: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SHORTEST", 1)
    monkeypatch.setattr(peers, "_LONGEST", 1)

    torch.testing.assert_close(model(tokens).cpu(), reference(tokens))


def test_autocast_of_another_type_of_device_is_no_one_s(model: Any, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(tokens).cpu()
        with torch.autocast("cpu", torch.bfloat16):
            result = model(tokens).cpu()

    assert torch.equal(result, expected)


def test_a_block_that_is_looked_into_runs_operation_by_operation(
    model: Any, reference: Any, tokens: torch.Tensor, commands: list[Any]
) -> None:
    points = [f"blocks.{FAR}.{name}" for name in ("hook_resid_pre", "hook_resid_mid")]
    seen: dict[str, torch.Tensor] = {}
    hooks = [(name, lambda value, hook: seen.update({hook.name: value.cpu()})) for name in points]
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        commands.clear()
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        expected = reference.run_with_cache(tokens, names_filter=points)[1]

    assert names(commands).count("call") == len(far_blocks(model)) - 1
    for name in points:
        torch.testing.assert_close(seen[name], expected[name])


def test_a_model_that_is_dropped_is_gone(load: Any, tokens: torch.Tensor) -> None:
    model = load("llama", 4)
    model.blocks[FAR].forward = model.blocks[FAR].forward  # which holds the block
    with torch.no_grad():
        model.run_with_cache(tokens)
    model(tokens, return_type="loss").backward()
    block = weakref.ref(model.blocks[FAR])

    del model
    gc.collect()

    assert block() is None
