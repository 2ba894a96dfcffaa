"""Torch functions that mix devices, without a simulation: torch's meta device stands for another.

Under `torch.inference_mode` torch does not count changes, and simulated devices do not have it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_devicefix.dispatch.joining import JoinedAt, _changed_in_place


def changed_by(func: Any, *args: Any, **kwargs: Any) -> list[int]:
    return [id(tensor) for tensor in _changed_in_place(func, args, kwargs)]


A, B, C = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(3)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (torch.add, (A, B), {}, []),
        (torch.Tensor.add_, (A, B), {}, [A]),
        (torch.Tensor.__iadd__, (A, B), {}, [A]),
        (torch.Tensor.__setitem__, (A, 0, B), {}, [A]),
        (torch.add, (A, B), {"out": C}, [C]),
        (torch.topk, (A, 1), {"out": (B, C)}, [B, C]),
        (torch._foreach_add_, ([A, B], [C, C]), {}, [A, B]),
        (torch.index_put_, (), {"input": A, "indices": (), "values": B}, [A]),
        (torch.nn.functional.batch_norm, (A, B, C, None, None, True), {}, [B, C]),
        (torch.nn.functional.batch_norm, (A, B, C), {"training": False}, []),
        (
            torch.nn.functional.instance_norm,
            (A,),
            {"running_mean": B, "use_input_stats": True},
            [B],
        ),
    ],
    ids=[
        *("out of place", "in place", "operator", "item", "out", "out of several", "lists"),
        *("by keyword", "batch norm training", "batch norm evaluating", "instance norm"),
    ],
)
def test_what_a_function_changes_is_known(
    func: Any, args: Any, kwargs: Any, expected: list[torch.Tensor]
) -> None:
    assert changed_by(func, *args, **kwargs) == [id(tensor) for tensor in expected]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lists_that_may_be_changed_in_part_are_not_changed_twice(mode: Any) -> None:
    devices = frozenset({torch.device("cpu"), torch.device("meta")})
    with mode():
        first, second = torch.zeros(2), torch.zeros(3)
        with JoinedAt(torch.device("cpu"), devices), pytest.raises(RuntimeError):
            torch._foreach_add_([first, second], [torch.ones(2), torch.ones(5, device="meta")])
        assert first.tolist() in ([0, 0], [1, 1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_changed_on_another_device_stays_there(mode: Any) -> None:
    devices = frozenset({torch.device("cpu"), torch.device("meta")})
    with mode():
        buffer = torch.zeros(3, device="meta")
        with JoinedAt(torch.device("cpu"), devices):
            assert buffer.add_(torch.ones(3)) is buffer
            assert (torch.zeros(3, device="meta") + torch.ones(3, device="meta")).is_meta
