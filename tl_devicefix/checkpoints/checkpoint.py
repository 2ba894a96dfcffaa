"""Read a Hugging Face checkpoint, each tensor in the dtype of its file.

transformers fills missing tensors with random numbers and only warns; here that is an error, which
names the file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, modeling_utils

from tl_devicefix.checkpoints.hub import in_one_line, is_checkpoint_directory, snapshot
from tl_devicefix.errors import is_own_bug
from tl_devicefix.monkeypatch.applying import replaced_in_thread
from tl_devicefix.placement.devices import EmptyOnMeta

# What transformers, safetensors and torch raise for damaged files and wrong config values.
UNREADABLE = (
    OSError, ValueError, RuntimeError, EOFError, AttributeError, ArithmeticError, AssertionError,
    LookupError, TypeError, pickle.UnpicklingError, SafetensorError, struct.error,
)  # fmt: skip

# The embedding of masked audio in wav2vec 2.0 and HuBERT. Only training needs it, so many
# checkpoints lack it.
_UNREAD = re.compile(r"masked_spec_embed$")

# Masks and rotary tables that old checkpoints store (GPT-2, GPT-J, GPT-Neo): never needed.
_OLD_BUFFER = re.compile(
    r"(^|\.)attn\.(bias|masked_bias)$|attention\.(bias|masked_bias)$|inv_freq$"
)


@contextlib.contextmanager
def dtypes_as_stored() -> Iterator[None]:
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


def check_report(
    report: dict[str, Any],
    model_name: str,
    kwargs: Mapping[str, Any],
    model: torch.nn.Module,
    refuse_unexpected: bool = False,
) -> None:
    """Raise an error if transformers' loading report lists tensors that were not loaded.

    Args:
        report: as `from_pretrained(..., output_loading_info=True)` returns it.
        model_name: the checkpoint.
        kwargs: the arguments of `from_pretrained` that say where its files are.
        model: the loaded model.
        refuse_unexpected: True to also refuse tensors that the model has no place for.
    """
    missing = {name for name in report.get("missing_keys", ()) if not _UNREAD.search(name)}
    unexpected = report.get("unexpected_keys", ()) if refuse_unexpected else ()
    mismatched = report.get("mismatched_keys", ())
    stored: _Stored = {}
    if refuse_unexpected or missing or mismatched:
        stored = stored_tensors(model_name, kwargs)
    if refuse_unexpected:  # transformers 4 trusts the index of a sharded checkpoint
        missing |= {name for name, (_, shape) in stored.items() if shape is None}
    own = model.state_dict()
    problems = {
        "lacks": sorted(missing),
        _NO_PLACE: sorted(name for name in unexpected if not _OLD_BUFFER.search(name)),
        "has tensors of other shapes than its config asks for:": sorted(
            # transformers 5 gives (name, stored shape, expected shape), 4 only the name.
            entry if isinstance(entry, str) else entry[0]
            for entry in mismatched
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
        remedy = "fetch or save it again"
        if names is problems[_NO_PLACE]:
            remedy = f"correct its config.json, or {remedy}"
        if f"module.{names[0]}" in stored:
            remedy = "its names begin with 'module.': save the state dict of the wrapper's `module`"
        raise ValueError(
            f"the checkpoint {model_name!r} {problem} {', '.join(shown)}{more}; {remedy}"
        )


_NO_PLACE = "has tensors that the architecture has no place for:"
_Stored = dict[str, tuple[str, "tuple[int, ...] | None"]]
"""Tensor -> the name of its file, and its shape if the file has it."""


def stored_tensors(model_name: str, kwargs: Mapping[str, Any]) -> _Stored:
    """Return a checkpoint's tensors in files on this machine, and those that its index lists."""
    try:
        is_directory = is_checkpoint_directory(model_name)
        folder = Path(model_name) if is_directory else snapshot(model_name, **kwargs)
    except ValueError:  # its config.json cannot be fetched
        return {}
    stored: _Stored = {}
    for name in ("model.safetensors", "pytorch_model.bin"):  # in transformers' order
        files, index = [folder / name], folder / f"{name}.index.json"
        if not files[0].is_file() and index.is_file():
            with naming(index):
                content = json.loads(index.read_text())
                try:
                    listed = content["weight_map"]
                    stored = {tensor: (file, None) for tensor, file in listed.items()}
                    files = sorted({folder / file for file in listed.values()})
                except (AttributeError, LookupError, TypeError) as error:
                    raise ValueError("its weight_map does not name files") from error
        elif not files[0].is_file():
            continue
        for file in files:
            with naming(file):
                stored |= {tensor: (file.name, shape) for tensor, shape, _ in headers(file)}
        break
    return stored


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn errors of reading `file` into one sentence that names it, within a `with` block."""
    try:
        yield
    except UNREADABLE as error:
        if is_own_bug(error):
            raise
        # Leave out torch's own message: it says how to unpickle an unsafe file anyway.
        is_from_none = error.__suppress_context__ and error.__cause__ is None
        reason = in_one_line((is_from_none and error.__context__) or error)
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
"""safetensors' names of the dtypes that weights are converted between."""


def headers(file: Path) -> list[tuple[str, tuple[int, ...], torch.dtype | None]]:
    """Return each tensor's name, shape and dtype, which is None if it is not in `_DTYPES`."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            tensors = [(name, opened.get_slice(name)) for name in names]
            return [(n, tuple(t.get_shape()), _DTYPES.get(t.get_dtype())) for n, t in tensors]
    is_zip = zipfile.is_zipfile(file)  # torch before 1.6 wrote no zip files
    held = torch.load(file, map_location="meta", weights_only=True, mmap=is_zip)
    if not isinstance(held, dict) or not all(torch.is_tensor(t) for t in held.values()):
        raise ValueError("it holds things other than tensors")
    known = set(_DTYPES.values())
    return [(n, tuple(t.shape), t.dtype if t.dtype in known else None) for n, t in held.items()]
