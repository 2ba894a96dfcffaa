"""A view of a model is the model, with hooks of its own: of either class, wherever it is."""

import copy
import gc
import pickle
import threading
import types
import weakref
from collections import OrderedDict
from functools import partial

import pytest
import torch
from comparison import assert_bit_equal, in_use
from model_classes import BRIDGE, HOOKED
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformer_lens.hook_points import HookPoint

import tl_devicefix
from tl_devicefix.adapters import adapter_of
from tl_devicefix.dispatch.views import _State
from tl_devicefix.fusing.listening import Listeners

RESIDUAL = "blocks.3.hook_resid_post"
with_offloaded = pytest.mark.parametrize("spread", [2, "some of three devices"])


@pytest.fixture
def model(kind, spread, load):
    """A new model; without compatibility mode, if it is a Bridge with offloaded blocks."""
    return load(kind, spread, folded=True if isinstance(spread, int) else None)


def view_of(model):
    return adapter_of(model).view_of(model)


@pytest.mark.parametrize(
    ("model_class", "kind"), [(HOOKED, "bloom"), (BRIDGE, "gpt2"), (BRIDGE, "mixtral")]
)
def test_view_gives_the_models_results_bit_for_bit(model, at_home):
    def results(model):
        hooks = [(RESIDUAL, lambda activation, hook: activation / 2)]
        hooked = model.run_with_hooks(at_home, fwd_hooks=hooks)
        return [hooked, dict(model.run_with_cache(at_home)[1].items())]

    made = view_of(model)
    assert type(made.model) is type(model)
    assert not made.is_captured
    assert_bit_equal(results(made.model), results(model))


def test_a_views_split_inputs_are_its_residual_stream(model, at_home):
    """A Bridge's block hands the stream to its attention by a proxy."""
    model.set_use_split_qkv_input(True)

    def split_inputs(model):
        _, cache = model.run_with_cache(at_home, names_filter=lambda name: "q_input" in name)
        return dict(cache.items())

    expected = split_inputs(model)
    assert expected
    assert_bit_equal(split_inputs(view_of(model).model), expected)


def reached_from(value):
    """All objects that this one leads to, but for what modules and classes define."""
    seen, to_see = set(), [value]
    while to_see:
        thing = to_see.pop()
        of_module = isinstance(thing, dict) and "__builtins__" in thing
        if not of_module and not isinstance(thing, (type, types.ModuleType, types.FrameType)):
            if id(thing) not in seen:
                yield thing
                to_see += gc.get_referents(thing)
            seen.add(id(thing))


@with_offloaded
def test_view_shares_weights_but_no_modules(model, machine):
    add_all_kinds_of_hooks(model, [])
    originals = {id(module) for module in model.modules()}
    if hasattr(model, "original_model"):
        originals |= {id(module) for module in model.original_model.modules()}
    before = in_use(machine)

    view = view_of(model).model

    assert in_use(machine) == before
    assert not originals.intersection(map(id, reached_from(vars(view))))
    for tensors in ("named_parameters", "named_buffers"):
        own = list(getattr(model, tensors)(remove_duplicate=False))
        seen = list(getattr(view, tensors)(remove_duplicate=False))
        assert [name for name, _ in seen] == [name for name, _ in own]
        assert all(one is other for (_, one), (_, other) in zip(seen, own))
    assert list(view.state_dict()) == list(model.state_dict())
    for name in ("cfg", "placement"):
        assert getattr(view, name) is getattr(model, name)


@with_offloaded
def test_dropped_view_is_freed_without_garbage_collection(model, at_home):
    view = view_of(model)
    view.model(at_home)
    view.restore()
    gone = weakref.ref(view.model), weakref.ref(view.model.blocks[0])

    gc.disable()
    try:
        del view
        assert gone[0]() is None
    finally:
        gc.enable()
    gc.collect()  # accelerate's and the offloaded blocks' forwards hold their modules
    assert gone[1]() is None


