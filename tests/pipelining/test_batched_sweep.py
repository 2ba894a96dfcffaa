"""`sweep(..., batch_size=n)`: n runs are one forward, and each hook sees the rows of its run."""

import functools

import pytest
import torch
from comparison import assert_agrees
from hf_models import padded
from offloads import weights_of
from runs_of_users import blocks_run, looped, metric
from transformer_lens import patching
from transformer_lens.hook_points import HookPoint

import tl_devicefix

pytestmark = pytest.mark.usefixtures("no_grad")


def in_place(activation, hook):
    activation[:, -1] *= 0.5


def in_place_and_returned(activation, hook):
    activation[:, 0] = 0
    return activation


def returned(activation, hook):
    return activation * 1.5


def over_the_batch(activation, hook):
    return activation - activation.mean(0, keepdim=True)


# In a batch, edits in place come before and after an edit that returns a tensor.
EDITS = in_place, returned, in_place_and_returned, over_the_batch


def batched(model, tokens, runs, batch_size=16, **arguments):
    return list(tl_devicefix.sweep(model, tokens, runs, batch_size=batch_size, **arguments))


def on_stream(layer, edit=returned):
    return [(f"blocks.{layer}.hook_resid_pre", edit)]


@pytest.mark.parametrize(("kind", "batch_size"), [("gpt2", 3), ("mixtral", 16)])
def test_batches_give_the_loops_results_at_every_hook_point(kind, batch_size, on_one, tokens):
    """Or refuse a hook point in a sentence; the last batch is a smaller one."""
    model = on_one(kind)
    names = [name for name in model.hook_dict if not name.startswith(("blocks.0.", "blocks.1."))]
    names = [name for name in names if not name.startswith(("blocks.3.", "blocks.4."))]
    refused, compared = set(), 0
    for i, name in enumerate(names):
        edits = EDITS if kind == "gpt2" else (EDITS[i % 4], EDITS[(i + 1) % 4])
        try:
            runs = [[(name, edit)] for edit in edits]
            expected = looped(model, tokens, runs)
        except (RuntimeError, ValueError):  # it is gated, or gives what cannot be edited in place
            continue
        try:
            actual = batched(model, tokens, runs, batch_size)
        except ValueError as error:
            if "pass batch_size=1" not in str(error):
                raise
            refused.add(name)
        else:
            assert_agrees(actual, expected, tolerance=2e-5)
            compared += 1
    assert compared > 20
    kept = ("cos", "sin", "pos_embed", "experts", "expert", "gate", "rotary", "mask", "router")
    kept += ("hook_normalized", "hook_scale")  # of a Bridge's norms
    assert all(any(part in name for part in kept) for name in refused), refused


@pytest.mark.parametrize("batch_size", [3, 16])
def test_batches_of_runs_at_several_blocks_give_the_loops(batch_size, on_one, tokens):
    model = on_one("llama")
    runs = [
        *([], on_stream(3), on_stream(1, in_place), on_stream(4)),
        [*on_stream(4), ("blocks.2.attn.hook_z", in_place)],
        [("hook_embed", in_place)],
        [(lambda name: name in ("blocks.1.hook_mlp_out", "blocks.3.hook_mlp_out"), returned)],
        [*on_stream(2), *on_stream(2, in_place), *on_stream(2, over_the_batch)],
    ]
    for arguments in (
        {},
        {"return_type": "loss"},
        {"return_type": "loss", "loss_per_token": True},
        {"return_type": "both"},
        {"return_type": None},
        {"stop_at_layer": 3},
        {"attention_mask": padded(tokens)},
        {"padding_side": "left", "return_type": "both"},
    ):
        inputs = ["w5 w6 w7", "w8"] if "padding_side" in arguments else tokens
        expected = looped(model, inputs, runs, **arguments)
        actual = batched(model, inputs, runs, batch_size, **arguments)
        assert_agrees(actual, expected, tolerance=2e-5)
    expected = looped(model, "w5 w6 w7", runs)
    assert_agrees(batched(model, "w5 w6 w7", runs, batch_size), expected, tolerance=2e-5)


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "hook_pos_embed"), ("opt", "blocks.2.hook_resid_mid")]
)
def test_edits_in_place_reach_no_other_run_of_a_batch(kind, name, on_one, tokens):
    """In a Bridge, positions are one row for all runs, and each hook of OPT gets a new view."""
    model = on_one(kind)
    runs = [[(name, edit)] for edit in (in_place, returned, in_place)] + [[]]
    expected = looped(model, tokens[:1], runs)
    assert_agrees(batched(model, tokens[:1], runs), expected, tolerance=2e-5)


