"""A damaged checkpoint is refused: the file and the tensor are named, and nothing is made up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import D_MODEL
from transformer_lens import HookedTransformer

EARLY, LATE = "model.layers.0.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight"
BIAS = "model.layers.3.self_attn.q_proj.bias"


@pytest.fixture(params=[1, 3], ids=["one file", "sharded"])
def n_files(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def load(checkpoint: Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoint, n_devices=4)


def test_a_whole_checkpoint_is_loaded(
    n_files: int, tensors: Any, hf_models: Any, write_checkpoint: Any, machine: Any
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files)
    assert len(list(checkpoint.glob("*.safetensors"))) == n_files
    assert len(load(checkpoint).placement.devices) == 4


@pytest.mark.parametrize(
    "tensor", [EARLY, LATE, BIAS, "model.embed_tokens.weight", "lm_head.weight"]
)
def test_a_missing_tensor(
    tensor: str, n_files: int, tensors: Any, hf_models: Any, write_checkpoint: Any, refused: Any
) -> None:
    listed = list(tensors)
    del tensors[tensor]
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files, listed)

    with refused(str(checkpoint), tensor, *["model-"][: n_files - 1], "again"):
        load(checkpoint)


def test_a_missing_tensor_that_no_index_lists(
    tensors: Any, hf_models: Any, write_checkpoint: Any, refused: Any
) -> None:
    del tensors[LATE]
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files=3)

    with refused(str(checkpoint), LATE, "again"):
        load(checkpoint)


@pytest.mark.parametrize(
    "tensor", ["model.layers.1.mlp.other.weight", "model.layers.5.mlp.up_proj.weight"]
)
def test_an_extra_tensor(
    tensor: str,
    n_files: int,
    tensors: Any,
    hf_models: Any,
    write_checkpoint: Any,
    file_of: Any,
    refused: Any,
) -> None:
    tensors[tensor] = torch.ones(3)
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files)

    with refused(str(checkpoint), tensor, file_of(checkpoint, tensor), "again"):
        load(checkpoint)


@pytest.mark.parametrize("tensor", [EARLY, LATE])
def test_a_misshapen_tensor(
    tensor: str,
    n_files: int,
    tensors: Any,
    hf_models: Any,
    write_checkpoint: Any,
    file_of: Any,
    refused: Any,
) -> None:
    d_mlp = len(tensors[tensor])
    tensors[tensor] = torch.ones(d_mlp, D_MODEL - 1)
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files)

    shapes = (f"({d_mlp}, {D_MODEL - 1})", f"({d_mlp}, {D_MODEL})")
    with refused(str(checkpoint), tensor, file_of(checkpoint, tensor), *shapes):
        load(checkpoint)


NAME = "model.layers.1.mlp.up_proj.weight"


def with_header(content: bytes, **changes: Any) -> bytes:
    """A safetensors file (8 bytes of length, JSON, the values) that says else of one tensor."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[NAME].update(changes)
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + content[8 + size :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda content: content[:-2],
    "cut short within its header": lambda content: content[:100],
    "empty": lambda content: b"",
    "garbled": lambda content: content[:8] + b"?" * 12 + content[20:],
    "a list": lambda content: content[:8] + b"[1]" + content[11:],
    "another shape": lambda content: with_header(content, shape=[3, 3]),
    "other offsets": lambda content: with_header(content, data_offsets=[0, 4]),
    "another type": lambda content: with_header(content, dtype="F16"),
    "an unknown type": lambda content: with_header(content, dtype="int"),
    "no shape": lambda content: with_header(content, shape=None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_damaged(
    damage: str, n_files: int, tensors: Any, hf_models: Any, write_checkpoint: Any, refused: Any,
    file_of: Any,
) -> None:  # fmt: skip
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files)
    file = checkpoint / file_of(checkpoint, NAME)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))

    with refused(str(file), f"{file.stat().st_size} bytes", "again"):
        load(checkpoint)


def test_a_file_from_the_hub_that_is_cut_short(
    n_files: int, hub: Any, hf_models: Any, refused: Any
) -> None:
    size = "20KB" if n_files > 1 else "5GB"
    snapshot = hub.add("someone/tune", hf_models("qwen2"), max_shard_size=size)
    file = sorted(snapshot.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])

    with refused(str(file), "cut short", "again"):
        HookedTransformer.from_pretrained("someone/tune", n_devices=4)


def test_a_shard_that_is_not_there(
    tensors: Any, hf_models: Any, write_checkpoint: Any, file_of: Any, refused: Any
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files=3)
    shard = file_of(checkpoint, LATE)
    (checkpoint / shard).unlink()

    with refused(str(checkpoint / shard), "is missing", "again"):
        load(checkpoint)


def test_an_index_that_is_cut_short(
    tensors: Any, hf_models: Any, write_checkpoint: Any, refused: Any
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files=3)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-30])

    with refused(str(index), "again"):
        load(checkpoint)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": null}', '{"weight_map": {"a": 5}}'])
def test_an_index_that_is_something_else(
    index: str, tensors: Any, hf_models: Any, write_checkpoint: Any, refused: Any
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors, n_files=3)
    (checkpoint / "model.safetensors.index.json").write_text(index)

    with refused("model.safetensors.index.json", "again"):
        load(checkpoint)


