"""A model of which some blocks are a worker's gives what it gives in one process.

`pytest --hosts tests/surface` compares each public method.
"""

import contextlib
import copy
import functools

import pytest
import torch
from hf_models import padded as mask_of
from torch.utils._pytree import tree_leaves

from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.multihost.remote_tensor import RemoteTensor
from tl_devicefix.multihost.worker import settings

POINTS = ["attn.hook_pattern", "attn.hook_z", "ln1.hook_scale", "mlp.hook_post"]
POINTS += ["hook_resid_pre", "hook_resid_post"]


def _scale(x, hook):
    return x * 1.5


def _loss(model, tokens, names, kept):
    """The loss, and by the hooks' names the activations."""

    def keep(x, hook):
        kept[hook.name] = x
        if x.requires_grad:
            x.retain_grad()

    hooks = [(name, keep) for name in names]
    return model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks)


def cached_with_hooks(model, tokens):
    with model.hooks(fwd_hooks=[(lambda name: "blocks." in name, _scale)]):
        return dict(model.run_with_cache(tokens)[1])


def padded(model, tokens):
    with torch.no_grad():
        return model(tokens, attention_mask=mask_of(tokens))


def replaced_at_a_hook_point(model, tokens):
    point = vars(model.hook_dict["blocks.2.hook_attn_out"])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(point, "forward", lambda x: x * 1.5)
        return model(tokens)


def deep_copied(model, tokens):
    copied = copy.deepcopy(model)
    assert getattr(copied, "placement", None) == getattr(model, "placement", None)
    return copied(tokens).detach()


def with_and_without_results_of_heads(model, tokens):
    for is_on in (True, False):
        model.set_use_attn_result(is_on)
        model.set_use_hook_mlp_in(is_on)
        if is_on:
            _, cache = model.run_with_cache(tokens)
    return dict(cache), dict(model.run_with_cache(tokens)[1]), model(tokens).detach()


def edited(by_data, model, tokens):
    """By hooks that change activations in place: at each point another head or token."""

    def editing(entry):
        def edit(x, hook):
            (x.data if by_data else x)[:, entry] = 0.25

        return edit

    hooks = [(f"blocks.{i}.{at}", editing(n)) for i in (1, 2, 3) for n, at in enumerate(POINTS)]
    with contextlib.nullcontext() if by_data else torch.inference_mode():
        return model.run_with_hooks(tokens, fwd_hooks=hooks).detach()


def moved_to_where_it_is(model, tokens):
    model.to("cpu").float()
    return torch.nn.Sequential(model).to(torch.float32)(tokens).detach()


def first_of(output):
    """Return the residual stream of a block's output, which a Bridge has in a tuple."""
    return output if isinstance(output, torch.Tensor) else output[0]


def doubled(output):
    doubled = first_of(output) * 2
    return doubled if isinstance(output, torch.Tensor) else (doubled, *output[1:])


def hooked_as_a_whole(model, tokens):
    """By torch's hook on a block, which keeps each output."""
    kept = []

    def double(module, args, output):
        kept.append(output)
        return doubled(output)

    hook = model.blocks[2].register_forward_hook(double)
    with torch.no_grad():
        logits = model(tokens), model(tokens)
    hook.remove()
    return *logits, *map(first_of, kept)


RUNS = [cached_with_hooks, padded, replaced_at_a_hook_point, hooked_as_a_whole]
RUNS += [deep_copied, with_and_without_results_of_heads, moved_to_where_it_is]
EXACT = {run.__name__: run for run in RUNS}
EXACT["edited"] = functools.partial(edited, False)
EXACT["edited by data"] = functools.partial(edited, True)


@pytest.mark.parametrize("run", EXACT.values(), ids=EXACT)
def test_remote_blocks_give_one_processs_results_bit_for_bit(run, alone, spread, tokens):
    expected, given = (run(load("llama"), tokens) for load in (alone, spread))
    assert tree_leaves(given)
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)


def activations(model, tokens):
    kept = {}
    _loss(model, tokens, [lambda name: "blocks." in name], kept).backward()
    return {name: x.grad for name, x in kept.items()}


def of_some_activations(model, tokens):
    kept = {}
    names = ["blocks.2.hook_resid_pre", "blocks.3.hook_attn_out", "blocks.3.hook_resid_post"]
    names = [model.hook_dict[name].name for name in names]
    loss = _loss(model, tokens, names, kept)
    late = torch.autograd.grad(loss, kept[names[1]], retain_graph=True)
    return late, torch.autograd.grad(loss, [kept[name] for name in names])


def of_backward_hooks(model, tokens):
    kept = {}

    def keep(gradient, hook):
        kept[hook.name] = None if gradient is None else gradient.clone()

    with model.hooks(bwd_hooks=[(lambda name: "blocks." in name, keep)]):
        model(tokens, return_type="loss").backward()
    return kept


