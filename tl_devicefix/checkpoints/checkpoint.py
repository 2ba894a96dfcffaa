"""Read a Hugging Face checkpoint, refusing one that is damaged or incomplete.

transformers fills missing tensors with random numbers and only warns; here that is an error.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import transformer_lens.loading_from_pretrained as tl_loading
import transformers
from packaging.version import Version
from safetensors import SafetensorError
from transformers import AutoModel, AutoModelForCausalLM

from tl_devicefix.checkpoints.directories import is_checkpoint_directory
from tl_devicefix.checkpoints.hub import snapshot
from tl_devicefix.checkpoints.shards import check_shards, file_of, stored_shapes
from tl_devicefix.placement.memory import is_out_of_memory


def load_hf_model(model_name: str, cfg: Any, **kwargs: Any) -> torch.nn.Module:
    """Load a checkpoint on the CPU, in the dtype that it is stored in.

    Args:
        model_name: a local checkpoint directory or a name on the hub.
        cfg: the HookedTransformerConfig; says which training checkpoint is wanted, if one is.
        kwargs: what `AutoModelForCausalLM.from_pretrained` takes.

    Raises:
        ValueError: if a tensor is missing, left over, misshapen or cut short; it is named.
    """
    is_directory = is_checkpoint_directory(model_name)
    if is_directory:
        check_shards(Path(model_name))
    elif model_name in tl_loading.NON_HF_HOSTED_MODEL_NAMES:
        raise ValueError(f"{model_name} is not on the hub: load it yourself and pass hf_model=...")
    if "revision" not in kwargs and cfg.from_checkpoint:
        kwargs["revision"] = _revision(model_name, cfg)
    kwargs.setdefault("token", os.environ.get("HF_TOKEN") or None)
    # Never what is only called so: a directory, or a name that TransformerLens does not list.
    listed = not is_directory and model_name in tl_loading.OFFICIAL_MODEL_NAMES
    if listed and model_name.startswith(tuple(tl_loading.NEED_REMOTE_CODE_MODELS)):
        kwargs.setdefault("trust_remote_code", True)
    multimodal = cfg.original_architecture == "Gemma3ForConditionalGeneration"
    auto: Any = AutoModel if multimodal else AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(
            model_name,
            **{_DTYPE_ARGUMENT: "auto"},
            output_loading_info=True,
            # So that shapes that do not fit are reported with the rest, and refused below.
            ignore_mismatched_sizes=True,
            **kwargs,
        )
    except _UNREADABLE as error:
        if is_out_of_memory(error):
            raise
        if not is_directory and (folder := _fetched(model_name, kwargs)):
            check_shards(folder)
        reason = " ".join(str(error).split())
        raise ValueError(
            f"transformers cannot read the checkpoint {model_name!r}: {reason}"
        ) from error
    folder = Path(model_name) if is_directory else _fetched(model_name, kwargs)
    _check_report(report, model_name, folder or Path(model_name), model)
    return model.requires_grad_(False)


# What transformers, safetensors and torch raise for files, and values of a config, that are not as
# they should be.
_UNREADABLE = (
    OSError, ValueError, RuntimeError, EOFError, AttributeError, ArithmeticError, AssertionError,
    LookupError, pickle.UnpicklingError, SafetensorError,
)  # fmt: skip


# transformers 4.56 renamed torch_dtype.
_DTYPE_ARGUMENT = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


# Masks and rotary tables that old checkpoints store (GPT-2, GPT-J, GPT-Neo): never needed.
_OLD_BUFFER = re.compile(r"attn\.(bias|masked_bias)$|attention\.(bias|masked_bias)$|inv_freq$")


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


def _fetched(model_name: str, kwargs: dict[str, Any]) -> Path | None:
    """The folder in which what was fetched of a checkpoint on the hub is, if anything was."""
    try:
        return snapshot(model_name, **kwargs)
    except ValueError:
        return None


def _check_report(
    report: dict[str, Any], model_name: str, directory: Path, model: torch.nn.Module
) -> None:
    """Turn transformers' loading report into an error if the checkpoint does not fit."""
    stored = stored_shapes(directory)
    problems = {
        "lacks": sorted(report.get("missing_keys", ())),
        "has tensors that the architecture has no place for:": sorted(
            name for name in report.get("unexpected_keys", ()) if not _OLD_BUFFER.search(name)
        ),
        "has tensors of other shapes than its config asks for:": sorted(
            # transformers 5 gives (name, stored shape, expected shape), 4 only the name.
            entry if isinstance(entry, str) else entry[0]
            for entry in report.get("mismatched_keys", ())
        ),
    }
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for problem, names in problems.items():
        if names:
            shown = ", ".join(
                f"{name} (stored {stored[name]}, expected {expected[name]})"
                if name in stored and name in expected
                else name
                for name in names[:3]
            )
            more = f" and {len(names) - 3} more" if names[3:] else ""
            file = file_of(directory, names[0])
            raise ValueError(
                f"the checkpoint {model_name!r}{f' ({file})' if file else ''} {problem} {shown}"
                f"{more}; fetch or save it again"
            )