@pytest.mark.bridge
def test_a_text_in_a_batch_gets_the_mask_of_one_text(on_one):
    model, runs = on_one("pythia"), [on_stream(1), on_stream(3)]
    model.tokenizer.pad_token, model.tokenizer.padding_side = model.tokenizer.bos_token, "left"
    expected = looped(model, "w5 w6 w7", runs, prepend_bos=True)
    actual = batched(model, "w5 w6 w7", runs, prepend_bos=True)
    assert_agrees(actual, expected, tolerance=2e-5)


def test_a_variable_that_changes_before_a_batch_is_refused(on_one, tokens):
    model, factors = on_one("llama"), (1.0, 1.5, 2.0)

    def of_layers():
        for n in range(3):
            yield on_stream(n, lambda a, hook: a * factors[n])  # noqa: B023  # of the test

    def of_layers_by_a_function():
        for n in range(3):

            def scaled(a, again=True):
                return scaled(a, False) if again else a * factors[n]  # noqa: B023

            yield on_stream(n, lambda a, hook, scaled=scaled: scaled(a))

    def last_changes():
        n = 1
        yield from [[]] * 4
        yield on_stream(1, lambda a, hook: a * factors[n])
        n = 2

    for runs, number in ((of_layers, 0), (of_layers_by_a_function, 0), (last_changes, 4)):
        message = rf"run {number} refers to n, which changed .* n=n: \.\.\."
        with pytest.raises(ValueError, match=message):
            batched(model, tokens, runs(), batch_size=3)
    alone = batched(model, tokens, of_layers(), batch_size=1)
    bound = (on_stream(n, lambda a, hook, n=n: a * factors[n]) for n in range(3))
    assert_agrees(batched(model, tokens, bound), alone, tolerance=2e-5)


def test_a_variable_may_change_between_batches(on_one, tokens):
    model, calls = on_one("llama"), []

    def of_layers():
        n_calls = 0

        def count(activation, hook):
            nonlocal n_calls
            calls.append(n_calls := n_calls + 1)

        for factor in (1.5, 2.0):
            for layer in (1, 2):
                hooks = on_stream(layer, lambda a, hook: a * factor)  # noqa: B023
                yield [*hooks, *on_stream(3, count)]

    assert_agrees(
        batched(model, tokens, of_layers(), 2), looped(model, tokens, of_layers()), tolerance=2e-5
    )
    assert calls == [1, 2, 3, 4] * 2


def test_a_hook_sees_its_own_rows_and_context(on_one, tokens):
    model, seen = on_one("llama"), []

    def keep(activation, hook, run):
        assert isinstance(hook, HookPoint)
        assert hook.layer() == 2
        if len(hook.ctx.get("runs", ())) == 2:
            hook.clear_context()
        hook.ctx = {"runs": [*hook.ctx.get("runs", ()), run]}
        seen.append((activation.clone(), hook.ctx["runs"]))

    name = "blocks.2.hook_resid_pre"
    runs = [[(name, functools.partial(keep, run=n))] * 3 for n in range(3)]
    batched(model, tokens, runs)
    expected = model.run_with_cache(tokens)[1][name]
    assert [runs for _, runs in seen] == [each for n in range(3) for each in ([n], [n, n], [n])]
    assert_agrees([rows for rows, _ in seen], [expected] * 9, tolerance=1e-5)
    assert not model.hook_dict[name].ctx


