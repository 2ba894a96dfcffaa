"""`sweep`: what run_with_hooks returns, bit for bit, from the first block that a run changes."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pandas
import pytest
import torch
from comparison import assert_bit_equal
from devices import device
from hf_models import N_LAYERS, padded
from model_classes import BRIDGE
from runs_of_users import blocks_run, looped, metric, own_forward
from torch import nn
from transformer_lens import patching

import tl_devicefix
from tl_devicefix.monkeypatch.versions import installed

pytestmark = pytest.mark.usefixtures("no_grad")


def traces(model):
    """The hook points on which a hook is left, and blocks with a forward of their own."""
    points = [name for name, point in model.hook_dict.items() if point._forward_hooks]
    return points + [str(i) for i, block in enumerate(model.blocks) if "forward" in vars(block)]


def halve(activation, hook):
    activation[:, -1] /= 2


def at(layer):
    return [(f"blocks.{layer}.hook_resid_pre", halve)]


RUNS = [
    *([], at(3), at(1), at(4), at(4)),
    [*at(4), ("blocks.2.attn.hook_z", halve)],
    [("hook_embed", halve)],
    [("ln_final.hook_normalized", halve)],
    [(lambda name: name in ("blocks.1.hook_mlp_out", "blocks.3.hook_mlp_out"), halve)],
    at(0),
]


@pytest.fixture
def model(on_one):
    return on_one("llama")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sweep_yields_what_run_with_hooks_returns(kind, on_one, tokens):
    model = on_one(kind)
    with tl_devicefix.disabled():
        expected = looped(model, tokens, RUNS)
    assert_bit_equal(list(tl_devicefix.sweep(model, tokens, RUNS)), expected)
    assert traces(model) == []

    for arguments in (
        {"return_type": "loss", "loss_per_token": True},
        {"return_type": "both"},
        {"return_type": None},
        {"stop_at_layer": 3},
        {"stop_at_layer": -1},
        {"attention_mask": padded(tokens)},
        {"padding_side": "left"},
    ):
        inputs = ["w5 w6 w7", "w8"] if "padding_side" in arguments else tokens
        expected = looped(model, inputs, RUNS[:5], **arguments)
        assert_bit_equal(list(tl_devicefix.sweep(model, inputs, RUNS[:5], **arguments)), expected)


def test_a_run_copies_nothing_for_the_blocks_that_it_skips(machine, load, tokens):
    model = load("llama")
    sweep = tl_devicefix.sweep(model, tokens.to(model.cfg.device), [at(4), at(4)])
    next(sweep)
    machine.reset_transfers()
    next(sweep)
    assert {str(item.target) for item in machine.transfers} <= {device(0), device(3)}


def test_in_the_order_of_layers_each_block_is_run_once_for_all(model, tokens):
    with blocks_run(model) as count:
        list(tl_devicefix.sweep(model, tokens, map(at, [0, 0, 1, 1, 2, 4, 4])))
    assert count.blocks == 2 * 5 + 2 * 4 + 3 + 2 * 1 + 5  # 5 of the unpatched run


@pytest.mark.parametrize("hooked", [None, 3])
@pytest.mark.parametrize("given", [list, iter])
def test_unpatched_blocks_run_in_one_forward(hooked, given, model, tokens):
    """It ends before a block with a user's hook."""
    calls, own = [], type(model).forward
    if hooked is not None:
        model.add_perma_hook(
            f"blocks.{hooked}.hook_mlp_out", lambda *args, hook: calls.append(hook)
        )
    runs = [at(layer) for layer in range(1, 5)]

    def forward(self, *args, **kwargs):
        calls.append("forward")
        return own(self, *args, **kwargs)

    with mock.patch.object(type(model), "forward", forward):
        list(tl_devicefix.sweep(model, tokens, given(runs)))
    assert calls.count("forward") == len(runs) + 1
    assert len(calls) - calls.count("forward") == (0 if hooked is None else len(runs))


def test_a_list_is_checked_before_its_first_run(model, tokens):
    runs = [at(1), [("blocks.1.hook_resid_prr", leave)]]
    with pytest.raises(ValueError, match=r"hook_resid_prr.: take a name"):
        next(tl_devicefix.sweep(model, tokens, runs))
    assert len(next(tl_devicefix.sweep(model, tokens, iter(runs)))) == len(tokens)


