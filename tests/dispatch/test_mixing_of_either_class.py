"""docs/single_device_code.md: what fails over several devices, within `mix_devices`, and instead.

Scripts that were written for one device run over four within it, and give the same.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from torch import nn

import tl_devicefix
from tl_devicefix.tracebacks import ON_MIXED_DEVICES

LAST = "blocks.4.hook_resid_post"
PAGE = "Run single-device code"
HAS_NOTES = sys.version_info >= (3, 11)
Script = Callable[[Any, torch.Tensor], Any]


def kept(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What hooks of every block kept, on the block's device."""
    activations: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return name, lambda activation, hook: activations.update({name: activation})

    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    model.run_with_hooks(tokens, fwd_hooks=list(map(keep, names)))
    return {name: activations[name] for name in names}


def residuals(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    return list(kept(model, tokens).values())


def cached(model: Any, tokens: torch.Tensor, name: str) -> torch.Tensor:
    return model.run_with_cache(tokens)[1][name]


def values_at_home(model: Any, like: torch.Tensor) -> torch.Tensor:
    return home(model, torch.linspace(-1, 1, like.numel()).view(like.shape))


def home(model: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(model.cfg.device)


def with_pytorch_hook(change: Callable[[torch.Tensor, torch.Tensor], Any], method: str) -> Script:
    def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        vector = torch.ones(model.cfg.d_model, device=model.cfg.device)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, torch.Tensor):
                return change(output, vector)
            return (change(output[0], vector), *output[1:])

        handle = model.blocks[4].mlp.register_forward_hook(hook)
        options = {"max_new_tokens": 1, "do_sample": False, "verbose": False}
        try:
            return getattr(model, method)(tokens, **options if method == "generate" else {})
        finally:
            handle.remove()

    return run


ROWS: dict[str, tuple[Script, Script]] = {
    "a block's weight and a cached activation": (
        lambda model, tokens: (
            cached(model, tokens, "blocks.4.attn.hook_z")[..., 0, :] @ model.blocks[4].attn.W_O[0]
        ),
        lambda model, tokens: (
            cached(model, tokens, "blocks.4.attn.hook_z")[..., 0, :]
            @ home(model, model.blocks[4].attn.W_O[0])
        ),
    ),
    "a block's bias and what is gathered": (
        lambda model, tokens: model.accumulated_bias(3) + model.blocks[4].attn.b_O,
        lambda model, tokens: model.accumulated_bias(3) + home(model, model.blocks[4].attn.b_O),
    ),
    "weights of two blocks": (
        lambda model, tokens: model.blocks[4].attn.W_Q @ model.blocks[0].attn.W_O,
        lambda model, tokens: home(model, model.blocks[4].attn.W_Q) @ model.blocks[0].attn.W_O,
    ),
    "all parameters": (
        lambda model, tokens: sum((p**2).sum() for p in model.parameters()),
        lambda model, tokens: sum(home(model, (p**2).sum()) for p in model.parameters()),
    ),
    "what hooks kept": (
        lambda model, tokens: torch.stack(residuals(model, tokens)),
        lambda model, tokens: torch.stack([home(model, x) for x in residuals(model, tokens)]),
    ),
    "modules called by hand": (
        lambda model, tokens: [
            model.blocks[4].mlp(cached(model, tokens, "blocks.4.hook_resid_pre")),
            model.blocks[4].ln1(cached(model, tokens, "blocks.4.hook_resid_pre")),
        ],
        lambda model, tokens: [
            module(cached(model, tokens, "blocks.4.hook_resid_pre").to(of_block_4(model)))
            for module in (model.blocks[4].mlp, model.blocks[4].ln1)
        ],
    ),
    **{
        f"a PyTorch hook of a {method}": (
            with_pytorch_hook(lambda output, vector: output + vector, method),
            with_pytorch_hook(lambda output, vector: output + vector.to(output.device), method),
        )
        for method in ("forward", "generate")
    },
}
MAY_WORK = ("modules called by hand",)
"""What works where accelerate brings arguments to a Bridge's modules."""


def of_block_4(model: Any) -> torch.device:
    return model.placement.device_of("blocks.4")


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("row", ROWS)
def test_what_fails_works_within_mix_devices_and_what_to_write_instead(
    row: str, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    on_one_device, instead = ROWS[row]
    model, reference, at_home = over_devices("gpt2"), on_one("gpt2"), tokens.to("sim:0")
    if row not in MAY_WORK or not hasattr(model, "original_model"):
        with pytest.raises(RuntimeError, match="same device") as caught:
            on_one_device(model, at_home)
        message = "".join(traceback.format_exception(caught.value))
        assert message.count(PAGE) == (1 if HAS_NOTES else 0)
    expected = on_one_device(reference, tokens)
    with tl_devicefix.mix_devices():
        assert_agrees(on_one_device(model, at_home), expected)
    assert_agrees(instead(model, at_home), expected)


# --------------------------------------------------------------------------------------------
# More that works within it


def gradients_of_several_blocks(model: Any, tokens: torch.Tensor) -> Any:
    loss = model(tokens, return_type="loss") + 1e-3 * sum((p**2).sum() for p in model.parameters())
    (loss + torch.stack(residuals(model, tokens)).square().mean()).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    gradients = [next(iter(block.mlp.parameters())).grad for block in model.blocks]
    return [norm, torch.stack(gradients)]


def in_place_and_out(model: Any, tokens: torch.Tensor) -> Any:
    streams = [stream.detach().clone() for stream in residuals(model, tokens)]
    vector = values_at_home(model, streams[0][0, 0])
    index = torch.tensor([0, 2], device=model.cfg.device)
    devices = [stream.device for stream in streams]
    streams[1].add_(vector)
    streams[2][:, index] = streams[4][:, index]
    streams[3].copy_(vector)
    torch.add(streams[0], streams[4], out=streams[2])
    torch._foreach_add_(streams, [streams[1].clone() for _ in streams])
    assert [stream.device for stream in streams] == devices
    return [*streams, streams[4][streams[0] > 0], streams[4].index_select(1, index)]


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("script", [gradients_of_several_blocks, in_place_and_out])
def test_a_script_for_one_device(
    script: Script, over_devices: Any, on_one: Any, tokens: torch.Tensor
) -> None:
    reference = on_one("llama")
    with tl_devicefix.mix_devices():
        expected = script(reference, tokens)
    reference.zero_grad()

    with tl_devicefix.mix_devices():
        actual = script(over_devices("llama"), tokens.to("sim:0"))
    assert_agrees(actual, expected, tolerance=1e-4)


# --------------------------------------------------------------------------------------------
# Notes on errors, and changes that get lost


@pytest.mark.skipif(not HAS_NOTES, reason="notes came with Python 3.11")
def test_torchs_own_error_gets_a_note_in_what_passes_through_here(
    over_devices: Any, machine: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of real devices, whose errors are torch's and say nothing of the kind."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Expected all tensors to be on the same device, but mat2 is on cuda:1")

    model, at_home = over_devices("llama"), tokens.to("sim:0")
    _, cache = model.run_with_cache(at_home)
    handle = model.blocks[2].mlp.register_forward_pre_hook(fails)
    runs: list[Callable[[], Any]] = [
        lambda: model(at_home),
        lambda: model.run_with_cache(at_home),
        lambda: model.generate(at_home, max_new_tokens=1, verbose=False),
        lambda: cache.get_full_resid_decomposition(expand_neurons=False),
    ]
    for number, run in enumerate(runs):
        if number == 3:
            handle.remove()
            monkeypatch.setattr(torch, "stack", fails)
        with pytest.raises(RuntimeError, match="mat2 is on cuda:1") as caught:
            run()
        assert str(caught.value).endswith(f"mat2 is on cuda:1\n{ON_MIXED_DEVICES}")
        assert str(caught.value).count(ON_MIXED_DEVICES) == 1


def test_the_note_names_a_page_that_is_there() -> None:
    assert PAGE in ON_MIXED_DEVICES
    assert ".to(model.cfg.device)" in ON_MIXED_DEVICES
    page = (Path(__file__).parents[2] / "docs" / "single_device_code.md").read_text()
    assert page.startswith(f"# {PAGE}\n")
    assert "same device" in page


def test_changing_what_is_read_from_a_cache_changes_a_copy_and_what_to_write(
    over_devices: Any, machine: Any, tokens: torch.Tensor
) -> None:
    cache = over_devices("llama").run_with_cache(tokens.to("sim:0"))[1]

    cache["resid_post", 4][:] = 0
    assert cache["resid_post", 4].count_nonzero() > 0

    name = next(name for name in cache.cache_dict if name.startswith("blocks.4") and "pre" in name)
    cache.cache_dict[name] = torch.zeros_like(cache[name])
    assert cache[name].count_nonzero() == 0