def test_what_a_hook_keeps_is_not_edited_by_other_hooks(on_one, tokens):
    """Of its own run, of the next one, and of the hook point after it on the same tensor."""
    model, kept = on_one("llama"), []
    before, at = "blocks.1.hook_resid_post", "blocks.2.hook_resid_pre"

    def keep(activation, hook):
        kept.append(activation)

    run = [(before, keep), (at, keep), (at, returned), (at, keep), (at, returned)]
    batched(model, tokens, [run, run])
    looped(model, tokens, [run])
    by_batch, by_loop = kept[:6], kept[6:]
    assert_agrees([by_batch[n] for n in (0, 2, 3)], by_loop, tolerance=1e-5)
    assert_agrees([by_batch[n] for n in (1, 4, 5)], by_loop, tolerance=1e-5)


def test_a_hook_point_that_passes_a_tensor_on_keeps_what_it_got(on_one, tokens):
    """A Bridge's residual stream is the tensor that its block's first norm gets, too."""
    model = on_one("llama")
    names = ["blocks.3.hook_resid_pre", "blocks.3.hook_in", "blocks.3.ln1.hook_in"]
    names = [name for name in names if name in model.hook_dict]
    runs = [[(name, returned)] for name in (*names, *reversed(names))]
    assert_agrees(batched(model, tokens, runs), looped(model, tokens, runs), tolerance=2e-5)


def test_a_batch_asks_the_models_own_loss(on_one, tokens):
    model = on_one("llama")
    own = vars(model)["loss_fn"] = lambda *args, **kwargs: torch.tensor(7.0)
    assert batched(model, tokens, [[], [], []], return_type="loss") == [7, 7, 7]
    assert vars(model)["loss_fn"] is own


def test_a_hook_asks_for_the_loss_of_its_own_rows(on_one, tokens):
    model = on_one("llama")
    seen = []

    def lens(activation, hook):
        seen.append(model.loss_fn(model.unembed(activation), tokens).item())
        several = torch.cat([activation] * 3), torch.cat([tokens] * 3)  # as many as the batch's
        seen.append(model.loss_fn(model.unembed(several[0]), several[1]).item())

    runs = [[("ln_final.hook_normalized", lens)]] * 3
    looped(model, tokens, runs)
    batched(model, tokens, runs)
    assert seen[6:] == pytest.approx(seen[:6], abs=1e-5)


def test_a_permanent_hook_asks_for_a_loss_of_its_own(on_one, tokens):
    model, losses = on_one("llama"), []

    def lens(activation, hook):
        losses.append(model.loss_fn(model.unembed(activation[:1]), tokens[:1]).item())

    model.add_perma_hook("ln_final.hook_normalized", lens)
    batched(model, tokens, [[], []], return_type="loss")
    assert len(losses) == 1


def test_a_hook_may_return_a_view_of_its_rows(on_one, tokens):
    model = on_one("llama")
    runs = [[("blocks.1.attn.hook_pattern", lambda a, hook: a.transpose(-1, -2))]] * 3
    assert_agrees(batched(model, tokens, runs), looped(model, tokens, runs), tolerance=2e-5)


def test_gradients_of_what_hooks_return_reach_each_run(on_one, tokens):
    model = on_one("llama")
    with torch.enable_grad():
        steering = [torch.zeros(model.cfg.d_model, requires_grad=True) for _ in range(2)]
        add = lambda activation, hook, vector: activation + vector  # noqa: E731
        runs = [on_stream(2, functools.partial(add, vector=vector)) for vector in steering]
        gradients = [
            torch.autograd.grad(sum(out.square().mean() for out in results), steering)
            for results in (batched(model, tokens, runs), looped(model, tokens, runs))
        ]
    assert_agrees(*gradients, tolerance=1e-5)


