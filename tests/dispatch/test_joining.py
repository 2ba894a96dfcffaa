"""Torch functions that mix devices, without a simulation: torch's meta device stands for another.

Under `torch.inference_mode` torch does not count changes, and simulated devices do not have it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_devicefix.dispatch.joining import JoinedAt


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
