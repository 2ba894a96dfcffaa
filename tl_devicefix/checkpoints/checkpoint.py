"""Read a Hugging Face checkpoint, refusing one that is damaged or incomplete.

transformers fills missing tensors with random numbers and only warns; here that is an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import struct
import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformer_lens.loading_from_pretrained as tl_loading
import transformers
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from tl_devicefix.checkpoints.hub import in_one_line, is_checkpoint_directory, snapshot
from tl_devicefix.placement.memory import is_out_of_memory


def load_hf_model(model_name: str, cfg: Any, **kwargs: Any) -> torch.nn.Module:
    """Load a checkpoint on the CPU, each tensor in the dtype in which it is stored."""
    is_directory = is_checkpoint_directory(model_name)
    if not is_directory and model_name in tl_loading.NON_HF_HOSTED_MODEL_NAMES:
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
        with _dtypes_as_stored():
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
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is not None and unknown[1] in kwargs:
            raise TypeError(
                f"from_pretrained has no argument {unknown[1]!r}, and transformers has none for "
                f"{model_name!r}; leave it out"
            ) from error
        _stored_tensors(model_name, kwargs)  # of which one may say more
        raise ValueError(
            f"transformers cannot read the checkpoint {model_name!r}: {in_one_line(error)}"
        ) from error
    _check_report(report, model_name, kwargs, model)
    return model.requires_grad_(False)


# What transformers, safetensors and torch raise for files, and values of a config, that are not as
# they should be.
_UNREADABLE = (
    OSError, ValueError, RuntimeError, EOFError, AttributeError, ArithmeticError, AssertionError,
    LookupError, TypeError, pickle.UnpicklingError, SafetensorError, struct.error,
)  # fmt: skip


# transformers 4.56 renamed torch_dtype.
_DTYPE_ARGUMENT = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


@contextlib.contextmanager
def _dtypes_as_stored() -> Iterator[None]:
    """Within it, this thread's `from_pretrained` keeps the dtypes of the files.

    transformers converts each tensor to the dtype of the empty parameter that it is for, which is
    the one in config.json. So the empty parameters get their dtypes from the files, just before
    these are read; what needs no conversion stays mapped.
    """
    installed, thread = vars(PreTrainedModel)["_load_pretrained_model"], threading.get_ident()

    @classmethod  # type: ignore[misc]
    def load(cls: Any, model: Any, state_dict: Any, files: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and files:
            _give_dtypes(model, map(Path, files))
        return installed.__get__(None, cls)(model, state_dict, files, *args, **kwargs)

    with mock.patch.object(PreTrainedModel, "_load_pretrained_model", load):
        yield


def _give_dtypes(model: PreTrainedModel, files: Iterable[Path]) -> None:
    """Give a model's empty parameters, and buffers, the dtypes of the tensors in `files`.

    A parameter of another name than all tensors is of renamed or joined ones, so it gets the
    widest dtype of the tensors that have no parameter of their name.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return  # because the quantiser decides what it unpacks to
    stored: dict[str, torch.dtype | None] = {}
    for file in files:
        if file.suffix in (".safetensors", ".bin"):
            with _naming(file):
                stored |= {name: dtype for name, _, dtype in _headers(file)}
    own = dict(model.named_parameters(remove_duplicate=False))
    own |= {name: tensor for name, tensor in model.named_buffers() if name in stored}
    others = [dtype for name, dtype in stored.items() if dtype is not None and name not in own]
    widest = functools.reduce(torch.promote_types, others) if others else None
    for name, tensor in own.items():
        dtype = stored.get(name, widest)
        if dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


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


