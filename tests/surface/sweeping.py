"""How a sweep compares: what a call gives, or refuses, and where it is.

With simulated devices it compares with unpatched TransformerLens on one CPU, to rounding. Over
hosts (`pytest tests/surface --hosts`) it compares with this package's own model on one CPU, more
closely; weights of other hosts have no gradients, and some calls are refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from registry import Calls, Run, results

import tl_devicefix

REFUSALS = (
    *(AttributeError, AssertionError, LookupError, TypeError, ValueError),
    NotImplementedError,
)


Key = tuple[str, str, str]
"""A public name, a case of it, and a kind of model."""
AT_ONCE = 24
"""How many references are found out together: removing the patches takes as long as ten calls."""


def keys_of(tests: Iterable[Any]) -> Iterator[Key]:
    """What a session's tests of a sweep are about, in the order they come."""
    for test in tests:
        parameters = test.callspec.params if hasattr(test, "callspec") else {}
        if parameters.keys() >= {"name", "case", "kind"}:
            yield parameters["name"], parameters["case"], parameters["kind"]


class Sweep:
    """Calls of models over several devices, compared with those of a reference on one CPU.

    Args:
        calls: all that is called.
        reference: gives a `Run` of the model of a kind on the CPU: unpatched, or of this package
            if `exact`.
        order: in which order the tests come.
        exact: whether to compare closely, as over hosts. Unpatched TransformerLens folds weights
            in another order, and so rounds otherwise.
        unpatched: the context in which the reference is called.
        refused: why calls are refused over hosts, by their name and case.
    """

    def __init__(
        self,
        calls: Calls,
        reference: Callable[[str], Run],
        order: Iterable[Key],
        exact: bool = False,
        unpatched: Callable[[], AbstractContextManager[None]] = tl_devicefix.disabled,
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._calls = calls
        self._reference = reference
        self._order = list(dict.fromkeys(order))
        self._exact = exact
        self._unpatched = unpatched
        self._refused = refused if exact else {}
        self._known: dict[Key, Any] = {}

    def check(self, name: str, case: str, kind: str, run: Run) -> None:
        """Check that a call gives what it gives on one CPU, at home or on the CPU."""
        if (called := f"{name} {case}".strip()) in self._refused:
            with pytest.raises(RuntimeError, match=re.escape(self._refused[called])):
                self._outcome(name, case, run)
            return
        if self._exact:
            frozen = {name for name, p in run.model.named_parameters() if not p.requires_grad}
            expected = self._outcome(name, case, replace(self._reference(kind), frozen=frozen))
        else:
            expected = self._expected((name, case, kind))

        actual = self._outcome(name, case, run)

        assert_agrees(actual, expected, tolerance=1e-6 if self._exact else 1e-4)
        # What a call moves to the CPU is there; nothing else is left on a block's device.
        assert devices_in(actual) <= {torch.device(run.model.cfg.device), torch.device("cpu")}

    def _expected(self, key: Key) -> Any:
        """What unpatched TransformerLens gives on one CPU: a result, or the type of the error."""
        if key not in self._known:
            kind = key[2]
            of_kind = [item for item in self._order if item[2] == kind]
            start, reference = of_kind.index(key), self._reference(kind)
            with self._unpatched():
                for asked_next in of_kind[start : start + AT_ONCE]:
                    self._known[asked_next] = self._outcome(*asked_next[:2], reference)
        return self._known[key]

    def _outcome(self, name: str, case: str, run: Run) -> Any:
        """What a call gives, or the type of error that it raises."""
        seed()
        try:
            return results(self._calls[name][case](run))
        except REFUSALS as error:
            return type(error)


def seed() -> None:
    """Have random numbers be the same ones from now on."""
    torch.manual_seed(0)
    random.seed(0)


def devices_in(value: Any) -> set[torch.device]:
    """Where the tensors of a result are."""
    if isinstance(value, torch.Tensor):
        return {value.device}
    if isinstance(value, Mapping):
        return devices_in(list(value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(devices_in, value))
    return set()
