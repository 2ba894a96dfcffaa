"""Read a Hugging Face checkpoint, refusing one that is damaged or incomplete.

transformers fills missing tensors with random numbers and only warns; here that is an error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformer_lens.loading_from_pretrained as tl_loading
import transformers
from packaging.version import Version
from transformers import AutoModel, AutoModelForCausalLM

from tl_devicefix.model_config import is_checkpoint_directory


def load_hf_model(model_name: str, cfg: Any, **kwargs: Any) -> torch.nn.Module:
    """Load a checkpoint on the CPU, in the dtype that it is stored in.

    Args:
        model_name: a local checkpoint directory or a name on the hub.
        cfg: the HookedTransformerConfig; says which training checkpoint is wanted, if one is.
        kwargs: what `AutoModelForCausalLM.from_pretrained` takes.

    Raises:
        ValueError: if a tensor is missing, left over, misshapen or cut short; it is named.
    """
    if is_checkpoint_directory(model_name):
        check_shards(Path(model_name))
    elif model_name in tl_loading.NON_HF_HOSTED_MODEL_NAMES:
        raise ValueError(f"{model_name} is not on the hub: load it yourself and pass hf_model=...")
    if "revision" not in kwargs and cfg.from_checkpoint:
        kwargs["revision"] = _revision(model_name, cfg)
    kwargs.setdefault("token", os.environ.get("HF_TOKEN") or None)
    if model_name.startswith(tuple(tl_loading.NEED_REMOTE_CODE_MODELS)):
        kwargs.setdefault("trust_remote_code", True)
    multimodal = cfg.original_architecture == "Gemma3ForConditionalGeneration"
    auto: Any = AutoModel if multimodal else AutoModelForCausalLM
    model, report = auto.from_pretrained(
        model_name,
        **{_DTYPE_ARGUMENT: "auto"},
        output_loading_info=True,
        # So that shapes that do not fit are reported with the rest, and refused below.
        ignore_mismatched_sizes=True,
        **kwargs,
    )
    _check_report(report, model_name)
    return model.requires_grad_(False)


# transformers 4.56 renamed torch_dtype.
_DTYPE_ARGUMENT = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _revision(model_name: str, cfg: Any) -> str:
    """The hub revision of a training checkpoint, as TransformerLens names them."""
    if model_name.startswith("stanford-crfm"):
        return f"checkpoint-{cfg.checkpoint_value}"
    if model_name.startswith("EleutherAI/pythia"):
        return f"step{cfg.checkpoint_value}"
    raise ValueError(
        f"{model_name} has no training checkpoints that TransformerLens knows of; leave "
        "checkpoint_index and checkpoint_value out"
    )


def _check_report(report: dict[str, Any], model_name: str) -> None:
    """Turn transformers' loading report into an error if the checkpoint does not fit."""
    problems = {
        "lacks": sorted(report.get("missing_keys", ())),
        "has tensors that the architecture has no place for:": sorted(
            report.get("unexpected_keys", ())
        ),
        "has tensors of other shapes than its config asks for:": sorted(
            _mismatch(entry) for entry in report.get("mismatched_keys", ())
        ),
    }
    for problem, names in problems.items():
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            raise ValueError(
                f"the checkpoint {model_name!r}{_file_of(model_name, names[0])} {problem} {shown}; "
                "fetch or save it again, or load it yourself and pass hf_model=..."
            )


def _mismatch(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    name, stored, expected = entry
    return f"{name} (stored {tuple(stored)}, expected {tuple(expected)})"


def _file_of(model_name: str, tensor: str) -> str:
    """Which file of a local sharded checkpoint a tensor is listed in."""
    tensor = tensor.split(" ")[0]
    listed = _index(Path(model_name)).get(tensor)
    if listed is None and (Path(model_name) / "model.safetensors").is_file():
        listed = "model.safetensors"
    return f" ({listed})" if listed else ""


def _index(directory: Path) -> dict[str, str]:
    """Which file of a local sharded checkpoint holds which tensor; empty if it is not sharded."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return {}
    try:
        return json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{index} cannot be read ({error}); fetch it again") from error


def check_shards(directory: Path) -> None:
    """Check that every safetensors file of a checkpoint is there and whole.

    Raises:
        ValueError: naming the file, and the first tensor that is cut short.
    """
    for tensor, file in sorted(_index(directory).items()):
        if not (directory / file).is_file():
            raise ValueError(
                f"the checkpoint {str(directory)!r} lists {tensor} in {file}, but that file is not "
                "there; fetch it again"
            )
    for shard in sorted(directory.glob("*.safetensors")):
        _check_whole(shard)


def _check_whole(shard: Path) -> None:
    """Compare a safetensors file's length with its header (8 bytes of length, JSON, data)."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise ValueError(
                f"{shard} is cut short within its header ({size} bytes); fetch it again"
            )
        try:
            header = json.loads(file.read(header_size))
        except ValueError as error:
            raise ValueError(
                f"the header of {shard} is damaged ({error}); fetch it again"
            ) from error
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        end = 8 + header_size + entry["data_offsets"][1]
        if end > size:
            raise ValueError(
                f"{shard} is cut short: {name} should end at byte {end}, but the file has {size}; "
                "fetch it again"
            )