def _check_report(
    report: dict[str, Any], model_name: str, kwargs: dict[str, Any], model: torch.nn.Module
) -> None:
    """Turn transformers' loading report into an error if the checkpoint does not fit."""
    stored, own = _stored_tensors(model_name, kwargs), model.state_dict()
    # transformers 4 believes the index of a sharded checkpoint.
    listed_only = {name for name, (_, shape) in stored.items() if shape is None}
    problems = {
        "lacks": sorted({*report.get("missing_keys", ()), *listed_only}),
        "has tensors that the architecture has no place for:": sorted(
            name for name in report.get("unexpected_keys", ()) if not _OLD_BUFFER.search(name)
        ),
        "has tensors of other shapes than its config asks for:": sorted(
            # transformers 5 gives (name, stored shape, expected shape), 4 only the name.
            entry if isinstance(entry, str) else entry[0]
            for entry in report.get("mismatched_keys", ())
        ),
    }
    for problem, names in problems.items():
        if not names:
            continue
        shown = []
        for name in names[:3]:
            file, shape = stored.get(name, (None, None))
            in_file = f" in {file}" if file else ""
            if shape is not None and name in own:
                in_file += f" (stored {shape}, expected {tuple(own[name].shape)})"
            shown.append(f"{name}{in_file}")
        more = f" and {len(names) - 3} more" if names[3:] else ""
        raise ValueError(
            f"the checkpoint {model_name!r} {problem} {', '.join(shown)}{more}; fetch or save it "
            "again"
        )


# --------------------------------------------------------------------------------------------
# What the weight files hold, to say more where something is wrong

_Stored = dict[str, tuple[str, "tuple[int, ...] | None"]]
"""Tensor -> the name of its file, and its shape if the file has it."""


def _stored_tensors(model_name: str, kwargs: dict[str, Any]) -> _Stored:
    """The tensors of a checkpoint that is on this machine, and those that its index lists."""
    try:
        is_directory = is_checkpoint_directory(model_name)
        folder = Path(model_name) if is_directory else snapshot(model_name, **kwargs)
    except ValueError:  # nothing of it has been fetched
        return {}
    stored: _Stored = {}
    for name in ("model.safetensors", "pytorch_model.bin"):  # as transformers looks for them
        files, index = [folder / name], folder / f"{name}.index.json"
        if not files[0].is_file() and index.is_file():
            with _naming(index):
                listed = json.loads(index.read_text())["weight_map"]
                stored = {tensor: (file, None) for tensor, file in listed.items()}
                files = sorted({folder / file for file in listed.values()})
        elif not files[0].is_file():
            continue
        for file in files:
            with _naming(file):
                stored |= {tensor: (file.name, shape) for tensor, shape, _ in _headers(file)}
        break
    return stored


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name a file that cannot be read, in one sentence, within a `with` block."""
    try:
        yield
    except _UNREADABLE as error:
        # In place of its own reason, torch says how to unpickle the file all the same.
        reason = in_one_line((error.__suppress_context__ and error.__context__) or error)
        if (called := re.search(r"GLOBAL (\w[\w.]*)", reason)) is not None:
            raise ValueError(
                f"{file} would run {called[1]} when it is unpickled, which no weights need, so it "
                "was not read: do not use this checkpoint, or have whoever made it save it as "
                "safetensors"
            ) from error
        state = "is missing"
        if file.is_file():
            state = f"is damaged or incomplete, with {file.stat().st_size} bytes"
        raise ValueError(f"{file} {state} ({reason}); fetch it again") from error


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""safetensors's names of the dtypes that weights are converted between."""


def _headers(file: Path) -> list[tuple[str, tuple[int, ...], torch.dtype | None]]:
    """Name, shape and dtype of each tensor in a file; None for a dtype that is not in `_DTYPES`."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            tensors = [(name, opened.get_slice(name)) for name in opened.keys()]
            return [(n, tuple(t.get_shape()), _DTYPES.get(t.get_dtype())) for n, t in tensors]
    is_zip = zipfile.is_zipfile(file)  # before torch 1.6 they were none
    held = torch.load(file, map_location="meta", weights_only=True, mmap=is_zip)
    known = set(_DTYPES.values())
    return [(n, tuple(t.shape), t.dtype if t.dtype in known else None) for n, t in held.items()]
