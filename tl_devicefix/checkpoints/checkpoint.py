"""Read a Hugging Face checkpoint, each tensor in the dtype of its file."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformer_lens.loading_from_pretrained as tl_loading
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, modeling_utils

from tl_devicefix.checkpoints.files import (
    UNREADABLE,
    check_report,
    headers,
    naming,
    stored_tensors,
)
from tl_devicefix.checkpoints.hub import in_one_line, is_checkpoint_directory
from tl_devicefix.monkeypatch.applying import replaced_in_thread
from tl_devicefix.placement.devices import EmptyOnMeta
from tl_devicefix.placement.memory import is_out_of_memory
from tl_devicefix.tracebacks import is_own_bug
from tl_devicefix.types import Config


def load_hf_model(model_name: str, cfg: Config, **kwargs: Any) -> torch.nn.Module:
    """Load a checkpoint on the CPU, each tensor in the dtype in which it is stored."""
    is_directory = is_checkpoint_directory(model_name)
    if not is_directory and model_name in tl_loading.NON_HF_HOSTED_MODEL_NAMES:
        raise ValueError(f"{model_name} is not on the hub: load it yourself and pass hf_model=...")
    if "revision" not in kwargs and cfg.from_checkpoint:
        kwargs["revision"] = _revision(model_name, cfg)
    kwargs.setdefault("token", os.environ.get("HF_TOKEN") or None)
    # A directory may have a listed name by chance, so it gets no trust_remote_code.
    listed = not is_directory and model_name in tl_loading.OFFICIAL_MODEL_NAMES
    if listed and model_name.startswith(tuple(tl_loading.NEED_REMOTE_CODE_MODELS)):
        kwargs.setdefault("trust_remote_code", True)
    multimodal = cfg.original_architecture == "Gemma3ForConditionalGeneration"
    auto: Any = AutoModel if multimodal else AutoModelForCausalLM
    try:
        with _dtypes_as_stored():
            model, report = auto.from_pretrained(
                model_name,
                dtype="auto",
                output_loading_info=True,
                # Wrong shapes are reported, and refused below with the rest.
                ignore_mismatched_sizes=True,
                **kwargs,
            )
    except UNREADABLE as error:
        if is_out_of_memory(error) or is_own_bug(error):
            raise
        stored_tensors(model_name, kwargs)  # raises an error that names a damaged file
        raise ValueError(
            f"transformers cannot read the checkpoint {model_name!r}: {in_one_line(error)}"
        ) from error
    check_report(report, model_name, kwargs, model, refuse_unexpected=True)
    return model.requires_grad_(False)


@contextlib.contextmanager
def _dtypes_as_stored() -> Iterator[None]:
    """Make this thread's `from_pretrained` keep the dtypes of the files, within a `with` block.

    transformers converts each tensor to the dtype of its empty parameter, which comes from
    config.json. So we give the empty parameters the files' dtypes just before the files are read.
    """

    def load(
        original: Callable[..., object], model: PreTrainedModel, *args: Any, **kwargs: object
    ) -> object:
        if files := args[1]:  # args[0] is a state dict
            _give_dtypes(model, map(Path, files))
        return original(model, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced_in_thread(PreTrainedModel, "_load_pretrained_model", load))
        # transformers 4 would meanwhile make other threads' parameters empty too.
        if hasattr(modeling_utils, empty := "init_empty_weights"):
            stack.enter_context(replaced_in_thread(modeling_utils, empty, lambda _: EmptyOnMeta()))
        yield


def _give_dtypes(model: PreTrainedModel, files: Iterable[Path]) -> None:
    """Give a model's empty parameters, and its buffers, the dtypes of the tensors in `files`.

    transformers may rename and join tensors. So a parameter that no tensor is named after gets the
    widest dtype among the tensors that no parameter is named after.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return  # the quantiser decides the dtype that it unpacks to
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    stored: dict[str, torch.dtype | None] = {}
    for file in files:
        if file.suffix in (".safetensors", ".bin"):
            with naming(file):
                for name, _, dtype in headers(file):
                    # Many files omit the base model's prefix. A causal model's own names have it,
                    # except the head's.
                    stored[name if name in own else f"{model.base_model_prefix}.{name}"] = dtype
    others = [dtype for name, dtype in stored.items() if dtype is not None and name not in own]
    widest = functools.reduce(torch.promote_types, others) if others else None
    # Stored names come last, so that a tied head's other, unstored name does not override them.
    for name in sorted(own, key=stored.__contains__):
        dtype = stored.get(name, widest)
        is_read = name in stored or isinstance(own[name], nn.Parameter)
        if dtype is not None and is_read and own[name].is_floating_point():
            own[name].data = own[name].data.to(dtype)


def _revision(model_name: str, cfg: Config) -> str:
    """Return the hub revision of a training checkpoint, by TransformerLens's naming."""
    if model_name.startswith("stanford-crfm"):
        return f"checkpoint-{cfg.checkpoint_value}"
    if model_name.startswith("EleutherAI/pythia"):
        return f"step{cfg.checkpoint_value}"
    raise ValueError(
        f"{model_name} has no training checkpoints that TransformerLens knows of; leave "
        "checkpoint_index and checkpoint_value out"
    )
