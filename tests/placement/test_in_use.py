"""Where the results of mixing devices go, by the models that are placed."""

from __future__ import annotations

from typing import Any

import torch

import tl_devicefix
from tl_devicefix import plan
from tl_devicefix.placement.in_use import use


def test_a_result_goes_to_the_home_of_the_model_that_is_on_all_of_its_devices(
    config: Any, machine: Any
) -> None:
    on_both = plan(config(), device_map={"": 1, "blocks.3": 0})
    on_one = plan(config(), device_map=0)
    use(on_both)
    use(on_one)  # the latest, which is no reason

    with tl_devicefix.mix_devices():
        result = torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")

    assert result.device == on_both.home == torch.device("sim:1")
