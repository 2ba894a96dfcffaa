"""A case of the random trial: a model and operations on it, all from one seed.

`outcome(case)` is what it shows: here with the package, and in a process of its own with the
installed TransformerLens alone, on one CPU.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from models import EMBED, IS_BRIDGE, KINDS, PLACEMENTS, Placement, Point, build, names_in
from operations import CHANGES, RUNS, SETTINGS, Setting, Trial

_DTYPES = "bfloat16|half|float64|'dtype'"


class Case(NamedTuple):
    """What `outcome` takes; its `repr` can be pasted."""

    kind: str
    placement: Placement
    is_fused: bool
    padding: str
    """Where the pad is, in runs that have one."""
    operations: list[tuple[Any, ...]]

    @property
    def tolerance(self) -> float:
        """What results may differ by; 0 if they have to have the same bits."""
        text = str(self)
        # A Bridge's gradients are added up otherwise, and some softmax is in float32. The package
        # folds weights in an order of its own.
        differs = "'grad'|True|bwd|float64|upcast|compatible" if IS_BRIDGE else "compatible"
        if not (self.placement or self.is_fused or re.search(differs, text)):
            return 0.0
        return 0.1 if self.has_16_bits else 3e-4

    @property
    def has_16_bits(self) -> bool:
        """True if it computes with 16 bits anywhere."""
        return re.search("bfloat16|half|'dtype'", str(self)) is not None


def draw(seed: int) -> Case:
    """The case of a seed."""
    random_ = random.Random(seed)
    kind, placement = random_.choice(KINDS), random_.choice(PLACEMENTS)
    is_fused = random_.random() < 0.8
    sides = ["right", "middle"] if "bidirectional" in kind else ["right", "middle", "left", "left"]
    case = Case(kind, placement, is_fused, random_.choice(sides), [])
    draws = _Draws(random_, case)
    case.operations.extend(draws.any_operation() for _ in range(random_.randint(3, 8)))
    case.operations.append(draws.one_of(RUNS))
    if case.tolerance and case.has_16_bits:  # the likeliest token is a matter of their rounding
        case.operations[:] = [op for op in case.operations if op[0] != "generate"]
    return case


class _Draws:
    """Draws operations for a model that has what they name."""

    def __init__(self, random_: random.Random, case: Case) -> None:
        self._random = random_
        self._pools = {Setting: SETTINGS, **names_in(case.kind)}
        never = ["never"]
        if case.placement:
            # Without its forward pre-hooks, nothing is carried to a block, and torch says so.
            # Blocks of one device share masks and rotary tables, which on one CPU all do.
            never += ["_forward_pre_hooks", "rotary_", "mask'", "IGNORE"]
        if case.padding == "left":  # because others would see a row that sees no token
            never += ["IGNORE", "zero", "bidirectional"]
        self._never = "|".join(never)

    def any_operation(self) -> tuple[Any, ...]:
        """A run, a change, or a change that a hook makes within a later run."""
        draw = self._random.random()
        if draw < 0.35:
            return self.one_of(RUNS)
        return self.one_of(CHANGES) if draw < 0.85 else self._within()

    def _within(self) -> tuple[Any, ...]:
        # Its change acts from the next block on. So a block's hook changes another block, and the
        # embedding's hook anything but the embedding.
        where = self._random.choice((EMBED, EMBED, "blocks.0", "blocks.1"))
        names = "^(?!.*embed)" if where == EMBED else f"^(?!.*{where}).*blocks"
        points = [name for name in self._pools[Point] if name.startswith(where)]
        point = self._random.choice(points)
        while True:
            change = self.one_of(CHANGES)
            # Backward needs the tensors that forward had. And half way, a fused block casts where
            # TransformerLens's raises, and torch ends the process if simulated devices do.
            if re.search(names, str(change)) and not re.search(
                f"in place'|parametrized|{_DTYPES}", str(change)
            ):
                return "within", point, change

    def one_of(self, operations: list[Any]) -> tuple[Any, ...]:
        """An operation, with arguments drawn by their types."""
        function = self._random.choice(operations)
        hints = typing.get_type_hints(function)
        arguments = [
            self._random.choice(self._pool(hint))
            for name, hint in hints.items()
            if name not in ("trial", "return")
        ]
        operation = function.__name__, *arguments
        return self.one_of(operations) if re.search(self._never, str(operation)) else operation

    def _pool(self, hint: Any) -> Sequence[Any]:
        return self._pools.get(hint) or typing.get_args(hint)


def outcome(case: Case, *, with_package: bool) -> bytes:
    """Build a case's model and do the operations on it; return what was seen, and errors."""
    placement: Placement = {}
    with contextlib.ExitStack() as stack:
        if with_package:
            import tl_devicefix
            from tl_devicefix.fusing import kv_cache

            # So that caches grow in place within a few tokens.
            stack.enter_context(mock.patch.object(kv_cache, "GROWS_FROM", 4))
            if placement := case.placement:
                stack.enter_context(tl_devicefix.simulate(4))
        model = build(case.kind, placement)
        trial = Trial(model, lambda: build(case.kind, placement, seed=1), case.padding)
        if with_package and case.is_fused:
            tl_devicefix.fuse_blocks(model)
        for operation in case.operations:
            trial.do(operation)
    assert with_package or "tl_devicefix" not in sys.modules
    return pickle.dumps((trial.seen, trial.errors))  # torch would share each tensor's memory