def test_view_of_a_subclass_shares_the_attributes_it_adds(model, at_home):
    class Recording(type(model)):
        def __init__(self):
            raise AssertionError("called for a view")

        def record(self, activation, hook):
            self.results.append((self, hook.name))

    model.__class__ = Recording
    vars(model)["results"] = []
    vars(model)["watched"] = [model.blocks[1]]
    model.add_perma_hook(RESIDUAL, model.record)

    view = view_of(model).model
    view(at_home)

    assert type(view) is Recording
    assert view.watched[0] is view.blocks[1]
    assert view.results is model.results
    [(recorded_by, name)] = model.results
    assert recorded_by is view
    assert name == view.hook_dict[RESIDUAL].name


def add_all_kinds_of_hooks(model, calls):
    """Hooks that note what they are called with, in the order in which they are called."""

    def note(text, activation, hook):
        # In compatibility mode, a Bridge hands hooks something with an older name for the point.
        calls.append((text, hook.name, getattr(hook, "_target", hook)))

    def of_torch(module, args, output):
        calls.append(("torch's own", "", module))

    point = model.hook_dict[RESIDUAL]
    model.add_hook(RESIDUAL, partial(note, "second"))
    point.register_forward_hook(of_torch)
    model.add_perma_hook(RESIDUAL, partial(note, "permanent"))
    point.add_hook(partial(note, "first"), prepend=True)
    point.add_hook(partial(note, "within a context"), level=1)
    model.add_hook(RESIDUAL, partial(note, "backward"), dir="bwd")


def test_view_runs_the_models_hooks_with_its_own_hook_points(model, at_home):
    calls = []
    add_all_kinds_of_hooks(model, calls)
    model(at_home, return_type="loss").backward()
    expected = [call[:2] for call in calls]
    assert len(expected) == 6
    calls.clear()

    view = view_of(model).model
    view(at_home, return_type="loss").backward()

    point, own = view.hook_dict[RESIDUAL], model.hook_dict[RESIDUAL]
    assert [call[:2] for call in calls] == expected
    assert [call[0] for call in calls if call[2] is not point] == []
    described = [
        [
            (h.is_permanent, h.context_level, getattr(h, "user_hook", None), h.hook.id)
            for h in (*hook_point.fwd_hooks, *hook_point.bwd_hooks)
        ]
        for hook_point in (point, own)
    ]
    assert described[0] == described[1]


@pytest.mark.fuses
@torch.no_grad()
@pytest.mark.parametrize("bind_first", [True, False])
def test_a_fused_view_calls_a_hook_on_any_module(bind_first, model_class, load, tokens):
    model, called = load("gpt2", device="cpu", folded=True), []
    if bind_first and model_class == HOOKED:
        model.blocks[-1].attn = copy.deepcopy(model.blocks[-1].attn)
    residual, last = model(tokens, stop_at_layer=-1), len(model.blocks) - 1

    def registered(model):
        for name, module in model.blocks[last].named_modules():
            note = lambda *given, name=name: called.append(name)  # noqa: E731
            yield module.register_forward_hook(note)

    handles = list(registered(model))
    model(residual, start_at_layer=last)
    expected = set(called)
    for handle in handles:
        handle.remove()
    tl_devicefix.fuse_blocks(model)
    if bind_first:
        model(tokens)
    view = view_of(model).model
    called.clear()
    for handle in registered(view):  # each alone
        view(residual, start_at_layer=last)
        handle.remove()
    assert set(called) == expected


def halve(activation, hook):
    return activation / 2


@pytest.mark.fuses
def test_a_view_has_the_hooks_back_that_a_run_removed(model, at_home):
    tl_devicefix.fuse_blocks(model)
    model.hook_dict[RESIDUAL].add_hook(halve, is_permanent=True)
    expected, view = model(at_home), view_of(model)

    def assign_others(model):
        model.hook_dict[RESIDUAL]._forward_hooks = OrderedDict()

    for remove in (lambda model: model.reset_hooks(including_permanent=True), assign_others):
        remove(view.model)
        assert not torch.equal(view.model(at_home), expected)
        view.restore()
        assert_bit_equal(view.model(at_home), expected)


