"""Compatibility mode: units of different devices are processed at once, the unembedding last."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tl_devicefix.transformer_bridge import processing

SOON = 30.0  # seconds, within which threads that run at once have met

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def while_processing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`while_processing(meanwhile)`: have this called with the name of each unit."""
    process_unit = processing._process_unit

    def have(meanwhile: Any) -> None:
        def processing_unit(bridge: Any, unit: Any, *rest: Any) -> None:
            meanwhile(unit.name)
            process_unit(bridge, unit, *rest)

        monkeypatch.setattr(processing, "_process_unit", processing_unit)

    return have


def weights(bridge: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in bridge.original_model.state_dict().items()}


def test_all_devices_are_at_work_at_once_but_for_the_unembedding(
    boot: Any, while_processing: Any
) -> None:
    bridge = boot("gpt2", n_devices=4)
    # One unit of each device.
    on = {c.device: c.name for c in bridge.placement.components if c.name.startswith("blocks.")}
    together, names = threading.Barrier(4), []

    def wait_for_the_others(name: str) -> None:
        names.append(name)
        if name in on.values():
            together.wait(SOON)

    while_processing(wait_for_the_others)
    bridge.enable_compatibility_mode()

    assert len(on) == 4
    assert names[-1] == "unembed"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_weights_are_bit_for_bit_those_of_one_after_the_other(
    name: str, boot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_in_flight = weights(boot(name, n_devices=4, compatible=True))

    def one_after_the_other(do: Any, units: Any, devices: Any, done: Any) -> None:
        for unit in units:
            do(unit)
            done()

    monkeypatch.setattr(processing, "each_on_its_device", one_after_the_other)
    expected = weights(boot(name, n_devices=4, compatible=True))

    assert max_in_flight.keys() == expected.keys()
    assert all(torch.equal(max_in_flight[key], expected[key]) for key in expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_while_other_devices_are_at_work_puts_all_back(
    error: type[BaseException], boot: Any, while_processing: Any
) -> None:
    bridge = boot("gpt2", n_devices=4)
    assert bridge.placement.device_for("blocks.3") == bridge.placement.device_for("blocks.4")
    before, another_is_processed = weights(bridge), threading.Event()

    def fail(name: str) -> None:
        if name == "blocks.4":  # so the block before it is processed
            another_is_processed.set()
        if name == "blocks.0":
            assert another_is_processed.wait(SOON)
            raise error("stop here")

    while_processing(fail)
    with pytest.raises(error, match="stop here"):
        bridge.enable_compatibility_mode()

    after = weights(bridge)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