def of_a_steering_vector(model, tokens):
    vector = torch.full((16,), 0.5, requires_grad=True)
    hooks = [("blocks.2.hook_resid_mid", lambda x, hook: x.detach() + vector)]
    model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).backward()
    return vector.grad


def of_a_run_with_a_constant(model, tokens):
    with model.hooks(fwd_hooks=[("blocks.2.attn.hook_z", lambda x, hook: torch.ones_like(x))]):
        return activations(model, tokens)


def of_weights_at_home(model, tokens):
    own = [*model.embed.parameters(), *model.blocks[0].parameters(), *model.blocks[4].parameters()]
    own = [weight for weight in own if weight.requires_grad]
    loss = model(tokens, return_type="loss")
    return torch.autograd.grad(loss, own, allow_unused=True)


SHARED = ["blocks.2.ln1.hook_in", "blocks.2.ln1.hook_out", "blocks.2.attn.q.hook_in"]
SHARED += ["blocks.2.hook_resid_post", "blocks.3.hook_resid_pre"]
"""Hook points that get an activation of another part, or of an earlier hook point."""


def of_edits_in_place(model, tokens):
    def edit(x, hook):
        x[:, 1] = x[:, 1] * 0.5

    hooks = [(name, edit) for name in SHARED if name in model.hook_dict]
    logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
    own = next(weight for weight in model.blocks[0].parameters() if weight.requires_grad)
    return logits.detach(), torch.autograd.grad(logits.square().sum(), own)


GRADIENTS = [activations, of_some_activations, of_backward_hooks, of_a_steering_vector]
GRADIENTS += [of_a_run_with_a_constant, of_weights_at_home, of_edits_in_place]


@pytest.mark.parametrize("run", GRADIENTS)
def test_remote_blocks_give_one_processs_gradients(run, alone, spread, tokens):
    expected, given = (run(load("llama"), tokens) for load in (alone, spread))
    torch.testing.assert_close(given, expected, rtol=2e-5, atol=1e-6)


def test_consecutive_remote_blocks_and_their_cache_take_one_call(spread, host, tokens):
    model = spread("llama")
    names = [f"blocks.{layer}.hook_resid_{at}" for layer in (2, 3) for at in ("pre", "mid")]
    model.run_with_cache(tokens, names_filter=names)  # shows what its blocks return
    host.calls.clear()
    _, cache = model.run_with_cache(tokens, names_filter=names)
    assert host.calls == ["begin"]
    cache["resid_pre", 3]
    assert host.calls == ["begin", "fetch"]


@pytest.mark.skipif(has_hooked_transformer(), reason="a HookedTransformer takes no such mask")
def test_a_mask_of_pairs_of_tokens_is_sent(alone, spread, tokens):
    n = tokens.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    expected = alone("llama")(tokens, attention_mask=mask)
    torch.testing.assert_close(spread("llama")(tokens, attention_mask=mask) * 1, expected)


@pytest.mark.once
def test_settings_by_torchs_newer_interface_are_sent():
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        assert "tf32" in settings()
    finally:
        matmul.fp32_precision = before


# Tensors of another host that are not fetched yet

HERE = torch.device("cpu")


def remote(values):
    return RemoteTensor(values.clone, values.shape, values.dtype, HERE)


@pytest.mark.once
def test_tensor_tells_of_gradients_that_its_values_have():
    values = torch.ones(3, requires_grad=True) * 2

    def output():
        return RemoteTensor(lambda: values, values.shape, values.dtype, HERE, waits=True)

    assert output().requires_grad
    assert output()[:2].requires_grad
    assert not output().detach().requires_grad
    cached = remote(torch.ones(3))
    assert not cached.requires_grad
    assert not cached.is_fetched
    cached.requires_grad_().sum().backward()
    assert cached.requires_grad
    assert cached.grad.equal(torch.ones(3))


def flat_after_a_change(tensor, flatten):
    """Return a flattened tensor, read after the tensor was changed in place."""
    flat = flatten(tensor)
    tensor.add_(1)
    return flat * 1


@pytest.mark.once
def test_unread_view_sees_later_changes_and_a_copy_does_not():
    values = torch.arange(12.0).reshape(3, 4)
    for flatten in (
        lambda tensor: tensor.reshape(12),  # a view
        lambda tensor: tensor.transpose(0, 1).reshape(12),  # a copy
        lambda tensor: tensor[:, 1:3].reshape(6),  # a copy
    ):
        expected = flat_after_a_change(values.clone(), flatten)
        assert flat_after_a_change(remote(values), flatten).equal(expected)