@pytest.fixture
def write_pickles(tmp_path: Path, hf_models: Any, tensors: Any) -> Callable[..., Path]:
    """`write_pickles(2)`: the tiny Qwen2 in so many `pytorch_model*.bin`."""

    def write(n_files: int, **options: Any) -> Path:
        hf_models("qwen2").config.save_pretrained(tmp_path)
        if n_files == 1:
            torch.save(tensors, tmp_path / "pytorch_model.bin", **options)
            return tmp_path
        file_of = {
            name: f"pytorch_model-{1 + i % n_files:05}-of-{n_files:05}.bin"
            for i, name in enumerate(sorted(tensors))
        }
        for file in set(file_of.values()):
            here = {name: tensor for name, tensor in tensors.items() if file_of[name] == file}
            torch.save(here, tmp_path / file, **options)
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
        return tmp_path

    return write


@pytest.mark.parametrize("zipped", [True, False], ids=["zipped", "before torch 1.6"])
@pytest.mark.parametrize("left", [0, 2, 1000, -1000], ids="{} bytes".format)
def test_a_pickle_that_is_cut_short(
    left: int, zipped: bool, n_files: int, write_pickles: Any, refused: Any
) -> None:
    checkpoint = write_pickles(n_files, _use_new_zipfile_serialization=zipped)
    file = sorted(checkpoint.glob("*.bin"))[-1]
    file.write_bytes(file.read_bytes()[:left])

    with refused(str(checkpoint), *([str(file), "again"] if zipped else [])):
        load(checkpoint)


def test_a_pickled_shard_that_is_not_there(write_pickles: Any, refused: Any) -> None:
    checkpoint = write_pickles(3)
    (checkpoint / "pytorch_model-00002-of-00003.bin").unlink()

    with refused(str(checkpoint), "pytorch_model-00002-of-00003.bin", "again"):
        load(checkpoint)


@pytest.mark.parametrize("held", [[1, 2, 3], {"a": 5}, {5: torch.ones(2)}], ids=repr)
def test_a_pickle_of_something_else(held: Any, write_pickles: Any, refused: Any) -> None:
    checkpoint = write_pickles(1)
    torch.save(held, checkpoint / "pytorch_model.bin")

    with refused(str(checkpoint)):
        load(checkpoint)


class Malicious:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code(
    zipped: bool, write_pickles: Any, refused: Any, tmp_path: Path
) -> None:
    checkpoint = write_pickles(1)
    torch.save(
        {"a": Malicious(tmp_path / "it ran")},
        checkpoint / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    with refused("pytorch_model.bin would run", ".mkdir", "do not use this checkpoint"):
        load(checkpoint)
    assert not (tmp_path / "it ran").exists()


def test_a_checkpoint_without_any_weights(
    tensors: Any, hf_models: Any, write_checkpoint: Any, refused: Any
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors)
    (checkpoint / "model.safetensors").unlink()

    with refused(str(checkpoint), "model.safetensors", error=(ValueError, OSError)):
        load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "Bert"),
        ({"architectures": ["NewForCausalLM"], "model_type": "new-model"}, "new-model"),
        ({"architectures": None}, "architecture"),
    ],
    ids=["decoder", "encoder-decoder", "encoder", "not in transformers", "not named"],
)
def test_an_architecture_that_transformer_lens_has_not(
    changes: dict[str, Any],
    says: str,
    tensors: Any,
    hf_models: Any,
    write_checkpoint: Any,
    refused: Any,
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors)
    config = checkpoint / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))

    with refused(str(checkpoint), says, error=(ValueError, RuntimeError)):
        load(checkpoint)


WRONG_VALUES: dict[str, Any] = {
    "hidden_size": "x",
    "num_attention_heads": 0,
    "hidden_act": "x",
    "num_hidden_layers": 10**9,
    "num_labels": 10**9,
    "text_config": {"num_local_experts": 10**9},
    "architectures": 5,
    "vocab_size": -1,
}


@pytest.mark.parametrize("field", WRONG_VALUES)
def test_a_config_with_a_wrong_value(
    field: str, tensors: Any, hf_models: Any, write_checkpoint: Any, refused: Any
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors)
    config = checkpoint / "config.json"
    changes = {field: WRONG_VALUES[field]}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))

    with refused(f"config.json of {str(checkpoint)!r} cannot be read"):
        load(checkpoint)


def test_a_directory_without_a_config(tmp_path: Path, refused: Any) -> None:
    with refused(str(tmp_path), "config.json", "save_pretrained"):
        load(tmp_path)


@pytest.mark.parametrize("n_files", [1, 3])
def test_a_pickle_with_a_tensor_of_another_shape(
    n_files: int, tensors: Any, write_pickles: Any, refused: Any
) -> None:
    tensors[NAME] = torch.zeros(3, 3)
    checkpoint = write_pickles(n_files)

    with refused(NAME, "(3, 3)", "(24, 16)", "pytorch_model"):
        load(checkpoint)


def test_files_that_are_not_the_checkpoint_s_are_not_read(
    hf_models: Any, tensors: Any, write_checkpoint: Any, machine: Any
) -> None:
    checkpoint = write_checkpoint(hf_models("qwen2"), tensors)
    (checkpoint / "other.safetensors").write_bytes(b"abc")
    assert load(checkpoint) is not None
