"""A Bridge is booted on the devices that `max_memory` names, as it is planned and rehearsed."""

from __future__ import annotations

from typing import Any

import pytest

from tl_devicefix import dry_run


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"max_memory": {0: "1GiB", 1: "1GiB"}}, [0, 1]),
        ({"max_memory": {1: "1GiB", 3: "1GiB", "cpu": "9GiB"}}, [1, 3]),
        ({"max_memory": {0: "1GiB", 1: "1GiB"}, "n_devices": 1}, [0]),
        ({"max_memory": {0: "1GiB", 1: "1GiB"}, "device": "sim:1"}, [1, 0]),
    ],
)
def test_it_is_on_the_devices_that_are_named(
    options: Any, devices: list[int], machine: Any, boot: Any, tokens: Any
) -> None:
    bridge = boot("gpt2", **options)
    assert [device.index for device in bridge.placement.devices] == devices
    assert bridge(tokens.to(bridge.placement.home)).device.index == devices[0]
    if options.keys() == {"max_memory"}:
        config = bridge.original_model.config
        rehearsed = dry_run(config, lambda model: model.placement, **options)
        assert rehearsed.placement.device_map == bridge.placement.device_map
