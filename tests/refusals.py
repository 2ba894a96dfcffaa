"""What must be as it was after a refusal, and checkpoints that are damaged in some way."""

from __future__ import annotations

import contextlib
import gc
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformer_lens import HookedTransformer
from transformers import PreTrainedModel

from tl_devicefix.simulation.machine import Machine

Tensors = dict[str, torch.Tensor]


class Snapshot:
    """A Hugging Face model as it is now: its modules, tensors and config."""

    def __init__(self, hf_model: torch.nn.Module) -> None:
        self._model = hf_model
        self._modules = self._modules_now()
        self._tensors = [
            (name, tensor, tensor.detach().clone(), tensor.device, tensor.requires_grad)
            for name, tensor in self._tensors_now()
        ]
        self._config = self._config_now()

    def _modules_now(self) -> list[tuple[str, torch.nn.Module]]:
        return list(self._model.named_modules(remove_duplicate=False))

    def _tensors_now(self) -> list[tuple[str, torch.Tensor]]:
        model = self._model
        parameters = list(model.named_parameters(remove_duplicate=False))
        return parameters + list(model.named_buffers(remove_duplicate=False))

    def _config_now(self) -> Any:
        config = getattr(self._model, "config", None)
        return None if config is None else config.to_dict()

    def assert_unchanged(self) -> None:
        modules, tensors = self._modules_now(), self._tensors_now()
        assert [name for name, _ in modules] == [name for name, _ in self._modules]
        assert all(now is then for (_, now), (_, then) in zip(modules, self._modules))
        assert [name for name, _ in tensors] == [name for name, *_ in self._tensors]
        for (name, now), (_, then, value, device, requires_grad) in zip(tensors, self._tensors):
            assert now is then, name
            assert (now.device, now.requires_grad) == (device, requires_grad), name
            assert now.is_meta or torch.equal(now.detach(), value), name
        assert self._config_now() == self._config


@pytest.fixture
def snapshot() -> type[Snapshot]:
    return Snapshot


def in_use(machine: Machine) -> list[int]:
    gc.collect()
    return [machine.memory_allocated(device) for device in machine.devices]


def forget_locals(error: BaseException | None) -> None:
    """Empty the frames that an error went through, which hold what was being loaded."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, AttributeError):
            error.obj = None
        error = error.__context__


@pytest.fixture
def refused(machine: Machine) -> Callable[..., Any]:
    """`with refused("sim:7"): ...` is refused in one sentence that says so, leaving nothing behind.

    Afterwards memory is given back, TransformerLens is patched as before, and `hf_model`, if one
    is given, is as it was.
    """

    @contextlib.contextmanager
    def refused(
        *says: str, error: Any = ValueError, hf_model: torch.nn.Module | None = None
    ) -> Iterator[None]:
        memory, patched = in_use(machine), dict(vars(HookedTransformer))
        before = None if hf_model is None else Snapshot(hf_model)
        with pytest.raises(error) as caught:
            yield
        message = str(caught.value)
        forget_locals(caught.value)

        for text in says:
            assert text in message
        assert "\n" not in message
        assert in_use(machine) == memory
        assert vars(HookedTransformer).keys() == patched.keys()
        assert all(vars(HookedTransformer)[name] is value for name, value in patched.items())
        if before is not None:
            before.assert_unchanged()

    return refused


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`write_checkpoint(hf_model, tensors, n_files=2)`: as transformers saves it, but any tensors.

    `listed` are the tensors that the index of a sharded checkpoint lists: by default those there.
    """

    def write(
        hf_model: PreTrainedModel,
        tensors: Tensors,
        n_files: int = 1,
        listed: list[str] | None = None,
    ) -> Path:
        hf_model.config.save_pretrained(tmp_path)
        if n_files == 1:
            save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
            return tmp_path
        names = sorted({*tensors, *(listed or ())})
        weight_map = {
            name: f"model-{1 + i * n_files // len(names):05}-of-{n_files:05}.safetensors"
            for i, name in enumerate(names)
        }
        for file in set(weight_map.values()):
            here = {name: tensors[name] for name in tensors if weight_map[name] == file}
            save_file(here, tmp_path / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return write


def file_of(checkpoint: Path, tensor: str) -> str:
    """The name of the file in which a checkpoint has, or should have, a tensor."""
    index = checkpoint / "model.safetensors.index.json"
    if not index.is_file():
        return "model.safetensors"
    return str(json.loads(index.read_text())["weight_map"][tensor])


@pytest.fixture(name="file_of")
def file_of_fixture() -> Callable[[Path, str], str]:
    return file_of


@pytest.fixture
def tensors(hf_models: Any) -> Tensors:
    """The tensors of a tiny Qwen2, to be damaged and written to a checkpoint."""
    state_dict = hf_models("qwen2").state_dict()
    return {name: tensor.detach().clone() for name, tensor in state_dict.items()}
