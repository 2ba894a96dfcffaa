"""How runs in flight go on from device to device, with what they take along."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tl_devicefix
from tl_devicefix import pipeline_map
from tl_devicefix.simulation.machine import Machine


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Devices whose copies take time, and so are in the timeline with their streams."""
    with tl_devicefix.simulate(2, asynchronous=True, bytes_per_second=1e12) as machine:
        yield machine


def streams_of_copies(machine: Machine) -> list[int]:
    """The streams of the copies of which nobody has heard yet."""
    for device in machine.devices:
        torch.get_device_module(device.type).synchronize(device)
    streams = [busy.stream for busy in machine.timeline if busy.is_copy]
    machine.timeline.clear()
    return streams


def test_the_residual_stream_goes_on_streams_of_its_run(
    machine: Machine, folded: Any, tokens: torch.Tensor
) -> None:
    with torch.no_grad():
        model = folded("gpt2", 2)
        batches = [tokens.to(machine.devices[0]).roll(shift, 1) for shift in range(3)]
        streams_of_copies(machine)
        machine.reset_transfers()
        list(pipeline_map(model, lambda view, batch: view(batch), batches))
    streams = streams_of_copies(machine)
    of_host = [copy for copy in machine.transfers if "cpu" in (copy.source.type, copy.target.type)]
    assert len(streams) >= 2 * len(batches) + len(of_host)
    # On the devices' default streams, a device would wait for a run that comes later.
    assert streams.count(0) <= len(of_host)
