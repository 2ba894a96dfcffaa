"""What `fuse_blocks` promises: whatever a user does to a fused model still takes effect.

Each test compares with the same model unfused, where TransformerLens's own forward runs.
"""

import copy
import gc
import io
import weakref
from collections import OrderedDict

import pytest
import torch
from attending import ShapesMade, assert_either_way, unfused, with_gradients
from comparison import assert_agrees
from hf_models import D_MODEL, N_LAYERS, padded
from model_classes import HOOKED
from parameters import in_turn
from runs_of_users import double
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch.utils.hooks import RemovableHandle

import tl_devicefix

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
    pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale:UserWarning"),
    pytest.mark.filterwarnings("ignore:Backward hooks on hook_scale:UserWarning"),
]


def double_output(module, args, output):
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def double_input(module, args):
    return (args[0] * 2, *args[1:]) if args else None


def double_gradient(module, of_inputs, of_outputs):
    return tuple(gradient * 2 for gradient in of_inputs if gradient is not None) or None


def assigned_whole(block):
    block.hook_resid_post._forward_hooks = OrderedDict()
    block.hook_resid_post.add_hook(double)


HOOKS = {
    "on z": lambda block: block.attn.hook_z.add_hook(double),
    "on queries": lambda block: block.attn.hook_q.add_hook(double),
    "on the pattern": lambda block: block.attn.hook_pattern.add_hook(double),
    "on scores": lambda block: block.attn.hook_attn_scores.add_hook(double),
    "in a norm": lambda block: block.ln1.hook_normalized.add_hook(double),
    "in the MLP": lambda block: block.mlp.hook_post.add_hook(double),
    "before the block": lambda block: block.hook_resid_pre.add_hook(double),
    "behind the block": lambda block: block.hook_resid_post.add_hook(double),
    "permanent": lambda block: block.hook_resid_post.add_hook(double, is_permanent=True),
    "backward": lambda block: block.attn.hook_z.add_hook(double, dir="bwd"),
    "in a dict of its own": assigned_whole,
    "torch's, on a hook point": lambda block: block.hook_resid_post.register_forward_hook(
        double_output
    ),
    "torch's, on the block": lambda block: block.register_forward_hook(double_output),
    "torch's, on attention": lambda block: block.attn.register_forward_hook(double_output),
    "torch's, before the MLP": lambda block: block.mlp.register_forward_pre_hook(double_input),
    "torch's, backward": lambda block: block.mlp.register_full_backward_hook(double_gradient),
}


def run_of(tokens, kind=""):
    """A run that shows a hook of this kind."""
    return with_gradients(tokens) if "backward" in kind else lambda model: model(tokens)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_acts_and_can_be_removed(kind, fused, tokens):
    model, run = fused(), run_of(tokens, kind)
    before = run(model)

    handle = HOOKS[kind](model.blocks[1])
    with_hook = assert_either_way(model, run)
    if isinstance(handle, RemovableHandle):
        handle.remove()
    else:
        model.reset_hooks(including_permanent=True)

    with pytest.raises(AssertionError):
        assert_agrees(with_hook, before)
    assert_agrees(run(model), before)


@pytest.mark.parametrize("remove", ["clear", "another dict"])
def test_hooks_removed_without_a_handle_are_gone(remove, fused, tokens):
    model = fused()
    before, point = model(tokens), model.blocks[1].attn.hook_z
    point.add_hook(double)
    assert not torch.allclose(model(tokens), before)

    if remove == "clear":
        point._forward_hooks.clear()
    else:
        point._forward_hooks = OrderedDict()

    assert_agrees(model(tokens), before)


def test_a_hook_for_all_modules_of_torch_acts(fused, tokens):
    model = fused()
    point = model.blocks[1].hook_resid_post
    handle = register_module_forward_hook(
        lambda module, args, output: output * 2 if module is point else None
    )
    try:
        assert_either_way(model, lambda model: model(tokens))
    finally:
        handle.remove()


def test_a_hook_may_add_another_for_the_next_block(fused, tokens):
    model = fused()
    later = model.blocks[3].attn.hook_pattern

    def add(activation, hook):
        later.add_hook(lambda pattern, hook: torch.ones_like(pattern) / 7)

    def run(model):
        try:
            return model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", add)])
        finally:
            model.reset_hooks()

    steered = assert_either_way(model, run)
    assert not torch.allclose(steered, model(tokens))


def test_an_edit_in_place_has_its_gradient(fused, tokens):
    def silence_a_head(z, hook):
        z[:, :, 1] = 0
        return z

    def run(model):
        with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", silence_a_head)]):
            return with_gradients(tokens)(model)

    assert_either_way(fused(), run)


