"""docs/single_device_code.md: what fails over several devices, within `mix_devices`, and instead.

With `to`, a script moves tensors as the page says; or `to` does nothing, as on one device.
"""

import sys
import traceback
from pathlib import Path

import pytest
import torch
from comparison import assert_agrees
from devices import device

import tl_devicefix
from tl_devicefix.errors import ON_MIXED_DEVICES

PAGE = "Run single-device code"
HAS_NOTES = sys.version_info >= (3, 11)


def residuals(model, tokens):
    """What hooks of every block kept, on the block's device."""
    kept = []
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    keep = lambda activation, hook: kept.append(activation)  # noqa: E731
    model.run_with_hooks(tokens, fwd_hooks=[(name, keep) for name in names])
    return kept


def a_weight_and_a_cached_activation(model, tokens, to):
    z = model.run_with_cache(tokens)[1]["blocks.4.attn.hook_z"][..., 0, :]
    return z @ to(model.blocks[4].attn.W_O[0], z.device)


def weights_of_two_blocks(model, tokens, to):
    first = model.blocks[0].attn.W_O
    return to(model.blocks[4].attn.W_Q, first.device) @ first


def all_parameters(model, tokens, to):
    return sum(to((p**2).sum(), model.cfg.device) for p in model.parameters())


def what_hooks_kept(model, tokens, to):
    return torch.stack([to(x, model.cfg.device) for x in residuals(model, tokens)])


def modules_called_by_hand(model, tokens, to):
    block, x = model.blocks[4], model.run_with_cache(tokens)[1]["blocks.4.hook_resid_pre"]
    x = to(x, next(block.parameters()).device)
    return [block.mlp(x), block.ln1(x)]


def a_mask_of_the_cpu_in_a_hook(model, tokens, to):
    mask = torch.arange(model.cfg.d_model) > 3
    hook = lambda x, hook: x * to(mask, x.device)  # noqa: E731
    return model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.hook_resid_post", hook)])


def an_edit_of_rank_one(model, tokens, to):
    """As in ROME, of vectors at home."""
    weight = model.blocks[4].mlp.W_out
    with torch.no_grad():
        edit = torch.outer(model.W_in[4].mean(0), model.W_E.mean(0))
        weight += to(edit, weight.device)
        logits = model(tokens)
        weight -= to(edit, weight.device)
    return logits


def a_pytorch_hook(model, tokens, to):
    vector = torch.ones(model.cfg.d_model, device=model.cfg.device)

    def add(module, args, output):
        if isinstance(output, torch.Tensor):
            return output + to(vector, output.device)
        return (output[0] + to(vector, output[0].device), *output[1:])

    handle = model.blocks[4].mlp.register_forward_hook(add)
    try:
        return model(tokens)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "script",
    [
        *(a_weight_and_a_cached_activation, weights_of_two_blocks, all_parameters),
        *(what_hooks_kept, modules_called_by_hand, a_pytorch_hook),
        *(a_mask_of_the_cpu_in_a_hook, an_edit_of_rank_one),
    ],
)
def test_single_device_script_works_mixing_or_as_rewritten(script, shared, on_one, tokens):
    def stay(tensor, device):
        return tensor

    model, reference, at_home = shared("gpt2"), on_one("gpt2"), tokens.to(device(0))
    with pytest.raises(RuntimeError, match="same device") as caught:
        script(model, at_home, stay)
    message = "".join(traceback.format_exception(caught.value))
    assert message.count(PAGE) == (1 if HAS_NOTES else 0)
    expected = script(reference, tokens, stay)
    with tl_devicefix.mix_devices():
        assert_agrees(script(model, at_home, stay), expected)
    assert_agrees(script(model, at_home, torch.Tensor.to), expected)


@pytest.mark.parametrize("at", [0, 3])
def test_parts_that_are_called_by_hand_return_on_their_device(at, model):
    block, there = model.blocks[2], model.placement.device_of("blocks.2")
    x = torch.ones(1, 4, model.cfg.d_model, device=device(at))
    is_bridge = hasattr(model, "original_model")  # whose other parts take inputs on their device
    outputs = (block(x),) if is_bridge else (block.attn(x, x, x), block.mlp(x), block(x))
    assert {y.device if isinstance(y, torch.Tensor) else y[0].device for y in outputs} == {there}


@pytest.mark.fails_unpatched
def test_gradients_of_several_blocks_mix_as_on_one_device(load, on_one, tokens):
    def gradients(model, tokens):
        model.zero_grad()
        with tl_devicefix.mix_devices():
            loss = model(tokens, return_type="loss")
            loss = loss + 1e-3 * sum((p**2).sum() for p in model.parameters())
            (loss + torch.stack(residuals(model, tokens)).square().mean()).backward()
            parameters = [p for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            of_blocks = [next(iter(block.mlp.parameters())).grad for block in model.blocks]
            return [norm, torch.stack(of_blocks)]

    expected = gradients(on_one("llama"), tokens)
    actual = gradients(load("llama"), tokens.to(device(0)))
    assert_agrees(actual, expected, tolerance=1e-4)


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes since Python 3.11")
def test_torchs_device_error_gets_a_note_naming_the_docs_page(load, machine, tokens, monkeypatch):
    """As of real devices, whose errors are torch's and say nothing of the kind."""

    def fails(*_, **__):
        raise RuntimeError("Expected all tensors to be on the same device, but mat2 is on cuda:1")

    model, at_home = load("llama"), tokens.to(device(0))
    _, cache = model.run_with_cache(at_home)
    handle = model.blocks[2].mlp.register_forward_pre_hook(fails)
    runs = [
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
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert said.count(ON_MIXED_DEVICES) == 1
    assert PAGE in ON_MIXED_DEVICES
    page = (Path(__file__).parents[2] / "docs" / "single_device_code.md").read_text()
    assert page.startswith(f"# {PAGE}\n")
