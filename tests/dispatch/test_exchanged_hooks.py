"""Dicts of hooks that are exchanged whole, and hooks that are gone when a block has run."""

import contextlib
from collections import OrderedDict
from unittest import mock

import pytest
from comparison import assert_agrees
from model_classes import BRIDGE

import tl_devicefix


def doubled(activation, hook=None):
    return activation * 2


def put_back(run, point):
    point.add_hook(doubled)
    kept, point._forward_hooks = point._forward_hooks, OrderedDict()
    yield from (run(), run())
    point._forward_hooks = kept
    yield run()


def put_back_while_unpatched(run, point):
    point.add_hook(doubled)
    kept = point._forward_hooks
    for hooks in (OrderedDict(), kept):
        with tl_devicefix.disabled():
            point._forward_hooks = hooks
        yield from (run(), run())


def added_to_a_new_dict(run, point):
    """The idiom to remove all hooks, and one that is added later."""
    yield from (run(), run())
    point._forward_hooks = OrderedDict()
    yield run()
    point.add_hook(doubled)
    yield run()


def added_to_a_dict_by_mock(run, point):
    yield from (run(), run())
    with mock.patch.object(point, "_forward_pre_hooks", OrderedDict()):
        yield run()
        point.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        yield run()
    yield run()


@pytest.mark.parametrize(
    "scenario", [put_back, put_back_while_unpatched, added_to_a_new_dict, added_to_a_dict_by_mock]
)
def test_hooks_act_when_their_dict_is_exchanged(model_class, load, on_one, tokens, scenario):
    def outputs(model):
        x, block = tokens.to(model.cfg.device), model.blocks[1]
        point = block.mlp.hook_out if model_class == BRIDGE else block.hook_mlp_out
        return list(scenario(lambda: model(x), point))

    given, expected = outputs(load("llama")), outputs(on_one("llama"))
    assert not expected[-1].equal(expected[-2]) or not expected[-1].equal(expected[0])
    for ours, installed in zip(given, expected):
        assert_agrees(ours, installed)


def assert_a_replaced_forward_counts(model, tokens, part, register):
    """`register(replace)` registers a hook of torch's that calls `replace()`; as unpatched."""
    kind, forward = type(part), type(part).forward

    def outputs():
        with contextlib.ExitStack() as stack:

            def replace():
                replaced = lambda self, x: forward(self, x) * 3  # noqa: E731
                stack.enter_context(mock.patch.object(kind, "forward", replaced))

            before = [model(tokens), model(tokens)]
            stack.callback(register(replace).remove)
            return [*before, model(tokens)]

    with tl_devicefix.disabled():
        expected = outputs()
    assert not expected[1].equal(expected[2])
    for ours, installed in zip(outputs(), expected):
        assert_agrees(ours, installed)


def test_forward_replaced_by_a_removed_hook_acts(model_class, on_one, tokens):
    model = on_one("llama")
    point = model.blocks[0].hook_out if model_class == BRIDGE else model.blocks[0].hook_resid_post
    part = model.blocks[1].ln2.original_component if model_class == BRIDGE else model.blocks[1].mlp

    def register(replace):
        def once(module, args, output):
            handle.remove()
            replace()

        handle = point.register_forward_hook(once)
        return handle

    assert_a_replaced_forward_counts(model, tokens, part, register)


@pytest.mark.hooked
def test_forward_replaced_by_a_pre_hook_acts_in_its_block(on_one, tokens):
    model = on_one("llama")
    block = model.blocks[1]
    register = lambda replace: block.register_forward_pre_hook(lambda *_: replace())  # noqa: E731

    assert_a_replaced_forward_counts(model, tokens, block.mlp, register)