def test_fused_activations_and_gradients_are_the_same(fused, tokens):
    def run(model):
        _, cache = model.run_with_cache(tokens, incl_bwd=True, return_type="loss")
        model.zero_grad(set_to_none=True)
        return dict(cache)

    assert_either_way(fused(), run)


def test_one_token_has_its_gradients_after_inference_mode(fused, tokens):
    model = fused()
    with torch.inference_mode():
        model(tokens)
    assert_either_way(model, with_gradients(tokens[:, :1]))


def weight_of(model):
    """A weight of which a fused block keeps a view."""
    attn = model.blocks[1].attn
    return attn.W_O if type(attn).__module__.endswith("grouped_query_attention") else attn.o.weight


def assign(model):
    weight, attn = weight_of(model), model.blocks[1].attn
    owner = attn if hasattr(attn, "_W_K") else attn.o.original_component
    name = "W_O" if owner is attn else "weight"
    setattr(owner, name, nn.Parameter(weight.detach() * 2))


def load(model):
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})


def drop_stream(model):
    block = model.blocks[1]
    name = "hook_out" if "hook_out" in block._modules else "hook_resid_post"
    setattr(block, name, nn.Dropout(1.0))


def replace_sines(model):
    """Give one block other rotary tables than those that all blocks share."""
    attn = model.blocks[1].attn
    if hasattr(attn, "rotary_sin"):
        attn.rotary_sin = attn.rotary_sin * 0.5
    else:  # a Bridge's tables come anew in each forward
        assign(model)


