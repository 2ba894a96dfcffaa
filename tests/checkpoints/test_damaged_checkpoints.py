"""A damaged checkpoint is refused: the file and the tensor are named, and nothing is made up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import D_MLP, D_MODEL
from transformer_lens import HookedTransformer

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
NAME, LAST = "model.layers.1.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight"
BIAS, EXTRA = "model.layers.3.self_attn.q_proj.bias", "model.layers.5.mlp.up_proj.weight"


def load(checkpoint: Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoint, n_devices=4)


@pytest.fixture
def tensors(hf_models):
    """The tensors of a tiny Qwen2, to be damaged."""
    return {name: t.detach().clone() for name, t in hf_models("qwen2").state_dict().items()}


@pytest.fixture
def write(write_checkpoint, hf_models, tensors):
    """`write(PICKLE, n_files=3)`: the tensors, with the config of the tiny Qwen2."""
    return lambda *args, **options: write_checkpoint(hf_models("qwen2"), tensors, *args, **options)


def file_of(checkpoint: Path, tensor: str, file: str) -> str:
    """The name of the file in which a checkpoint has, or should have, a tensor."""
    index = checkpoint / f"{file}.index.json"
    return json.loads(index.read_text())["weight_map"][tensor] if index.is_file() else file


@pytest.mark.parametrize(
    ("tensor", "n_files"),
    [(NAME, 1), (BIAS, 3), ("model.embed_tokens.weight", 1), ("lm_head.weight", 3)],
)
def test_a_missing_tensor(tensor, n_files, tensors, write, refused):
    listed = list(tensors)
    del tensors[tensor]
    checkpoint = write(n_files=n_files, listed=listed)
    with refused(str(checkpoint), "lacks", tensor, *["model-"][: n_files - 1], "again"):
        load(checkpoint)


@pytest.mark.parametrize("n_files", [1, 3])
def test_an_extra_tensor(n_files, tensors, write, refused):
    tensors[EXTRA] = torch.ones(3)
    checkpoint = write(n_files=n_files)
    with refused(str(checkpoint), EXTRA, file_of(checkpoint, EXTRA, SAFETENSORS), "again"):
        load(checkpoint)


@pytest.mark.parametrize(("n_files", "file"), [(1, PICKLE), (3, SAFETENSORS)])
def test_a_misshapen_tensor(n_files, file, tensors, write, refused):
    tensors[LAST] = torch.ones(D_MLP, D_MODEL - 1)
    checkpoint = write(file, n_files)
    shapes = f"(stored ({D_MLP}, {D_MODEL - 1}), expected ({D_MLP}, {D_MODEL}))"
    with refused(str(checkpoint), LAST, file_of(checkpoint, LAST, file), shapes, "again"):
        load(checkpoint)


def with_header(content: bytes, **changes: Any) -> bytes:
    """A safetensors file (8 bytes of length, JSON, the values) that says else of one tensor."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[NAME].update(changes)
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + content[8 + size :]


DAMAGE: tuple[Callable[[bytes], bytes], ...] = (
    lambda content: content[:-2],
    lambda content: content[:8] + b"?" * 12 + content[20:],
    lambda content: with_header(content, shape=[3, 3]),
)


def test_a_damaged_file(write, refused):
    checkpoint = write(n_files=3)
    file = checkpoint / file_of(checkpoint, NAME, SAFETENSORS)
    content = file.read_bytes()
    for damage in DAMAGE:
        file.write_bytes(damage(content))
        with refused(str(file), "damaged or incomplete", f"{file.stat().st_size} bytes", "again"):
            load(checkpoint)


@pytest.mark.parametrize("file", [SAFETENSORS, PICKLE])
def test_a_shard_that_is_not_there(file, write, refused):
    checkpoint = write(file, 3)
    shard = checkpoint / file_of(checkpoint, LAST, file)
    shard.unlink()
    with refused(str(shard), "is missing", "again"):
        load(checkpoint)


def test_a_damaged_index(write, refused):
    file = write(n_files=3) / f"{SAFETENSORS}.index.json"
    for index in (file.read_text()[:-30], "[]", '{"weight_map": null}', '{"weight_map": {"a": 5}}'):
        file.write_text(index)
        with refused(file.name, "again"):
            load(file.parent)


@pytest.mark.cover(("zipped", "left"))
@pytest.mark.parametrize("zipped", [True, False], ids=["zipped", "before torch 1.6"])
@pytest.mark.parametrize("left", [0, -1000], ids="{} bytes".format)
def test_a_pickle_that_is_cut_short(left, zipped, write, refused):
    checkpoint = write(PICKLE, 3, _use_new_zipfile_serialization=zipped)
    file = sorted(checkpoint.glob("*.bin"))[-1]
    file.write_bytes(file.read_bytes()[:left])
    with refused(str(checkpoint), *([str(file), "again"] if zipped else [])):
        load(checkpoint)


class Malicious:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_would_run_code(write, refused):
    checkpoint = write(PICKLE)
    content = {"a": Malicious(checkpoint / "it ran")}
    for zipped in (True, False):
        torch.save(content, checkpoint / PICKLE, _use_new_zipfile_serialization=zipped)
        with refused(f"{PICKLE} would run", ".mkdir", "do not use this checkpoint"):
            load(checkpoint)
    assert not (checkpoint / "it ran").exists()


def test_a_directory_without_a_config(tmp_path, refused):
    with refused(str(tmp_path), "config.json", "save_pretrained"):
        load(tmp_path)


def test_a_config_that_cannot_be_used(write, refused):
    checkpoint = write()
    config = checkpoint / "config.json"
    fields = json.loads(config.read_text())
    unreadable = f"config.json of {str(checkpoint)!r} cannot be read"
    new = {"architectures": ["NewForCausalLM"], "model_type": "new-model"}
    for changes, says in (
        *(({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"), (new, "new-model")),
        ({"architectures": None}, "architecture"),
        *(({"hidden_size": "x"}, unreadable), ({"num_attention_heads": 0}, unreadable)),
    ):
        config.write_text(json.dumps({**fields, **changes}))
        with refused(str(checkpoint), says, error=(ValueError, RuntimeError)):
            load(checkpoint)
