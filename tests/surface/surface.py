"""The public names of the installed TransformerLens, and how calls of them are compared.

A call is a row of a table: a name of `public_names`, two spaces, and an expression of the helpers
in the table's module and of attributes of a `Run`. A line without a name is one more expression of
the row above. A word after the name tells calls of one name apart:

    ActivationCache.keys             cache.keys()
    ActivationCache.decompose_resid  cache.decompose_resid(apply_ln=True)
                                     cache.decompose_resid(4, mode="attn", return_labels=True)
    HookPoint.add_hook               twice(copy, tokens, point(copy).add_hook(steer))
    HookPoint.add_hook prepend       ...

Names joined by commas have a row in common, in which NAME stands for each.

Each call runs over several devices, and unpatched on one CPU. To compare a new public name, add a
row to a table of calls.py (both classes), test_sweep.py (HookedTransformer) or bridge_calls.py.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import operator
import random
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pandas
import torch
from comparison import assert_agrees
from torch.utils._pytree import tree_leaves
from transformer_lens import ActivationCache, FactoredMatrix, SVDInterpreter
from transformer_lens.hook_points import HookPoint

LAST = 4
"""A block that is never at home on several devices."""
RESID = f"blocks.{LAST}.hook_resid_post"
SPECIAL = ["__getitem__", "__iter__", "__len__", "__matmul__", "__rmatmul__", "__mul__", "__rmul__"]
"""Methods with a protocol's name that users call by its syntax."""
REFUSALS = (AttributeError, AssertionError, LookupError, TypeError, ValueError, NotImplementedError)
Call = Callable[[Any], Any]
"""A function of a `Run`."""


def public_names(classes: tuple[type, ...], modules: tuple[str, ...]) -> set[str]:
    """Return every public method, property and function, as "HookedTransformer.W_Q".

    Args:
        classes: classes of models. Names that they inherit from torch are left out. The classes of
            a model's results and parts are always included.
        modules: modules of transformer_lens, for their functions of a model. A module that the
            installed version lacks is skipped.
    """
    names = {
        f"{cls.__name__}.{name}"
        for cls in (*classes, ActivationCache, FactoredMatrix, SVDInterpreter, HookPoint)
        for name in dir(cls)
        if not name.startswith("_") or name in SPECIAL
        for owner in [next(base for base in cls.__mro__ if name in vars(base))]
        if owner.__module__.startswith("transformer_lens")
    }
    for path in modules:
        try:
            module = importlib.import_module(f"transformer_lens.{path}")
        except ModuleNotFoundError:
            continue
        names |= {
            f"{path.rpartition('.')[2]}.{name}"
            for name, value in vars(module).items()
            if callable(value) and not isinstance(value, type) and not name.startswith("_")
            if "model" in inspect.signature(value).parameters
        }
    return names


@dataclass
class Run:
    """A model and tokens, and what calls derive from them."""

    model: Any
    tokens: torch.Tensor
    unused: Any = None
    """The same model before any call, if some calls leave autograd graphs in `model`."""
    frozen: Collection[str] = ()
    """Weights whose gradients are not compared, because they are on another host."""

    def __post_init__(self) -> None:
        self.other_tokens = self.tokens.flip(1)
        self.at_home = self.tokens.to(self.model.cfg.device)

    @property
    def copy(self) -> Any:
        """A copy of the model that a call may change."""
        return copy.deepcopy(self.model if self.unused is None else self.unused)

    @property
    def cache(self) -> ActivationCache:
        """All activations of `tokens`."""
        return self.model.run_with_cache(self.tokens)[1]

    @property
    def cache_on_cpu(self) -> ActivationCache:
        return self.cache.to("cpu")

    @property
    def direction(self) -> torch.Tensor:
        """A vector of the residual stream, at home."""
        return torch.linspace(-1, 1, self.model.cfg.d_model, device=self.model.cfg.device)

    @property
    def steer(self) -> Any:
        """A hook that adds a vector from home, as users write it."""
        return lambda activation, hook: activation + self.direction

    @property
    def matrix(self) -> FactoredMatrix:
        """The OV circuits of all heads."""
        return self.model.OV

    @property
    def lens(self) -> Any:
        """A Jacobian lens of random maps, because only its readings are compared."""
        analysis = importlib.import_module("transformer_lens.tools.analysis")
        d_model, generator = self.model.cfg.d_model, torch.Generator().manual_seed(0)
        noise = [torch.randn(d_model, d_model, generator=generator) for _ in range(LAST)]
        maps = {layer: torch.eye(d_model) + 0.1 * each for layer, each in enumerate(noise)}
        return analysis.JacobianLens(maps, n_prompts=1, d_model=d_model)

    def call(self, call: Call) -> Any:
        """Return the result of a call with the same random numbers each time."""
        torch.manual_seed(0)
        random.seed(0)
        return call(self)


class Names(dict[str, Any]):
    """The names in an expression: helpers, `run`, and the attributes of a `Run`, read once."""

    def __init__(self, run: Run, helpers: Sequence[dict[str, Any]]) -> None:
        super().__init__(functools.reduce(operator.or_, helpers), run=run)

    def __missing__(self, name: str) -> Any:
        if not hasattr(Run, name) and name not in vars(self["run"]):
            raise KeyError(name)  # then Python looks among its builtins
        return self.setdefault(name, getattr(self["run"], name))


def table(helpers: Sequence[dict[str, Any]], text: str) -> dict[str, Call]:
    """Return the calls in a table, by name; `helpers` are `vars()` of modules."""
    rows: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        given, _, expression = map(str.strip, line.partition("  "))
        if given:
            names, _, case = given.partition(" ")
            last = [f"{name} {case}".strip() for name in names.split(",")]
        for name in last:
            row = rows.setdefault(name, [])
            row += [expression.replace("NAME", name.split()[0])] if expression else []
    return {name: functools.partial(_evaluate, helpers, row) for name, row in rows.items()}


def _evaluate(helpers: Sequence[dict[str, Any]], row: list[str], run: Run) -> Any:
    names = Names(run, helpers)
    return [eval(expression, names) for expression in row]


def assert_as_on_one_device(
    call: Call, run: Run, reference: Run, unpatched: Callable[[], AbstractContextManager[None]]
) -> None:
    """A call's result is that of the unpatched model on one CPU, or its type of error."""
    frozen = {name for name, weight in run.model.named_parameters() if not weight.requires_grad}
    with unpatched():
        expected = outcome(call, replace(reference, frozen=frozen))
    actual = outcome(call, run)
    assert_agrees(actual, expected, tolerance=1e-4)
    # Results are at home, or on the CPU if the call moves them there; none is on a block's device.
    devices = {leaf.device for leaf in tree_leaves(actual) if isinstance(leaf, torch.Tensor)}
    assert devices <= {torch.device(run.model.cfg.device), torch.device("cpu")}


def outcome(call: Call, run: Run) -> Any:
    """Return the result of a call, or the type of error that it raises."""
    try:
        return plain(run.call(call))
    except REFUSALS as error:
        return type(error)


def plain(value: Any) -> Any:
    """Return a result as tensors in lists and dicts."""
    if isinstance(value, FactoredMatrix):
        return [value.A, value.B]
    if isinstance(value, torch.nn.Module):
        return dict(value.named_parameters())
    if isinstance(value, (ActivationCache, Mapping)):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, pandas.DataFrame):
        return value.to_dict()
    if isinstance(value, (list, tuple, Iterator, KeysView, ValuesView, ItemsView)):
        return [plain(each) for each in value]
    return plain(vars(value)) if type(value).__module__.startswith("transformer_lens") else value