CHANGES = {
    "in place": lambda model: weight_of(model).data.mul_(2),
    "data": lambda model: setattr(weight_of(model), "data", weight_of(model).data * 2),
    "assigned": assign,
    "fewer heads": lambda model: setattr(weight_of(model), "data", weight_of(model).data.flip(0)),
    "a state dict": load,
    "a flag": lambda model: model.set_use_attn_result(True),
    "another flag": lambda model: model.set_use_split_qkv_input(True),
    "input of the MLP": lambda model: model.set_use_hook_mlp_in(True),
    "rotary sines of one block": replace_sines,
    "a module": lambda model: setattr(model.blocks[1], "mlp", nn.Linear(D_MODEL, D_MODEL)),
    "a hook point": drop_stream,
    "dtype": lambda model: model.to(torch.float64),
    "training": lambda model: model.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_acts_in_the_next_forward(change, fused, tokens):
    model = fused()
    with torch.no_grad():
        before = model(tokens)
        CHANGES[change](model)
        after = assert_either_way(model, lambda model: model(tokens))
    if change not in ("a flag", "another flag", "input of the MLP", "dtype", "training"):
        assert not torch.allclose(after, before)


@torch.no_grad()
@pytest.mark.hooked  # a TransformerBridge runs transformers' own parts
@pytest.mark.parametrize("change", ["pruned", "no bias", "a plain tensor", "another dtype"])
def test_a_part_with_other_parameters_runs_unfused(change, fused, tokens):
    model = fused("qwen3")
    mlp, norm = model.blocks[1].mlp, model.blocks[1].attn.q_norm
    model(tokens)
    if change == "pruned":
        prune.random_unstructured(mlp, "b_in", 0.5)
    elif change == "no bias":
        mlp.b_out = None
    elif change == "a plain tensor":
        doubled = norm.w.data * 2
        del norm.w
        norm.w = doubled
    else:
        norm.w.data = norm.w.data.half()
    assert_either_way(model, lambda model: model(tokens))
    assert tl_devicefix.report(model)["blocks.1"].startswith("not fused: ")


def test_a_norm_s_bias_may_have_another_dtype(model_class, fused, tokens):
    model = fused("gpt2", **({"fold_ln": False} if model_class == HOOKED else {}))
    norm = model.blocks[1].ln1
    bias = norm.b if model_class == HOOKED else norm.original_component.bias
    bias.data = bias.data.bfloat16()
    tl_devicefix.fuse_blocks(model)
    assert_either_way(model, lambda model: model(tokens))


@pytest.mark.bridge
def test_the_epsilon_of_a_bridges_config_acts_at_once(fused, tokens):
    bridge = fused("gpt2")
    before = bridge(tokens)
    bridge.cfg.eps = 0.1
    assert not torch.allclose(bridge(tokens), before)
    assert_either_way(bridge, lambda bridge: bridge(tokens))


def test_dropout_in_training_acts(model_class, fused, tokens):
    model = fused("gpt2").train()

    def run(model):
        torch.manual_seed(0)
        return model(tokens)

    assert_either_way(model, run)
    assert_either_way(model.eval(), run)


@pytest.mark.parametrize(
    ("kind", "where"), in_turn(["llama", "gpt2"], [slice(0, 3), slice(-3, None)])
)
def test_padding_changes_no_row_of_a_token(kind, where, fused, tokens):
    mask = padded(tokens, where)

    def run(model):
        logits, gradients = with_gradients(tokens, attention_mask=mask)(model)
        assert all(g is None or g.isfinite().all() for g in gradients)
        assert logits.isfinite().all()
        return logits[mask.bool()]

    assert_either_way(fused(kind), run)


def test_a_mask_edited_between_forwards_acts(fused, tokens):
    def run(model):
        mask = torch.ones_like(tokens)
        results = [model(tokens, attention_mask=mask)]
        mask[0, -3:] = 0
        results.append(model(tokens, attention_mask=mask))
        return [logits[:, :-3] for logits in results]

    with torch.no_grad():
        assert_either_way(fused(), run)


def test_fused_model_generates_the_same_text(fused, tokens):
    options = {"max_new_tokens": 6, "do_sample": False, "stop_at_eos": False, "verbose": False}
    assert_either_way(fused(), lambda model: model.generate(tokens, **options))


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_is_fused_and_has_its_own_hooks(how, model_class, fused, tokens, fused_blocks):
    model = fused()
    expected = model(tokens)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif model_class != HOOKED:
        pytest.skip("a TransformerBridge holds functions that cannot be pickled")
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    fused_blocks.clear()
    assert_agrees(copied(tokens), expected)
    assert len(fused_blocks) == N_LAYERS
    copied.blocks[1].hook_resid_post.add_hook(double)
    assert not torch.allclose(copied(tokens), expected)
    assert_agrees(model(tokens), expected)


def test_runs_in_flight_are_fused_and_restored(fused, tokens, fused_blocks):
    model = fused()
    expected = model(tokens)

    def run(view, doubles):
        if doubles:
            view.blocks[1].hook_resid_post.add_hook(double)
        return view(tokens)

    fused_blocks.clear()
    plain, doubled, again = tl_devicefix.pipeline_map(model, run, [False, True, False])

    assert len(fused_blocks) == 3 * N_LAYERS
    assert_agrees([plain, again], [expected, expected])
    assert not torch.allclose(doubled, expected)


def test_unfused_or_disabled_model_runs_its_own_forward(fused, tokens, fused_blocks):
    model = fused()
    model(tokens)
    assert len(fused_blocks) == N_LAYERS
    with tl_devicefix.disabled():
        model(tokens)
    assert len(fused_blocks) == N_LAYERS
    model(tokens)
    assert len(fused_blocks) == 2 * N_LAYERS
    tl_devicefix.unfuse_blocks(model)
    model(tokens)
    assert len(fused_blocks) == 2 * N_LAYERS
    assert set(tl_devicefix.report(model).values()) == {"not fused"}


def test_replaced_forward_acts_once_fused_again(model_class, fused, tokens):
    model = fused()
    before, block = model(tokens), model.blocks[1]
    attribute = "mlp" if model_class == HOOKED else "original_component"
    part = getattr(block, attribute)
    part.forward = lambda *args, **kwargs: type(part).forward(part, *args, **kwargs) * 2
    tl_devicefix.fuse_blocks(model)
    after = assert_either_way(model, lambda model: model(tokens))
    assert not torch.allclose(after, before)


def test_dropped_fused_model_is_freed(fused, tokens):
    model = fused("gpt2")
    model(tokens)
    block = weakref.ref(model.blocks[1])
    del model
    gc.collect()
    assert block() is None


def errors(model, tokens, dtype):
    """Distances from float64, fused and unfused."""
    exact = copy.deepcopy(model).double()
    for config in (exact.cfg, *[block.cfg for block in exact.blocks if hasattr(block, "cfg")]):
        config.dtype = torch.float64
    exact = unfused(exact, lambda model: model(tokens))
    model.cfg.dtype = dtype
    model.to(dtype)
    run = lambda model: float((model(tokens).double() - exact).abs().mean())  # noqa: E731
    return run(model), unfused(model, run)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "dtype"), in_turn(["llama", "gpt2"], [torch.bfloat16, torch.float32])
)
def test_fused_model_is_as_close_to_float64_as_unfused(kind, dtype, fused):
    prompts = torch.randint(0, 40, (64, 24), generator=torch.Generator().manual_seed(0))
    ours, theirs = errors(fused(kind), prompts, dtype)
    assert 0 < ours <= 1.1 * theirs


