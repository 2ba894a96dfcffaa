"""What a sweep calls: functions by public name, each of which gets a `Run`.

A call is written as for one device. It gets a `Run` and returns what is compared: tensors, or
anything made of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pandas
import torch
from transformer_lens import ActivationCache, FactoredMatrix

TEXT, OTHER_TEXT = "w5 w7 w9 w5 w7 w11", "w6 w7 w8 w6 w7 w12"
LAST = 4
"""A block that is never at home on several devices."""
RESID = f"blocks.{LAST}.hook_resid_post"


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
    def tokens_at_home(self) -> torch.Tensor:
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

    def changeable(self) -> Any:
        """A copy of the model, to be changed."""
        return copy.deepcopy(self.model if self.unused is None else self.unused)


Call = Callable[[Run], Any]


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

    def expressions(self, prefix: str, lines: str, *scopes: dict[str, Any]) -> None:
        """Register calls that are written in a line each: "name case: expression".

        An expression names what a `Run` has, `run` itself, and what is in this module or in a
        scope; a line that begins with a space goes on with the one before.
        """
        for line in re.sub(r"\n +", " ", lines.strip()).splitlines():
            key, _, expression = line.partition(": ")
            self.calls(prefix, {key: _written(expression, *scopes)})

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


OF_RUN = ("model", "tokens", "tokens_at_home", "other_tokens", "cache", "direction", "matrix")


def _written(expression: str, *scopes: dict[str, Any]) -> Call:
    code = compile(expression, expression, "eval")
    used = [name for name in OF_RUN if re.search(rf"\b{name}\b", expression)]

    def call(run: Run) -> Any:
        names = {"run": run, **{name: getattr(run, name) for name in used}}
        for scope in (*scopes, globals()):
            names = {**scope, **names}
        return eval(code, names)

    return call


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
    if isinstance(value, (list, tuple)):
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