@pytest.mark.fuses
@with_offloaded
def test_a_fused_view_with_hooks_within_blocks_is_the_model(model, at_home):
    """Bit for bit: its blocks run fused too, with the same attention."""
    tl_devicefix.fuse_blocks(model)
    model(at_home)
    view = view_of(model).model
    for layer in range(len(model.blocks)):
        hooks = [(f"blocks.{layer}.hook_attn_out", halve)]
        actual = view.run_with_hooks(at_home, fwd_hooks=hooks)
        assert_bit_equal(actual, model.run_with_hooks(at_home, fwd_hooks=hooks))


@pytest.mark.fuses
def test_only_the_fused_block_with_a_new_hook_looks_for_hooks(model, at_home, monkeypatch):
    """And none is bound again, as in each run that would take 20 ms at 80 layers."""
    tl_devicefix.fuse_blocks(model)
    hooks = [(RESIDUAL, halve)]
    expected = model.run_with_hooks(at_home, fwd_hooks=hooks)
    bound, looked = [], []
    for name, calls in (("__init__", bound), ("_now", looked)):
        own = getattr(Listeners, name)
        note = lambda self, *args, own=own, calls=calls: calls.append(self) or own(self, *args)  # noqa: E731
        monkeypatch.setattr(Listeners, name, note)

    made = view_of(model)
    for _ in range(3):
        looked.clear()
        assert_bit_equal(made.model.run_with_hooks(at_home, fwd_hooks=hooks), expected)
        made.restore()
        nn.Linear(2, 2)  # a module of another model
    assert len(set(map(id, looked))) == 1
    assert not bound
    made.model.blocks[1].register_forward_hook(lambda block, args, output: None)  # not noted
    made.model(at_home)
    assert len(set(map(id, looked))) >= len(model.blocks)


FIRST_USES = {
    "hook": lambda point: point.add_hook(lambda activation, hook: None),
    "pre-hook": lambda point: point.register_forward_pre_hook(lambda point, args: None),
    "list": lambda point: point.fwd_hooks.append(None),
    "context": lambda point: point.ctx.update(kept=1),
    "attribute": lambda point: setattr(point, "found", 1),
    "dict": lambda point: vars(point).update(found=1),
    "copy": lambda point: copy.copy(point).fwd_hooks.append(None),
    "pickle": lambda point: pickle.loads(pickle.dumps(copy.deepcopy(point))).ctx.update(kept=1),
}


def test_first_use_of_a_hook_point_changes_that_view_alone(model):
    before = {name: len(vars(point)) for name, point in model.hook_dict.items()}
    for use, change in FIRST_USES.items():
        made, other = view_of(model), view_of(model)
        change(made.model.hook_dict[RESIDUAL])
        for untouched in (model, other.model):
            point = untouched.hook_dict[RESIDUAL]
            held = point.fwd_hooks, point._forward_hooks, point._forward_pre_hooks, point.ctx
            assert not any(held), use
            assert not hasattr(point, "found"), use
        made.restore()
        point = made.model.hook_dict[RESIDUAL]
        assert type(point) is type(model.hook_dict[RESIDUAL]), use
        assert not any((point._forward_hooks, point._forward_pre_hooks, point.ctx)), use
        assert {name: len(vars(point)) for name, point in model.hook_dict.items()} == before, use


def test_a_view_calls_what_hooks_every_module(model, at_home, monkeypatch):
    view, called, forward = view_of(model).model, [], HookPoint.forward
    note = lambda module, *rest: called.append(getattr(module, "name", None))  # noqa: E731
    handle = register_module_forward_hook(note)
    view(at_home)
    handle.remove()
    assert model.hook_dict[RESIDUAL].name in called

    called.clear()
    noting = lambda point, x: note(point) or forward(point, x)  # noqa: E731
    monkeypatch.setattr(HookPoint, "forward", noting)
    view_of(model).model(at_home)
    assert model.hook_dict[RESIDUAL].name in called


