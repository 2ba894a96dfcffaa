"""What a sweep calls: functions by public name.

A call is written as for one device: a function that asks for what a `Run` has, as a test for its
fixtures. It returns what is compared: tensors, or anything made of them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from dataclasses import dataclass
from typing import Any

import pandas
import torch
from transformer_lens import ActivationCache, FactoredMatrix

TEXT, OTHER_TEXT = "w5 w7 w9 w5 w7 w11", "w6 w7 w8 w6 w7 w12"
LAST = 4
"""A block that is never at home on several devices."""
RESID = f"blocks.{LAST}.hook_resid_post"
GREEDY: dict[str, Any] = {
    "max_new_tokens": 3,
    "do_sample": False,
    "stop_at_eos": False,
    "verbose": False,
}


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
    def direction(self) -> torch.Tensor:
        """A vector of the residual stream, at home: what people add in hooks."""
        return torch.linspace(-1, 1, self.model.cfg.d_model, device=self.model.cfg.device)

    @property
    def matrix(self) -> FactoredMatrix:
        """The OV circuits of all heads."""
        return self.model.OV

    @property
    def cache_on_cpu(self) -> ActivationCache:
        return self.cache.to("cpu")

    @property
    def lens(self) -> Any:
        """A Jacobian lens of random maps: what is swept is how it is read."""
        analysis = importlib.import_module("transformer_lens.tools.analysis")
        d_model, generator = self.model.cfg.d_model, torch.Generator().manual_seed(0)
        maps = {
            layer: torch.eye(d_model) + 0.1 * torch.randn(d_model, d_model, generator=generator)
            for layer in range(LAST)
        }
        return analysis.JacobianLens(maps, n_prompts=1, d_model=d_model)

    def call(self, function: Call) -> Any:
        """What a function gives, whose parameters without a default name what this has."""
        names = inspect.signature(function).parameters.values()
        asked = [parameter.name for parameter in names if parameter.default is parameter.empty]
        return function(**{name: self if name == "run" else getattr(self, name) for name in asked})

    def changeable(self) -> Any:
        """A copy of the model, to be changed."""
        return copy.deepcopy(self.model if self.unused is None else self.unused)


Call = Callable[..., Any]
"""A function of what a `Run` has, by the names of its parameters; `run` is all of it."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


class Calls(dict[str, dict[str, Call]]):
    """Public name -> what is called of it, by a word that tells the calls apart."""

    def call(self, name: str, case: str = "") -> Callable[[Call], Call]:
        """Register a call of something public."""

        def register(function: Call) -> Call:
            self.setdefault(name, {})[case] = function
            return function

        return register

    def calls(self, prefix: str, functions: dict[str, Call]) -> None:
        """Register calls of things with a common prefix; "name case" is a case of a name."""
        for key, function in functions.items():
            name, _, case = key.partition(" ")
            self.call(f"{prefix}.{name}", case)(function)

    def methods(self, prefix: str, of: str, arguments: dict[str, Arguments]) -> None:
        """Register calls of methods, named by their keys, of what a `Run` has as `of`."""
        for key, (args, kwargs) in arguments.items():
            name = key.partition(" ")[0]

            def function(run: Run, name: str = name, args: Any = args, kwargs: Any = kwargs) -> Any:
                return getattr(getattr(run, of), name)(*args, **kwargs)

            self.calls(prefix, {key: function})

    def attributes(self, prefix: str, of: str, *names: str) -> None:
        """Register attributes of what a `Run` has as `of`."""
        for name in names:
            self.calls(prefix, {name: lambda run, name=name: getattr(getattr(run, of), name)})

    def add(self, others: Calls, prefix: str | None = None) -> None:
        """Register the calls of others, too; those of "model" by the name of its class."""
        for name, cases in others.items():
            first, _, rest = name.partition(".")
            name = f"{prefix}.{rest}" if prefix and first == "model" else name
            self.setdefault(name, {}).update(cases)


def left_out(lines: str) -> dict[str, str]:
    """Names that are not called, by reason: "patching.one two: why"; a line may go on indented."""
    reasons: dict[str, str] = {}
    for line in re.sub(r"\n +", " ", lines.strip()).splitlines():
        names, _, reason = line.partition(": ")
        prefix, _, names = names.partition(".")
        reasons |= {f"{prefix}.{name}": reason for name in names.split()}
    return reasons


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
    if type(value).__module__.startswith("transformer_lens"):
        return results(vars(value))
    if isinstance(value, (list, tuple, Iterator, KeysView, ValuesView, ItemsView)):
        return [results(tensor) for tensor in value]
    return value


def gradients_of(run: Run, loss: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """The gradients of a scalar with respect to the model's parameters, moved to the CPU."""
    model = run.changeable()
    loss(model).backward()
    return {
        name: parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name not in run.frozen
    }


def steer(run: Run) -> Any:
    """A hook that adds a vector from home."""
    return lambda activation, hook: activation + run.direction