@pytest.mark.bridge
def test_a_bridge_lists_all_hook_points_once(model, tokens):
    """TransformerLens does so twice in each run, which took half the time of a late run."""
    seen, listed, own = [], [], type(model).hook_dict.fget

    def in_all(activation, hook):
        seen.append((hook, hook is model.hook_dict[hook.name], activation))

    names = ["blocks.3.hook_resid_pre", "blocks.3.attn.hook_z", "blocks.4.hook_in"]
    names.append("ln_final.hook_normalized")
    expected = looped(model, tokens, [[(name, in_all) for name in names]] * 3)
    wanted = seen[:]
    seen.clear()
    hook_dict = property(lambda self: listed.append(self) or own(self))
    with mock.patch.object(type(model), "hook_dict", hook_dict):
        runs = [[(name, in_all) for name in names]] * 3
        results = list(tl_devicefix.sweep(model, tokens, runs))
    assert len(listed) == 1 + len(seen)  # a hook may ask for it
    assert_bit_equal([results, seen], [expected, wanted])


class Probe(nn.Module):
    """One of the user's: it may do anything."""


def leave(*args, **kwargs):
    """A hook of PyTorch's, or of a hook point, that changes nothing."""


FIRST = "blocks.0.hook_mlp_out"
CASES = {
    "a hook of the run on the first block": lambda model: [(lambda name: name == FIRST, halve)],
    "a hook of the run on the embedding": lambda model: [("hook_embed", halve)],
    "a permanent hook on the first block": lambda model: model.add_perma_hook(FIRST, leave),
    "a permanent hook on the embedding": lambda model: model.add_perma_hook("hook_embed", leave),
    "PyTorch's hook": lambda model: model.blocks[0].attn.register_forward_hook(leave),
    "PyTorch's backward hook": lambda model: model.blocks[0].register_full_backward_hook(leave),
    "PyTorch's hook on all modules": lambda model: (
        nn.modules.module.register_module_forward_pre_hook(leave)
    ),
    "a module of the user's": lambda model: model.blocks[0].add_module("put_in", Probe()),
    "a part that two blocks use": lambda model: setattr(
        model.blocks[2], "attn", model.blocks[0].attn
    ),
    "dropout that is on": lambda model: model.blocks[0].add_module("put_in", nn.Dropout()),
    "a forward of the block's own": lambda model: own_forward(model.blocks[0]),
    "a forward of the model's own": own_forward,
    "an argument that is not known": lambda model: {"start_at_layer": None},
    "autograd": lambda model: torch.enable_grad(),
}
"""What is done to a model; it may give hooks of each run, arguments, or a context to be in."""


@pytest.mark.parametrize("name", CASES)
def test_sweep_starts_at_block_0_where_an_earlier_one_may_differ(name, model, tokens):
    given = CASES[name](model)
    hooks = given if isinstance(given, list) else []
    arguments = given if isinstance(given, dict) else {}
    runs = [[*at(3), *hooks], [*at(4), *hooks]]
    with given if hasattr(given, "__enter__") else contextlib.nullcontext():
        expected = looped(model, tokens, runs, **arguments)
        with blocks_run(model) as count:  # from here on, its class has another forward
            actual = list(tl_devicefix.sweep(model, tokens, runs, **arguments))
    assert_bit_equal(actual, expected)
    assert count.blocks == 2 * N_LAYERS


def test_sweep_starts_at_the_first_block_with_a_users_hook(model, tokens):
    model.add_perma_hook("blocks.2.hook_mlp_out", leave)
    with blocks_run(model) as count:
        list(tl_devicefix.sweep(model, tokens, [at(4)]))
    assert count.blocks == 2 + 3  # two of the unpatched run


@pytest.mark.bridge
def test_a_relay_between_hook_points_is_no_users_hook(on_one, tokens):
    """TransformerLens 4.3 passes what an OPT's layers get on to hook points of the MLP."""
    model = on_one("opt")
    for layer in (3, 1):
        expected = looped(model, tokens, [at(3), at(4)])
        with blocks_run(model) as count:
            actual = list(tl_devicefix.sweep(model, tokens, [at(3), at(4)]))
        assert_bit_equal(actual, expected)
        assert count.blocks == (7 if layer == 3 else 9)  # with 4, or 1, of the unpatched run
        model.add_perma_hook("blocks.1.mlp.hook_out", leave)