@pytest.mark.parametrize("name", ["hook_pos_embed", "blocks.2.hook_resid_pre"])
def test_gradients_reach_what_hooks_keep(name, on_one, tokens):
    model, kept = on_one("gpt2"), []

    def keep(activation, hook):
        activation.retain_grad()
        kept.append(activation)

    with torch.enable_grad():
        for results in (batched, looped):
            runs = [[(name, keep), *on_stream(3, keep)]] * 2
            outputs = results(model, tokens[:1], runs)
            sum(out[:, -1].square().mean() for out in outputs).backward()
    gradients = [activation.grad for activation in kept]
    in_order = [gradients[n] for n in (0, 2, 1, 3)]  # a batch calls hooks by hook points
    assert_agrees(in_order, gradients[4:], tolerance=1e-5)


def asks_for_gradient(activation, hook, by):
    by(activation)


ASKING = [
    (torch.Tensor.retain_grad, True),
    (lambda activation: activation.register_hook(torch.neg), True),
    (torch.Tensor.requires_grad_, False),
]


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["hook_resid_mid", "attn.q.hook_in", "ln1.hook_normalized"])
def test_a_gradient_that_a_batch_gives_in_part_is_refused(name, on_one, tokens):
    for by, grad_is_enabled in ASKING:
        runs = [[(f"blocks.2.{name}", functools.partial(asks_for_gradient, by=by))]] * 2
        refused = pytest.raises(ValueError, match=r"gradient .* batch_size=1")
        with torch.set_grad_enabled(grad_is_enabled), refused:
            batched(on_one("gpt2"), tokens, runs)


def test_batches_run_within_torch_func(on_one, tokens):
    model, runs = on_one("llama"), [[*on_stream(1), *on_stream(2, in_place)]] * 2

    def loss(vector, results):
        steer = [("blocks.3.hook_resid_pre", lambda a, hook: a + vector)]
        outputs = results(model, tokens, [[*run, *steer] for run in runs])
        return sum(out.square().mean() for out in outputs)

    vector = torch.zeros(model.cfg.d_model)
    gradients = [torch.func.grad(loss)(vector, results) for results in (batched, looped)]
    assert_agrees(*gradients, tolerance=1e-5)


def test_a_batch_starts_at_the_first_block_of_its_runs(on_one, tokens):
    model = on_one("llama")
    with blocks_run(model) as count:
        batched(model, tokens, [on_stream(4), on_stream(3), on_stream(4), on_stream(4)], 2)
    assert count.blocks == 2 + 1 + 4  # four of the unpatched run


@pytest.mark.parametrize(("fitting", "blocks"), [(9, 4), (4, 5), (0, 7)])
def test_a_sweep_backwards_computes_few_blocks_again(fitting, blocks, on_one, tokens, monkeypatch):
    """Each once if all streams fit; from block 2 with room for every second; else from block 0."""
    model = on_one("llama")
    size = tokens.numel() * model.cfg.d_model * 4
    monkeypatch.setattr("tl_devicefix.pipelining.sweep.MAX_KEPT_BYTES", max(1, fitting * size))
    runs = [on_stream(4), on_stream(3)]
    expected = looped(model, tokens, runs)
    with blocks_run(model) as count:
        assert_agrees(batched(model, tokens, runs, 1), expected, tolerance=0)
    of_runs = 1 + 2
    assert count.blocks - of_runs == blocks


def test_an_offloaded_block_is_copied_once_for_a_batch(machine, load, tokens):
    model = load("llama", "all of one device")
    at_home = tokens.to(model.cfg.device)
    sweep = tl_devicefix.sweep(model, at_home, [on_stream(0)] * 16, batch_size=16)
    machine.reset_transfers()
    next(sweep)
    sent = [t.bytes for t in machine.transfers if t.source.type == "cpu"]
    assert sum(sent) == sum(map(weights_of, model.blocks))


