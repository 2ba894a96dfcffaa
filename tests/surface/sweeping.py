"""How a sweep compares: what a call gives, or refuses, and where it is.

With simulated devices it compares with unpatched TransformerLens on one CPU, to rounding. Over
hosts (`pytest tests/surface --hosts`) it compares with this package's own model on one CPU, more
closely; weights of other hosts have no gradients, and some calls are refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from registry import Call, Calls, Run, results

import tl_devicefix

REFUSALS = (
    *(AttributeError, AssertionError, LookupError, TypeError, ValueError),
    NotImplementedError,
)


@dataclass
class Sweep:
    """Calls of models over several devices, compared with those of a reference on one CPU."""

    calls: Calls
    reference: Callable[[str], Run]
    """Gives a `Run` of a kind's model on the CPU: unpatched, or of this package over hosts."""
    over_hosts: bool
    """Whether to compare closely: unpatched TransformerLens rounds otherwise in folding."""
    refused: Mapping[str, str]
    """Why calls are refused over hosts, by their name and case."""
    unpatched: Callable[[], AbstractContextManager[None]] = tl_devicefix.disabled
    """The context in which the reference is called, but over hosts."""

    def check(self, name: str, case: str, kind: str, run: Run) -> None:
        """Check that a call gives what it gives on one CPU, at home or on the CPU."""
        call, reference = self.calls[name][case], self.reference(kind)
        if self.over_hosts:
            if (called := f"{name} {case}".strip()) in self.refused:
                with pytest.raises(RuntimeError, match=re.escape(self.refused[called])):
                    outcome(call, run)
                return
            frozen = {name for name, p in run.model.named_parameters() if not p.requires_grad}
            expected = outcome(call, replace(reference, frozen=frozen))
        else:
            with self.unpatched():
                expected = outcome(call, reference)

        actual = outcome(call, run)

        assert_agrees(actual, expected, tolerance=1e-6 if self.over_hosts else 1e-4)
        # What a call moves to the CPU is there; nothing else is left on a block's device.
        assert devices_in(actual) <= {torch.device(run.model.cfg.device), torch.device("cpu")}


def outcome(call: Call, run: Run) -> Any:
    """What a call gives, or the type of error that it raises."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        return results(run.call(call))
    except REFUSALS as error:
        return type(error)


def devices_in(value: Any) -> set[torch.device]:
    """Where the tensors of a result are."""
    if isinstance(value, torch.Tensor):
        return {value.device}
    if isinstance(value, Mapping):
        return devices_in(list(value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(devices_in, value))
    return set()
