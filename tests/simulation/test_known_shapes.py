"""Operations on tensors without values: what is known of an earlier call is what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tl_devicefix.simulation import geometry as geometries
from tl_devicefix.simulation import simulate

X = torch.empty(2, 3, 4)
OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "elementwise": lambda x: x * 2,
    "to another dtype": lambda x: (x + 1).bfloat16() + 1,
    "laid out otherwise": lambda x: x.transpose(0, 2) + 1,
    "broadcast": lambda x: x + x[:, :1],
    "a sum": lambda x: x.sum(-1),
    "several results": lambda x: x.max(-1),
    "joined": lambda x: torch.cat([x, x[:1]]),
    "matrices": lambda x: x @ x.transpose(1, 2),
    "a part": lambda x: x[1:, ::2],
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What is known: nothing yet."""
    fresh: dict[Any, Any] = {}
    monkeypatch.setattr(geometries, "_results", fresh)
    return fresh


def geometry(result: Any) -> list[Any]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [(each.size(), each.stride(), each.dtype, each.storage_offset()) for each in tensors]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_first_and_the_second_call_give_what_a_cpu_gives(name: str, known: Any) -> None:
    operation = OPERATIONS[name]
    with simulate(1, values=False):
        x = torch.empty(2, 3, 4, device="sim:0")
        first, second = operation(x), operation(x)
        assert geometry(first) == geometry(second) == geometry(operation(X))
        assert known or name == "a part"


def test_results_have_memory_of_their_own(known: Any) -> None:
    with simulate(1, values=False) as machine:
        x = torch.empty(256, device="sim:0")
        kept = [x + 1 for _ in range(3)]
        assert machine.memory_allocated(0) == (1 + len(kept)) * x.nbytes


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (True, 1)])
def test_numbers_that_are_equal_are_of_their_own_types(one: Any, other: Any, known: Any) -> None:
    expected = [(torch.ones(3, dtype=torch.bool) * each).dtype for each in (one, other)]
    with simulate(1, values=False):
        mask = torch.ones(3, dtype=torch.bool, device="sim:0")
        assert [(mask * each).dtype for each in (one, other)] == expected


def test_what_changes_or_shares_its_argument_is_not_made_anew(known: Any) -> None:
    with simulate(1, values=False) as machine:
        x = torch.empty(4, device="sim:0")
        for _ in range(2):
            assert x.add_(1) is x
            assert x.contiguous() is x
            y = x.view(2, 2)
            assert machine.memory_allocated(0) == x.nbytes == y.nbytes
