"""Random cases of hooks, changes and runs, fused and not, over devices and not.

Each shows the same as with the installed TransformerLens on one CPU, which runs in a process of its
own. `nox -s fuzz` runs thousands, and `SEEDS=17:18 pytest tests/fuzz` one. A case that fails is
printed: to run it again with fewer operations, put it in the place of `draw(seed)`.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import random
import re
import sys
import typing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
from models import EMBED, IS_BRIDGE, KINDS, PLACEMENTS, Point, build, names_in
from operations import CHANGES, RUNS, SETTINGS, Setting, Trial

SEEDS = os.environ.get("SEEDS", "0:6" if IS_BRIDGE else "0:18")


@pytest.fixture(scope="module")
def elsewhere():
    """An executor with a process in which importing the package is an error."""
    prepare = "import sys, torch; sys.modules['tl_devicefix'] = None; torch.set_num_threads(1)"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, exec, (prepare,)) as executor:
        yield executor


@pytest.mark.parametrize("seed", range(*map(int, SEEDS.split(":"))))
def test_a_random_case_is_as_installed(seed, elsewhere, monkeypatch):
    from comparison import assert_agrees  # here, because it imports the package

    # So that caches grow in place within a few tokens.
    monkeypatch.setattr("tl_devicefix.fusing.kv_cache.GROWS_FROM", 4)
    case = draw(seed)
    print(case)
    installed = elsewhere.submit(outcome, case._replace(placement={}, is_fused=False))
    actual, expected = pickle.loads(outcome(case)), pickle.loads(installed.result())
    for i, (ours, theirs) in enumerate(zip(actual, expected)):
        label, has_16_bits, *_ = theirs
        print(f"value {i}: {label}")
        tolerance = (0.1 if has_16_bits else 3e-5) if may_round(case) else 0.0
        assert_agrees(ours, theirs, tolerance=tolerance)
    assert len(actual) == len(expected)


class Case(NamedTuple):
    kind: str
    placement: dict[str, Any]
    is_fused: bool
    padding: str
    """Where the pad is, in runs that have one."""
    operations: list[tuple[Any, ...]]


def has(pattern: str, case: Any) -> bool:
    return re.search(pattern, str(case)) is not None


_16_BITS = "bfloat16|half|dtype"


def may_round(case: Case) -> bool:
    """Return True if results may differ by rounding; otherwise they have the same bits."""
    # Runs in a batch round otherwise, and the gradients of many runs are added up otherwise.
    differs = r"batches|many_runs', \d, 'enable_grad"
    if IS_BRIDGE:
        # The package folds weights in an order of its own, a Bridge's gradients are added up
        # otherwise, and some of its softmax is in float32.
        differs += "|compatible|enable_grad|True|bwd|float64|upcast"
    return bool(case.placement) or case.is_fused or has(differs, case)


def draw(seed: int) -> Case:
    """The case of a seed."""
    random_ = random.Random(seed)
    kind, placement = random_.choice(KINDS), random_.choice(PLACEMENTS)
    is_fused, padding = random_.random() < 0.8, random_.choice(("middle", "middle", "left"))
    never = "IGNORE"  # fused attention takes masked scores for minus infinity
    if placement:
        # Blocks of one device share masks and rotary tables, which on one CPU all do. README has
        # edits in place at a boundary.
        never += "|rotary_[sc]|mask'|(resid_pre|_cos|_sin)', 'edit in place'|edit in place', 'bwd'"
    if padding == "left":  # because others would see a row that sees no token
        never += "|zero|bidirectional"
    if kind in ("mixtral", "olmoe"):  # because rounding decides which expert is chosen
        never += f"|{_16_BITS}"
    draws = Draws(random_, {Setting: SETTINGS, **names_in(kind)}, never)
    operations = [draws.operation() for _ in range(random_.randint(3, 8))]
    case = Case(kind, placement, is_fused, padding, [*operations, draws.one_of(RUNS)])
    if may_round(case) and has(_16_BITS, case):  # rounding decides which token is likeliest
        case.operations[:] = [op for op in case.operations if op[0] != "generate"]
    return case


class Draws(NamedTuple):
    """Draws operations on what a model has."""

    random: random.Random
    pools: dict[Any, Any]
    """For types of arguments."""
    never: str
    """A pattern of operations that are not drawn."""

    def operation(self) -> tuple[Any, ...]:
        """A run, a change, or a change that a hook makes within a later run."""
        draw = self.random.random()
        if draw < 0.85:
            return self.one_of(RUNS if draw < 0.35 else CHANGES)
        # Such a change acts from the next block on. So a block's hook changes another block, and
        # the embedding's hook anything but embeddings.
        where = self.random.choice((EMBED, EMBED, "blocks.0", "blocks.1"))
        may_name = "^(?!.*embed)" if where == EMBED else f"^(?!.*{where}).*blocks"
        # Backward needs the tensors that forward had. Half way, a fused block casts where
        # TransformerLens's raises, and torch ends the process if simulated devices do.
        never = f"'in place'|float64|{_16_BITS}"
        if IS_BRIDGE:  # which refuses, in a forward, hooks that may see a mask
            never += "|torch_hook|replace_module"
        point = self.random.choice([name for name in self.pools[Point] if where in name])
        while True:
            change = self.one_of(CHANGES)
            if has(may_name, change) and not has(never, change):
                return "within", point, change

    def one_of(self, operations: list[Any]) -> tuple[Any, ...]:
        """An operation, with arguments drawn by their types."""
        function = self.random.choice(operations)
        hints = typing.get_type_hints(function)
        pools = [self.pools.get(hint) or typing.get_args(hint) for hint in hints.values()]
        operation = function.__name__, *map(self.random.choice, filter(None, pools))
        return self.one_of(operations) if has(self.never, operation) else operation


def outcome(case: Case) -> bytes:
    """Build a case's model, do the operations on it, and return what was seen."""
    with contextlib.ExitStack() as stack:
        if case.placement:
            stack.enter_context(sys.modules["tl_devicefix"].simulate(4))
        build_one = functools.partial(build, case.kind, case.placement)
        trial = Trial(build_one(), functools.partial(build_one, seed=1), case.padding)
        if case.is_fused:
            sys.modules["tl_devicefix"].fuse_blocks(trial.model)
        for operation in case.operations:
            trial.do(operation)
    return pickle.dumps(trial.seen)  # because torch would share each tensor's memory
