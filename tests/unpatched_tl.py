"""TransformerLens without tl_devicefix, on simulated devices: to see what the tests are for.

TransformerLens spreads a model over devices whose type is called "cuda", and asks torch.cuda how
many there are and how full they are. Here it gets the simulated devices' answers instead. What it
then does with them is its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import tl_devicefix
from tl_devicefix.simulation.machine import Machine


@contextlib.contextmanager
def transformer_lens_alone(machine: Machine) -> Iterator[None]:
    """Within it, unpatched TransformerLens takes the machine's devices for its CUDA devices."""

    def get_device() -> torch.device:
        return machine.devices[0]

    def get_best_available_device(cfg: Any) -> torch.device:
        device = torch.device(cfg.device)
        if device.type == "cpu" or cfg.n_devices <= 1:
            return device
        # As its get_best_available_cuda_device: whichever of the first n has most memory free.
        return max(machine.devices[: cfg.n_devices], key=lambda d: machine.mem_get_info(d)[0])

    with contextlib.ExitStack() as stack:
        stack.enter_context(tl_devicefix.unpatched())
        counted = mock.patch("torch.cuda.device_count", return_value=len(machine.devices))
        stack.enter_context(counted)
        for function in (get_device, get_best_available_device):
            _replace_wherever_imported(function, stack)
        yield


def _replace_wherever_imported(function: Callable[..., Any], stack: contextlib.ExitStack) -> None:
    """Replace TransformerLens's function of the same name, in each module that has it."""
    name = function.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "transformer_lens" and name in vars(module):
            stack.enter_context(mock.patch.object(module, name, function))