def test_threads_of_a_run_may_use_a_hook_point_first(model, monkeypatch):
    point, own = view_of(model).model.hook_dict[RESIDUAL], _State.give_own
    reading, others = threading.Event(), []

    def read():
        reading.set()
        others.append(point.fwd_hooks)

    other = threading.Thread(target=read)

    def give_own(state, *arguments):
        if not reading.is_set():
            other.start()
            reading.wait()
        own(state, *arguments)

    monkeypatch.setattr(_State, "give_own", give_own)
    mine = point.fwd_hooks
    other.join()
    assert others[0] is mine
    assert mine is not model.hook_dict[RESIDUAL].fwd_hooks


def test_a_view_leaves_a_list_that_it_shares_with_its_user(model):
    model.results = model.ln_final._results = results = [1]
    made = view_of(model)
    made.model.ln_final.register_forward_hook(lambda module, args, output: None)
    results.append(2)
    made.restore()
    assert results == [1, 2]


def test_making_a_view_starts_no_garbage_collection(model):
    started = []
    note = lambda phase, info: started.append(phase)  # noqa: E731
    gc.collect()
    gc.callbacks.append(note)
    try:
        view_of(model)
    finally:
        gc.callbacks.remove(note)
    assert len(started) <= 2  # one afterwards: it starts and stops


def clear_contexts(view):
    view.reset_hooks(clear_contexts=True)
    assert not view.hook_dict[RESIDUAL].ctx


def change_everything(view):
    block, point = view.blocks[1], view.hook_dict[RESIDUAL]
    add_all_kinds_of_hooks(view, [])
    block.register_forward_pre_hook(lambda block, args: None)
    point.ctx["kept"] = torch.ones(3)
    vars(block)["of a run"] = True
    block.attn.register_buffer("put_in", torch.ones(2), persistent=False)
    vars(block.attn)["foo"] = [view]
    vars(view)["results"] = [1]
    block.mlp._modules["extra"] = nn.Linear(2, 2)
    for module in view.blocks[2].mlp.modules():
        module._parameters.clear()
    del view.hook_dict["blocks.0.hook_resid_pre"]


def state_of(model):
    """What restoring must bring back, by the modules' names."""
    state = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            value = list(value.items()) if isinstance(value, dict) else value
            value = list(value) if isinstance(value, (list, set)) else value
            state[f"{name}: {attribute}"] = value
    return state


@with_offloaded
def test_restoring_a_view_undoes_everything_a_run_changed(model, at_home):
    expected, calls = model(at_home), []
    add_all_kinds_of_hooks(model, calls)
    model.hook_dict[RESIDUAL].ctx["of the model"] = 1
    of_model, of_run = state_of(model), view_of(model)
    view = of_run.model
    made = state_of(view)

    def reset_hooks(view):
        view.reset_hooks(including_permanent=True)
        assert not view.hook_dict[RESIDUAL].ctx

    for change in (clear_contexts, change_everything, reset_hooks):
        change(view)
        of_run.restore()

        now = state_of(view)
        assert now.keys() == made.keys()
        for name, value in made.items():
            assert type(now[name]) is type(value), name
            if not isinstance(value, torch.Tensor):
                assert now[name] is value or now[name] == value, name
        calls.clear()
        loss = view(at_home, return_type="both")
        assert_bit_equal(loss[0], expected)
        loss[1].backward()
        assert len(calls) == 6
    assert state_of(model).keys() == of_model.keys()
    assert_bit_equal(model(at_home), expected)
    view.hook_dict[RESIDUAL].fwd_hooks[0].hook.remove()
    assert len(view.hook_dict[RESIDUAL]._forward_hooks) == 4
    assert len(model.hook_dict[RESIDUAL]._forward_hooks) == 5
