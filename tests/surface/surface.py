"""What is public in the installed TransformerLens, and how calls of it are compared.

A call is a function that asks for what a `Run` has, as a test for its fixtures, as for one device.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import random
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pandas
import torch
from comparison import assert_agrees
from transformer_lens import ActivationCache, FactoredMatrix, SVDInterpreter
from transformer_lens.hook_points import HookPoint

LAST = 4
"""A block that is never at home on several devices."""
SPECIAL: tuple[str, ...] = ("__getitem__", "__iter__", "__len__")
SPECIAL += ("__matmul__", "__rmatmul__", "__mul__", "__rmul__")
"""Methods with a protocol's name that users call by its syntax."""
REFUSALS: tuple[type[Exception], ...] = (
    AttributeError,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
)
REFUSALS += (NotImplementedError,)
Call = Callable[..., Any]
"""A function of what a `Run` has, by the names of its parameters; `run` is all of it."""


def public_names(classes: tuple[type, ...], modules: tuple[str, ...]) -> set[str]:
    """Every public method, property and function, as "HookedTransformer.W_Q" or "train.train".

    Args:
        classes: whose methods and properties, but for those of torch's classes; and those of the
            classes of what a model returns, or is made of.
        modules: of transformer_lens, whose functions of a model; those that it lacks are left out.
    """
    names = {
        f"{cls.__name__}.{name}"
        for cls in (*classes, ActivationCache, FactoredMatrix, SVDInterpreter, HookPoint)
        for name in dir(cls)
        if (not name.startswith("_") or name in SPECIAL)
        and _owner(cls, name).__module__.startswith("transformer_lens")
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


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


@dataclass
class Run:
    """What a call has at hand: a model of its own kind and place, and tokens."""

    model: Any
    tokens: torch.Tensor
    unused: Any = None
    """The same model before anything ran on it, if some of what runs leaves graphs behind."""
    frozen: Collection[str] = ()
    """Names of weights whose gradients are not asked for, as they are on another host."""

    @property
    def other_tokens(self) -> torch.Tensor:
        return self.tokens.flip(1)

    @property
    def at_home(self) -> torch.Tensor:
        return self.tokens.to(self.model.cfg.device)

    @property
    def cache(self) -> ActivationCache:
        """All activations of `tokens`."""
        return self.model.run_with_cache(self.tokens)[1]

    @property
    def cache_on_cpu(self) -> ActivationCache:
        return self.cache.to("cpu")

    @property
    def direction(self) -> torch.Tensor:
        """A vector of the residual stream, at home: what people add in hooks."""
        return torch.linspace(-1, 1, self.model.cfg.d_model, device=self.model.cfg.device)

    @property
    def matrix(self) -> FactoredMatrix:
        """The OV circuits of all heads."""
        return self.model.OV

    @property
    def lens(self) -> Any:
        """A Jacobian lens of random maps: what is compared is how it is read."""
        analysis = importlib.import_module("transformer_lens.tools.analysis")
        d_model, generator = self.model.cfg.d_model, torch.Generator().manual_seed(0)
        maps = {
            layer: torch.eye(d_model) + 0.1 * torch.randn(d_model, d_model, generator=generator)
            for layer in range(LAST)
        }
        return analysis.JacobianLens(maps, n_prompts=1, d_model=d_model)

    def call(self, function: Call) -> Any:
        """What a function gives, whose parameters without a default name what this has."""
        torch.manual_seed(0)
        random.seed(0)
        parameters = inspect.signature(function).parameters.values()
        asked = [each.name for each in parameters if each.default is each.empty]
        return function(**{name: self if name == "run" else getattr(self, name) for name in asked})

    def changeable(self) -> Any:
        """A copy of the model, to be changed."""
        return copy.deepcopy(self.model if self.unused is None else self.unused)


def assert_as_on_one_device(
    call: Call, run: Run, reference: Run, unpatched: Callable[[], AbstractContextManager[None]]
) -> None:
    """A call gives what it gives unpatched on one CPU, or the same error; at home or on the CPU."""
    frozen = {name for name, weight in run.model.named_parameters() if not weight.requires_grad}
    with unpatched():
        expected = outcome(call, replace(reference, frozen=frozen))
    actual = outcome(call, run)
    assert_agrees(actual, expected, tolerance=1e-4)
    # What a call moves to the CPU is there; nothing else is left on a block's device.
    assert devices_in(actual) <= {torch.device(run.model.cfg.device), torch.device("cpu")}


def outcome(call: Call, run: Run) -> Any:
    """What a call gives, or the type of error that it raises."""
    try:
        return results(run.call(call))
    except REFUSALS as error:
        return type(error)


def results(value: Any) -> Any:
    """What a call returned, made of tensors, sequences and dicts."""
    if isinstance(value, FactoredMatrix):
        return [value.A, value.B]
    if isinstance(value, torch.nn.Module):
        return dict(value.named_parameters())
    if isinstance(value, (ActivationCache, Mapping)):
        return {name: results(entry) for name, entry in value.items()}
    if isinstance(value, pandas.DataFrame):
        return value.to_dict()
    if isinstance(value, (list, tuple, Iterator, KeysView, ValuesView, ItemsView)):
        return [results(tensor) for tensor in value]
    if type(value).__module__.startswith("transformer_lens"):
        return results(vars(value))
    return value


def devices_in(value: Any) -> set[torch.device]:
    """Where the tensors of a result are."""
    if isinstance(value, torch.Tensor):
        return {value.device}
    if isinstance(value, Mapping):
        return devices_in(list(value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(devices_in, value))
    return set()
