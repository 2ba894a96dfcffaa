"""Hooks that are put aside for a forward, and put back without adding them again."""

from collections import OrderedDict
from contextlib import nullcontext

import pytest
from comparison import assert_agrees
from either_class import BRIDGE

import tl_devicefix


@pytest.mark.parametrize("unpatched", [False, True])
def test_hooks_put_back_count_again(cls, over_devices, on_one, tokens, unpatched):
    def run(model):
        x = tokens.to(model.cfg.device)
        block, outputs = model.blocks[1], []
        point = block.mlp.hook_out if cls == BRIDGE else block.hook_mlp_out
        point.add_hook(lambda activation, hook: activation * 2)
        for hooks in (none := OrderedDict(), none, point._forward_hooks):
            with tl_devicefix.disabled() if unpatched else nullcontext():
                point._forward_hooks = hooks
            outputs.append(model(x))
        return outputs

    given, expected = run(over_devices("llama")), run(on_one("llama"))
    assert not expected[1].equal(expected[2])
    for ours, installed in zip(given, expected):
        assert_agrees(ours, installed)