def test_what_cannot_be_in_a_batch_is_refused(on_one, tokens):
    model = on_one("llama")
    kv_cache = "past_key_values" if hasattr(model, "original_model") else "past_kv_cache"
    for words, arguments in {
        rf"{kv_cache}=<.* cannot be repeated": {kv_cache: object()},
        r"attention_mask=\[\[1]] cannot be repeated": {"attention_mask": [[1]]},
        "return_type='predictions' cannot be split": {"return_type": "predictions"},
    }.items():
        with pytest.raises(ValueError, match=rf"{words}.*batch_size=1"):
            batched(model, tokens, [[]], **arguments)
    for wrong in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="batch_size must be an int of 1 or more, but is"):
            batched(model, tokens, [[]], wrong)
    for edit in (lambda a, hook: a[:, :1], lambda a, hook: a.double(), lambda a, hook: 0.0):
        with pytest.raises(ValueError, match=r"hook on blocks\.2\..* returned .* shape and dtype"):
            batched(model, tokens, [on_stream(2, edit), []])


def test_an_error_in_a_batch_names_its_runs(on_one, tokens):
    def fail(activation, hook):
        raise torch.OutOfMemoryError("out of memory")

    results = tl_devicefix.sweep(
        on_one("llama"), tokens, [[], [], on_stream(2, fail), []], batch_size=2
    )
    assert len([next(results), next(results)]) == 2
    with pytest.raises(torch.OutOfMemoryError) as raised:
        next(results)
    said = f"{raised.value}\n{getattr(raised.value, '__notes__', '')}"
    assert "from run 2 to 3 of the sweep" in said
    assert "2 runs are one batch: lower batch_size=2" in said


def test_patching_in_batches_gives_transformer_lens_results(on_one, tokens):
    model, few = on_one("llama"), tokens[:1, :3]
    clean = model.run_with_cache(few + 1)[1]
    call = functools.partial(patching.get_act_patch_block_every, model, few, clean, metric)
    with tl_devicefix.disabled():
        expected = call()
    n_runs = []

    def counted(logits):
        n_runs.append(len(logits))
        return metric(logits)

    with tl_devicefix.batch_sweeps(4):
        actual = patching.get_act_patch_resid_pre(model, few, clean, counted)
    assert_agrees(actual, expected[0], tolerance=2e-5)
    assert n_runs == [1] * expected[0].numel()
    before = tl_devicefix.batch_sweeps(16)
    try:
        assert_agrees(call(), expected, tolerance=2e-5)
    finally:
        before.__exit__()
    assert torch.equal(call(), expected)
    with (
        tl_devicefix.batch_sweeps(0),
        pytest.raises(ValueError, match="batch_size must be an int of 1 or more"),
    ):
        call()


@pytest.mark.fuses
def test_batches_of_fused_blocks_give_the_loops_results(load, tokens):
    model = load("llama")
    tl_devicefix.fuse_blocks(model)
    runs = [on_stream(layer, edit) for layer in range(5) for edit in EDITS]
    assert_agrees(batched(model, tokens, runs), looped(model, tokens, runs), tolerance=2e-5)


def test_permanent_hooks_and_a_users_module_see_the_batch(load, tokens):
    model, seen = load("llama"), []

    class Halved(torch.nn.Module):
        def forward(self, activation):
            seen.append(len(activation))
            return activation * 0.5

    model.add_hook(
        "blocks.3.hook_resid_pre", lambda x, hook: seen.append(len(x)), is_permanent=True
    )
    block = model.blocks[2]
    is_bridge = hasattr(model, "original_model")
    part, name = (block.mlp, "hook_out") if is_bridge else (block, "hook_mlp_out")
    setattr(part, name, torch.nn.Sequential(getattr(part, name), Halved()))
    runs = [on_stream(layer) for layer in (1, 3)]
    expected = looped(model, tokens, runs)
    seen.clear()
    assert_agrees(batched(model, tokens, runs), expected, tolerance=2e-5)
    assert seen == [2 * len(tokens)] * 2


@pytest.mark.bridge
def test_position_ids_are_repeated(on_one, tokens):
    model, runs = on_one("llama"), [on_stream(layer) for layer in (1, 3)]
    for rows in (1, len(tokens)):
        positions = torch.arange(3, 3 + tokens.shape[1]).expand(rows, -1)
        expected = looped(model, tokens, runs, position_ids=positions)
        actual = batched(model, tokens, runs, position_ids=positions)
        assert_agrees(actual, expected, tolerance=2e-5)
