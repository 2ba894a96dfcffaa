"""What must be as it was after a refusal."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformer_lens import HookedTransformer

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


@pytest.fixture
def snapshot() -> type[Snapshot]:
    return Snapshot


def in_use(machine: Machine) -> list[int]:
    gc.collect()
    return [machine.memory_allocated(device) for device in machine.devices]


@pytest.fixture
def refused(machine: Machine) -> Callable[..., Any]:
    """`with refused("sim:7"): ...` is refused in one sentence that says so, leaving nothing behind.

    Afterwards memory is given back, TransformerLens is patched as before, and `hf_model`, if one
    is given, is as it was.
    """

    @contextlib.contextmanager
    def refused(
        *says: str, error: Any = ValueError, hf_model: torch.nn.Module | None = None
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        memory, patched = in_use(machine), dict(vars(HookedTransformer))
        before = None if hf_model is None else Snapshot(hf_model)
        with pytest.raises(error) as caught:
            yield caught
        message = str(caught.value)

        for text in says:
            assert text in message
        assert "\n" not in message
        assert in_use(machine) == memory
        assert vars(HookedTransformer).keys() == patched.keys()
        assert all(vars(HookedTransformer)[name] is value for name, value in patched.items())
        if before is not None:
            before.assert_unchanged()

    return refused