@pytest.mark.bridge
@pytest.mark.parametrize("why", ["in training mode", "unknown blocks"])
def test_sweep_of_a_bridge_starts_at_the_first_block(why, on_one, tokens):
    model = on_one("gpt2")
    if why == "in training mode":
        model.train()
    else:
        model.cfg.architecture = "SharesKeysForCausalLM"
    with blocks_run(model) as count:
        list(tl_devicefix.sweep(model, tokens, [at(4)]))
    assert count.blocks == N_LAYERS


@pytest.mark.parametrize("go_on", [next, lambda results: results.close()], ids=["next", "close"])
def test_weight_changed_between_runs_of_a_sweep_is_refused(go_on, model, tokens):
    results = tl_devicefix.sweep(model, tokens, [at(3), at(4), at(2)])
    next(results)
    next(model.blocks[0].parameters()).mul_(2)
    with pytest.raises(RuntimeError, match=r"blocks\.0\..* was changed before result 1"):
        go_on(results)


@pytest.mark.parametrize("n_runs", [1, 3, 8])
def test_changes_after_the_last_run_of_a_sweep_are_allowed(n_runs, model, tokens):
    runs = [at(3)] * n_runs
    for number, _ in enumerate(tl_devicefix.sweep(model, tokens, runs), 1):
        if number == n_runs:
            next(model.blocks[0].parameters()).mul_(2)
            model.add_perma_hook("blocks.0.hook_mlp_out", leave)


def test_hooks_changed_between_runs_of_a_sweep_are_refused(model, tokens):
    of_block = r"hooks on blocks\.0\..* were added or removed"
    results = tl_devicefix.sweep(model, tokens, [at(3), at(4)])
    next(results)
    model.add_perma_hook("blocks.0.hook_mlp_out", leave)
    with pytest.raises(RuntimeError, match=of_block):
        next(results)
    results = tl_devicefix.sweep(model, tokens, [at(3)] * 5)
    list(zip(range(3), results))
    model.reset_hooks(including_permanent=True)
    with pytest.raises(RuntimeError, match=of_block):
        next(results)


@pytest.mark.hooked
def test_hooks_left_by_an_earlier_run_go_after_the_first(model, tokens):
    """As in a loop, whose later runs lack them: a sweep has one state of hooks for all runs."""
    model.run_with_hooks(tokens, fwd_hooks=at(4), reset_hooks_end=False)
    results = tl_devicefix.sweep(model, tokens, [at(3), at(3)])
    with pytest.raises(RuntimeError, match=r"hooks on blocks\.4\..* were added or removed"):
        next(results)
    assert traces(model) == []


@pytest.mark.hooked
def test_a_sweep_runs_a_subclass_s_own_reset_hooks(model, tokens):
    class Own(type(model)):
        n_resets = 0

        def reset_hooks(self, *args, **kwargs):
            self.n_resets += 1
            return super().reset_hooks(*args, **kwargs)

    model.__class__ = Own
    expected = looped(model, tokens, RUNS[:3])
    assert_bit_equal(list(tl_devicefix.sweep(model, tokens, RUNS[:3])), expected)
    assert model.n_resets == 2 * 3


MLP_OUT = "blocks.3.hook_mlp_out"
WITHOUT_HOOKS = {
    r"no hook point '\S*mlp_uot': take a name": [("blocks.3.hook_mlp_uot", print)],
    r"run 0 is a tuple \(name, function\): put it into a list, \[\[\(": (MLP_OUT, print),
    rf"but has \(<built-in function print>, '{MLP_OUT}'\) in \[\(": [(print, MLP_OUT)],
    rf"but has 'b' in '{MLP_OUT}'": MLP_OUT,
    "but has <built-in function print> in <": print,
}


