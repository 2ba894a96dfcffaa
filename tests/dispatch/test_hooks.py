"""Hooks run on the device of their block, and may use what is on the model's other devices."""

import sys

import pytest
import torch
from comparison import assert_agrees
from devices import device
from hf_models import N_LAYERS
from kinds import home_of
from parameters import in_turn

pytestmark = pytest.mark.hooked

LAST = "blocks.4.hook_resid_post"


def changed_buffers(model, tokens):
    """Buffers at home, which a hook elsewhere changes."""
    results = []

    def zeros(*shape):
        return torch.zeros(*shape, device=model.cfg.device)

    def look(a, hook):
        values, indices = zeros(2, 9, 3), zeros(2, 9, 3).long()
        torch.topk(a, 3, out=(values, indices))
        seen_by_a_view = zeros(a.numel())
        seen_by_a_view.view_as(a).add_(a)
        put, index = zeros(a.shape[-1]), torch.tensor([1], device=a.device)
        torch.index_put_(input=put, indices=[index], values=a[0, 0, :1].clone())
        leaf = a.detach().clone().requires_grad_()
        leaf.grad = zeros(*a.shape) + 1
        results.extend([values, indices, seen_by_a_view, put, leaf.grad])

    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[(LAST, look)])
    return results


def a_vector_that_changes_between_two_uses(model, tokens):
    vector = torch.ones(model.cfg.d_model, device=model.cfg.device)

    def steer(activation, hook):
        steered = activation + vector
        vector[::2] += 1
        return steered * vector

    return model.run_with_hooks(tokens, fwd_hooks=[(LAST, steer)])


def a_vector_that_is_used_without_a_graph_first(model, tokens):
    vector = torch.ones(model.cfg.d_model, device=model.cfg.device, requires_grad=True)

    def steer(activation, hook):
        with torch.no_grad():
            scale = (activation * vector).norm()
        return activation + scale * vector

    model.run_with_hooks(tokens, fwd_hooks=[(LAST, steer)], return_type="loss").backward()
    return vector.grad


def a_mask_that_is_edited_between_blocks(model, tokens):
    mask = torch.ones_like(tokens, device=model.cfg.device)

    def pad(value, hook):
        mask[0, :2] = 0

    hooks = [(f"blocks.{N_LAYERS - 2}.hook_resid_post", pad)]
    return model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    "script",
    [
        *(changed_buffers, a_vector_that_changes_between_two_uses),
        *(a_vector_that_is_used_without_a_graph_first, a_mask_that_is_edited_between_blocks),
    ],
)
def test_hooks_may_use_and_change_tensors_on_the_home_device(script, model, reference, tokens):
    assert_agrees(script(model, tokens), script(reference, tokens))


@pytest.mark.parametrize(
    ("hook", "direction"),
    in_turn(
        [
            lambda x, hook: x + torch.ones(16),
            # Refused, because its running statistics would be those of a copy.
            lambda x, hook: torch.nn.BatchNorm1d(9).to(device(0))(x),
        ],
        ["fwd", "bwd"],
    ),
)
def test_a_hook_that_mixes_foreign_devices_raises(hook, direction, model, shared, tokens):
    """On one GPU, a tensor on the CPU fails too; another model there makes no difference."""
    _another = shared("llama", device="cpu")
    with (
        model.hooks(**{f"{direction}_hooks": [(LAST, hook)]}),
        pytest.raises(RuntimeError, match="same device"),
    ):
        model(tokens, return_type="loss").backward()


def test_what_a_hook_returns_goes_to_its_activations_device(model, reference, tokens):
    halve = lambda x, hook: (x / 2).cpu()  # noqa: E731
    double = lambda gradient, hook: ((gradient * 2).cpu(),)  # noqa: E731
    for each in (model, reference):
        each.zero_grad()
        with each.hooks(fwd_hooks=[(LAST, halve)], bwd_hooks=[(LAST, double)]):
            each(tokens, return_type="loss").backward()
    gradients = [each.blocks[0].mlp.W_in.grad for each in (model, reference)]
    assert_agrees(*gradients)


def test_users_error_in_a_hook_is_raised_unchanged(model, tokens):
    def fail(value, hook):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError) as caught:
        model.run_with_hooks(tokens, fwd_hooks=[(LAST, fail)])
    assert str(caught.value).startswith("mine")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("spread", [1, 4])
def test_an_error_in_a_hook_has_a_note_with_its_activation(model, at_home):
    name = next(name for name in model.hook_dict if name.endswith("4.attn.hook_q"))
    multiply = lambda x, hook: x @ torch.ones(7, 7, device=x.device)  # noqa: E731
    with pytest.raises(RuntimeError) as caught:
        model.run_with_hooks(at_home, fwd_hooks=[(name, multiply)])
    (note,) = caught.value.__notes__
    assert f"this error is from the hook on {name}, whose activation is [2, 9, " in note


def test_hooks_added_before_spreading_may_mix_devices_after(load, reference, tokens):
    model = load("llama", 1)
    vector = torch.linspace(-1, 1, model.cfg.d_model, device=device(0))
    model.add_hook(LAST, lambda value, hook: value + vector)
    model.cfg.n_devices = 4
    model.move_model_modules_to_device()
    hook = (LAST, lambda value, hook: value + vector.cpu())
    expected = reference.run_with_hooks(tokens, fwd_hooks=[hook])
    assert_agrees(model(tokens), expected, home_of(model))
    assert {str(p.device) for p in model.parameters()} == {device(i) for i in range(4)}


def test_torch_hooks_added_before_spreading_see_new_devices(load, tokens):
    model, seen = load("llama", 1), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append(args[0].device))
    model.unembed.register_forward_hook(lambda head, args, logits: seen.append(logits.device))
    model.cfg.n_devices = 4
    model.move_model_modules_to_device()
    model(tokens)
    blocks = [model.placement.device_of(f"blocks.{number}") for number in range(N_LAYERS)]
    assert seen == [*blocks, home_of(model)]