CALLED = [
    *("hook_resid_mid", "hook_attn_out", "hook_mlp_out", "mlp.hook_pre", "mlp.hook_post"),
    *(f"attn.hook_{name}" for name in "qkvz"),
]
"""Hook points in a block that a fused block calls."""


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        *(("llama", ""), ("gpt2", ""), ("pythia", ""), ("llama", "attn_result")),
        *(("gpt2", "attn_in"), ("llama", "split_qkv_input")),
    ],
)
def test_hooks_within_a_block_see_and_change_the_same(kind, flag, fused, tokens):
    # Pythia's attention and MLP are parallel, so nothing is between them.
    names = [name for name in CALLED if (kind, name) != ("pythia", "hook_resid_mid")]
    model, seen = fused(kind, folded=True), []
    if flag:
        getattr(model, f"set_use_{flag}")(True)

    def change(activation, hook):
        seen.append(activation.clone())
        return activation * 1.5

    def run(model):
        seen.clear()
        hooks = [(model.hook_dict[f"blocks.1.{name}"].name, change) for name in names]
        return model.run_with_hooks(tokens, fwd_hooks=hooks), [*seen]

    _, activations = assert_either_way(model, run)
    assert len(activations) == len(names)


@pytest.mark.parametrize("name", "qkv")
def test_a_hook_that_drops_positions_is_refused(name, fused, tokens):
    model = fused()  # SDPA would take it
    hook = f"blocks.1.attn.hook_{name}", lambda x, hook: x.mean(1, keepdim=True)
    with pytest.raises(RuntimeError, match=f"{name}.* returned another shape: expand"):
        model.run_with_hooks(tokens, fwd_hooks=[hook])


@torch.no_grad()
def test_no_pattern_is_built_unless_it_is_hooked(fused):
    model, tokens = fused(), torch.full((1, 29), 7)  # as many tokens as no other size is

    def of_pairs(*names):
        hooks = [(f"blocks.1.{name}", lambda value, hook: None) for name in names]
        with ShapesMade() as made:
            model.run_with_hooks(tokens, fwd_hooks=hooks)
        return bool(made.of_pairs(29))

    assert not of_pairs()
    assert not of_pairs(*CALLED, "hook_resid_pre", "hook_resid_post")
    assert of_pairs("attn.hook_pattern", *CALLED)
    assert not of_pairs()
    assert unfused(model, lambda model: of_pairs())


def test_fused_model_gives_the_same_spread_or_offloaded(fused, load, machine, tokens):
    expected = fused("gpt2")(tokens)
    mask = padded(tokens, slice(-3, None))
    expected_padded = fused("gpt2")(tokens, attention_mask=mask)[mask.bool()]
    for where in ({"n_devices": 4}, {"device_map": {"": 0, "blocks.1": "cpu", "blocks.3": "cpu"}}):
        model = load("gpt2", fuse_blocks=True, **where)
        for _ in range(2):
            assert_agrees(model(tokens), expected)
        assert_agrees(model(tokens, attention_mask=mask).cpu()[mask.bool()], expected_padded)
        assert set(tl_devicefix.report(model).values()) == {"fused"}


@pytest.mark.parametrize("at", ["hook_resid_pre", "attn.hook_q"])
def test_a_hook_that_hooks_its_own_fused_block_raises(at, fused, tokens):
    model = fused()

    def add(activation, hook):
        model.add_hook("blocks.3.attn.hook_pattern", double)

    def remove(activation, hook):
        model.hook_dict["blocks.3.attn.hook_pattern"].remove_hooks()

    removing = [(f"blocks.3.{name}", remove) for name in ("hook_mlp_out", "hook_resid_post")]
    hooks = [(f"blocks.3.{at}", add), *removing]
    with pytest.raises(RuntimeError, match="a hook added a hook to its own block, which is fused"):
        model.run_with_hooks(tokens, fwd_hooks=hooks)


def test_a_hook_may_hook_its_own_block_for_the_next_run(fused, tokens):
    def run(model):
        def add(activation, hook):
            model.add_hook("blocks.3.hook_resid_pre", double)

        first = model.run_with_hooks(
            tokens, fwd_hooks=[("blocks.3.hook_resid_post", add)], reset_hooks_end=False
        )
        results = first, model(tokens)
        model.reset_hooks()
        return results

    assert_either_way(fused(), run)