def test_sweep_refuses_bad_arguments(model_class, model, tokens):
    with pytest.raises(TypeError, match="but this is a Tensor: give the model first"):
        tl_devicefix.sweep(tokens, model, [])
    for batches in ([tokens, tokens], (tokens,), {"input": tokens}):
        with pytest.raises(TypeError, match="for several batches, call sweep for each"):
            tl_devicefix.sweep(model, batches, [])
    with pytest.raises(TypeError, match=r"^sweep\(\) has no argument 'progres'.* mean 'progress'"):
        tl_devicefix.sweep(model, tokens, [], progres=True)
    if model_class != BRIDGE:  # which passes them on to transformers
        with pytest.raises(TypeError, match=r"^sweep\(\) has no argument 'remove_batch_dim'"):
            tl_devicefix.sweep(model, tokens, [], remove_batch_dim=True)
    with pytest.raises(ValueError, match="leave out reset_hooks_end"):
        tl_devicefix.sweep(model, tokens, [], reset_hooks_end=False)
    for words, run in WITHOUT_HOOKS.items():
        with pytest.raises(ValueError, match=words):
            next(tl_devicefix.sweep(model, tokens, [run]))


# `transformer_lens.patching` by way of `sweep`; tests/surface calls more of its functions.


def patch(function, model, tokens, metric=metric, **arguments):
    """Patch into what the model does with tokens what it does with others."""
    clean = model.run_with_cache(tokens + 1)[1]
    return getattr(patching, function)(model, tokens, clean, metric, **arguments)


def unpatched(*args, **arguments):
    with tl_devicefix.disabled():
        return patch(*args, **arguments)


@pytest.fixture
def few(tokens):
    """Few tokens, as there is a run for each of them, or each pair."""
    return tokens[:1, :2] // 2


def test_patching_with_a_table_of_indices_gives_the_same(model, few):
    rows = pandas.DataFrame([(4, 1), (0, 0), (3, 1)], columns=["layer", "pos"])
    arguments = {"patch_setter": patching.layer_pos_patch_setter, "index_df": rows}
    arguments["activation_name"] = "resid_pre"
    expected = unpatched("generic_activation_patch", model, few, **arguments)
    actual = patch("generic_activation_patch", model, few, **arguments, return_index_df=True)
    assert torch.equal(actual[0], expected)
    assert actual[1] is rows


@pytest.mark.skipif(
    installed().major < 4, reason="patching takes these arguments since TransformerLens 4"
)
def test_patching_with_several_metrics_and_baseline_is_the_same(model, tokens):
    few = tokens[:, :2]
    metrics = {"one": lambda logits: logits[:, -1, 5], "two": lambda logits: -logits[:, -1, 5]}
    arguments = {"metric": metrics, "reduce": "none", "baseline": True}
    expected = unpatched("get_act_patch_mlp_out", model, few, **arguments)
    actual = patch("get_act_patch_mlp_out", model, few, **arguments)
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.baseline, expected.baseline)


def test_patching_every_layer_runs_about_half_of_the_blocks(model, few):
    """Of n layers (n + 1) / 2n, and once the unpatched run: from 12 layers on, at most 0.55."""
    clean = model.run_with_cache(few + 1)[1]
    with blocks_run(model) as count:
        patching.get_act_patch_resid_pre(model, few, clean, metric)
    runs_per_layer = few.shape[1]
    assert count.blocks == runs_per_layer * N_LAYERS * (N_LAYERS + 1) / 2 + N_LAYERS
    assert traces(model) == []


@pytest.mark.skipif(
    "n_key_value_heads" not in patching.generic_activation_patch.__wrapped__.__code__.co_names,
    reason="TransformerLens 2.16 counts as many heads of values as of queries",
)
def test_patching_reaches_each_of_the_grouped_heads(model, few):
    assert model.cfg.n_key_value_heads < model.cfg.n_heads
    for name in ("k", "v"):
        function = f"get_act_patch_attn_head_{name}_all_pos"
        assert torch.equal(patch(function, model, few), unpatched(function, model, few))


def test_patching_runs_in_another_order_are_refused(model, few):
    clean = model.run_with_cache(few + 1)[1]
    other_order = mock.patch("tl_devicefix.pipelining.patching._indices", return_value=[[1, 0]])
    with other_order, pytest.raises(RuntimeError, match=r"\[0, 0\].* the sweep .*\[1, 0\]"):
        patching.get_act_patch_resid_pre(model, few, clean, metric)


def test_a_model_of_neither_class_is_left_to_transformer_lens(model, few):
    clean = model.run_with_cache(few + 1)[1]
    wrapped = SimpleNamespace(cfg=model.cfg, run_with_hooks=model.run_with_hooks)
    actual = patching.get_act_patch_resid_pre(wrapped, few, clean, metric)
    assert torch.equal(actual, unpatched("get_act_patch_resid_pre", model, few))
