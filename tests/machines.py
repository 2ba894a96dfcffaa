"""Unpatched TransformerLens 3 with a simulated machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import tl_devicefix
from tl_devicefix.simulation.machine import Machine


@contextlib.contextmanager
def transformer_lens_alone(machine: Machine) -> Iterator[None]:
    """Within it, unpatched TransformerLens takes the machine's devices for its CUDA devices.

    It splits a model across devices whose type is called "cuda", and asks torch.cuda how many there
    are and how full they are. Here it gets the simulated devices' answers instead.
    """
    import transformer_lens.loading_from_pretrained as tl_loading
    from transformer_lens import HookedTransformer

    tl_model = sys.modules[HookedTransformer.__module__]
    configure = tl_loading.get_pretrained_model_config

    def configure_on_first_device(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        kwargs["device"] = device or str(machine.devices[0])
        return configure(*args, **kwargs)

    def get_best_available_device(cfg: Any) -> torch.device:
        device = torch.device(cfg.device)
        if device.type == "cpu" or cfg.n_devices <= 1:
            return device
        # As its get_best_available_cuda_device: whichever of the first n has most memory free.
        return max(machine.devices[: cfg.n_devices], key=lambda d: machine.mem_get_info(d)[0])

    with (
        tl_devicefix.disabled(),
        mock.patch("torch.cuda.device_count", return_value=len(machine.devices)),
        mock.patch.object(tl_loading, "get_pretrained_model_config", configure_on_first_device),
        mock.patch.object(tl_model, "get_best_available_device", get_best_available_device),
    ):
        yield
