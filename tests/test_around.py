"""What an `Around` does, and how several stand around one module."""

import copy
import pickle

import pytest
from torch import nn

from tl_devicefix.around import Around

CALLS = []


class Outer(Around):
    """Has all three methods."""

    def pre_forward(self, module, args, kwargs):
        CALLS.append("before")
        return (args[0] + "<", *args[1:]), kwargs

    def forward(self, module, run, args, kwargs):
        CALLS.append("outer")
        return run(*args, **kwargs) + ">"

    def post_forward(self, module, args, output):
        CALLS.append("after")
        return output + "|"


class Inner(Around):
    """Runs the module in brackets."""

    def forward(self, module, run, args, kwargs):
        CALLS.append("inner")
        return f"({run(*args, **kwargs)})"


@pytest.fixture
def module():
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: CALLS.append("user's pre-hook"))
    module.register_forward_hook(lambda *_: CALLS.append("user's hook"))
    for around in (Inner(), Outer()):
        around.attach(module)
    CALLS.clear()
    return module


def test_users_pre_hooks_and_hooks_run_after_ours(module):
    assert module("x") == "(x<)>|"
    assert CALLS == ["before", "user's pre-hook", "outer", "inner", "after", "user's hook"]


@pytest.mark.parametrize(
    ("detached", "output"),
    [(Inner, "x<>|"), (Outer, "(x)"), (Around, "x")],
    ids=["inner", "outer", "all"],
)
def test_detaching_a_class_leaves_the_others(detached, output, module):
    detached.detach(module)
    assert module("x") == output
    assert (Inner.of(module) is None) == (detached is not Outer)


def test_deep_copied_module_keeps_its_arounds(module):
    copied = copy.deepcopy(module)
    Outer.detach(module)
    assert copied("x") == "(x<)>|"


def test_module_without_its_arounds_is_as_before(module):
    fresh = nn.Identity()
    Outer().attach(fresh)
    assert pickle.loads(pickle.dumps(fresh))("x") == "x<>|"
    Outer.detach(fresh)
    assert "forward" not in vars(fresh)
    assert not fresh._forward_pre_hooks
    assert not fresh._forward_hooks
