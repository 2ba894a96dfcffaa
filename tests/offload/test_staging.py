"""Copies through pinned memory give what `to` and `copy_` give, and race with nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tl_devicefix
from tl_devicefix.offload import copying as module
from tl_devicefix.offload.copying import Staging

SHAPES: dict[str, torch.Tensor] = {
    "a scalar": torch.tensor(3.0),
    "a vector": torch.arange(300.0),
    "rows": torch.arange(91.0).view(7, 13),
    "transposed": torch.arange(80.0).view(2, 40).T,
    "heads of a matrix": torch.arange(135.0).view(5, 3, 9).permute(2, 0, 1),
    "a part of each row": torch.arange(120.0).view(20, 6)[:, 2:4],
    "an expanded row": torch.arange(4.0).view(4, 1).expand(4, 50),
    "nothing": torch.empty(0, 3),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device that runs behind the host, to which few numbers are copied at a time."""
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 64)
    with tl_devicefix.simulate(2, asynchronous=True) as machine:
        yield machine.devices[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_is_what_torch_makes_of_it(
    shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    tensor = SHAPES[shape].to(dtype)
    with Staging(device) as staging:
        copy = staging.to_device(tensor)
        rounded = torch.zeros(tensor.shape, dtype=torch.bfloat16, device=device)
        staging.copy(rounded, tensor)

    expected = tensor.to(device)
    assert (copy.device, copy.dtype, copy.stride()) == (device, dtype, expected.stride())
    assert torch.equal(copy.cpu(), tensor)
    assert torch.equal(rounded.cpu(), tensor.to(torch.bfloat16))


def test_the_host_does_not_wait_for_the_last_copies(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    event = torch.get_device_module("sim").Event
    installed = event.synchronize

    def synchronize(self: Any) -> None:
        waited.append(self._recorded)
        installed(self)

    monkeypatch.setattr(event, "synchronize", synchronize)
    with Staging(device) as staging:
        copy = staging.to_device(torch.arange(32.0))  # two chunks
        assert waited == [None, None]  # each is the first in its memory
    assert len(waited) == 4
    assert torch.equal(copy.cpu(), torch.arange(32.0))


def test_a_device_without_streams_is_copied_to_directly(machine: Any) -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    with Staging(torch.device("sim:0")) as staging:
        copy = staging.to_device(tensor)
    assert torch.equal(copy.cpu(), tensor)
    assert [transfer.shape for transfer in machine.transfers] == [(3, 2), (3, 2)]
