"""What a refused call must leave as it was: a Hugging Face model, and memory of devices."""

from __future__ import annotations

import gc
from typing import Any

import torch

from tl_devicefix.simulation.machine import Machine


class Snapshot:
    """A Hugging Face model as it is now: its modules, tensors and config."""

    def __init__(self, hf_model: torch.nn.Module) -> None:
        self._model = hf_model
        self._before, self._tensors = self._now(), self._tensors_now()  # which keep their ids
        self._values = [tensor.detach().clone() for _, tensor in self._tensors]

    def _tensors_now(self) -> list[tuple[str, torch.Tensor]]:
        parameters = self._model.named_parameters(remove_duplicate=False)
        return [*parameters, *self._model.named_buffers(remove_duplicate=False)]

    def _now(self) -> Any:
        modules = list(self._model.named_modules(remove_duplicate=False))
        tensors = [(name, id(t), t.device, t.requires_grad) for name, t in self._tensors_now()]
        config: Any = getattr(self._model, "config", None)
        return modules, tensors, config and config.to_dict()

    def assert_unchanged(self) -> None:
        assert self._now() == self._before
        for (name, tensor), value in zip(self._tensors_now(), self._values):
            assert tensor.is_meta or torch.equal(tensor.detach(), value), name


def in_use(machine: Machine) -> list[int]:
    gc.collect()
    return [machine.memory_allocated(device) for device in machine.devices]
