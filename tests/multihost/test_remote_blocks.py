"""A model of which some blocks are a worker's gives what it gives in one process."""

import copy
import functools
import gc

import pytest
import torch
from local_hosts import hosts
from torch.utils._pytree import tree_leaves

from tl_devicefix.placement.devices import free_memory, resolve

GREEDY = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False}
POINTS = [
    *("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out"),
    *("ln1.hook_scale", "ln2.hook_normalized", "mlp.hook_post"),
    *(f"attn.hook_{name}" for name in ("v", "z", "attn_scores", "pattern", "rot_q")),
]
"""Of a block of "llama"."""


def _scale(x, hook):
    return x * 1.5


def _edit(x, hook):
    x[:, 1] = 0.25


def _keep(x, hook, kept):
    kept[hook.name] = x
    if x.requires_grad:
        x.retain_grad()


def forward(model, tokens):
    with torch.no_grad():
        return model(tokens, return_type="both")


def hooked(point, hook, model, tokens):
    hooks = [(f"blocks.{layer}.{point}", hook) for layer in (1, 2, 3)]
    with torch.inference_mode():
        return model.run_with_hooks(tokens, fwd_hooks=hooks)


def hooked_everywhere(model, tokens):
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=[(lambda name: "blocks." in name, _scale)])


def stopped(model, tokens):
    return [model(tokens, stop_at_layer=layer).detach() for layer in range(6)]


def cached(model, tokens):
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
    decomposed = cache.accumulated_resid(apply_ln=True), cache.stack_head_results()
    return logits, dict(cache), decomposed, cache["resid_mid", 3][:, -1]


def cached_with_hooks(model, tokens):
    with model.hooks(fwd_hooks=[("blocks.3.attn.hook_z", _scale)]):
        return [dict(model.run_with_cache(tokens)[1])]


def generated_hooked(model, tokens):
    with model.hooks(fwd_hooks=[("blocks.2.attn.hook_z", _scale)]):
        return model.generate(tokens, **GREEDY)


def padded(model, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad():
        return model(tokens, attention_mask=mask)


def weights(model, tokens):
    block, scores = model.blocks[3], model.all_composition_scores("K")
    return (
        *(model.W_Q, model.W_in, model.QK.eigenvalues, getattr(scores, "scores", scores)),
        *(block.attn.W_O.norm(), block.attn.W_Q[1], block.mlp.W_in.T, torch.svd(block.mlp.W_out).S),
        *(model.state_dict(), model.accumulated_bias(4)),
    )


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


def edited_by_data(model, tokens):
    def edit(x, hook):
        x.data[:, 1] = 0.25

    hooks = [(f"blocks.{layer}.attn.hook_z", edit) for layer in (1, 2, 3)]
    return model.run_with_hooks(tokens, fwd_hooks=hooks).detach()


def moved_to_where_it_is(model, tokens):
    model.to("cpu").float()
    return torch.nn.Sequential(model).to(torch.float32)(tokens).detach()


RUNS = [
    *(forward, hooked_everywhere, stopped, cached, cached_with_hooks, generated_hooked),
    *(padded, weights, replaced_at_a_hook_point),
    *(deep_copied, with_and_without_results_of_heads, edited_by_data, moved_to_where_it_is),
]
EXACT = {run.__name__: run for run in RUNS}
EXACT |= {f"exchanged {point}": functools.partial(hooked, point, _scale) for point in POINTS}
EXACT |= {f"edited {point}": functools.partial(hooked, point, _edit) for point in POINTS[::2]}


@pytest.mark.parametrize("run", EXACT.values(), ids=EXACT)
def test_bit_for_bit(run, alone, spread, tokens):
    expected, given = (tree_leaves(run(load("llama"), tokens)) for load in (alone, spread))
    assert len(expected) == len(given) > 0
    for one, other in zip(expected, given):
        torch.testing.assert_close(other.clone(), one, rtol=0, atol=0, equal_nan=True)


def activations(model, tokens):
    kept = {}
    keep = functools.partial(_keep, kept=kept)
    model.run_with_hooks(
        tokens, return_type="loss", fwd_hooks=[(lambda name: "blocks." in name, keep)]
    ).backward()
    return {name: x.grad for name, x in kept.items()}


def of_some_activations(model, tokens):
    kept = {}
    keep = functools.partial(_keep, kept=kept)
    names = ["blocks.2.hook_resid_pre", "blocks.3.hook_attn_out", "blocks.3.hook_resid_post"]
    names = [model.hook_dict[name].name for name in names]
    loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(n, keep) for n in names])
    late = torch.autograd.grad(loss, kept[names[1]], retain_graph=True)
    return late, torch.autograd.grad(loss, [kept[name] for name in names])


def of_backward_hooks(model, tokens):
    kept = {}

    def keep(gradient, hook):
        kept[hook.name] = None if gradient is None else gradient.clone()

    hooks = [(lambda name: "blocks." in name, keep)]
    with model.hooks(bwd_hooks=hooks):
        model(tokens, return_type="loss").backward()
    return kept


def of_a_steering_vector(model, tokens):
    vector = torch.full((16,), 0.5, requires_grad=True)
    hooks = [("blocks.2.hook_resid_mid", lambda x, hook: x.detach() + vector)]
    model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).backward()
    return vector.grad


def of_weights_at_home(model, tokens):
    own = [*model.embed.parameters(), *model.blocks[0].parameters(), *model.blocks[4].parameters()]
    own = [weight for weight in own if weight.requires_grad]
    loss = model(tokens, return_type="loss")
    return torch.autograd.grad(loss, own, allow_unused=True)


GRADIENTS = [
    *(activations, of_some_activations, of_backward_hooks),
    *(of_a_steering_vector, of_weights_at_home),
]


@pytest.mark.parametrize("run", GRADIENTS)
def test_gradients(run, alone, spread, tokens):
    expected, given = (run(load("llama"), tokens) for load in (alone, spread))
    torch.testing.assert_close(given, expected, rtol=2e-5, atol=1e-6)


def test_one_call_for_consecutive_blocks(spread, host, tokens):
    model = spread("llama")
    with torch.no_grad():
        model(tokens)  # shows what its blocks return
        host.calls.clear()
        model(tokens)
    assert host.calls == ["begin"]


def test_hooks_that_look_stop_nobody(spread, host, tokens):
    model = spread("llama")
    names = [f"blocks.{layer}.hook_resid_{at}" for layer in (2, 3) for at in ("pre", "mid")]
    model.run_with_cache(tokens, names_filter=names)  # shows what its blocks return
    host.calls.clear()
    _, cache = model.run_with_cache(tokens, names_filter=names)
    assert host.calls == ["begin"]
    cache["resid_pre", 3]
    assert host.calls == ["begin", "kept"]


def test_memory_of_a_deleted_model_is_free_when_it_is_asked_for(load, tokens):
    with hosts("node-b") as (host,):
        model = load("llama", device_map={"": "cpu", "blocks.2": "node-b/cpu"})
        model(tokens)
        assert host.worker._kept
        del model
        gc.collect()
        free_memory(resolve("node-b/cpu"))
        assert not host.worker._kept
