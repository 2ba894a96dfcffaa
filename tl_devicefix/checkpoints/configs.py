"""Reading a checkpoint's config.json, those of models that plan without it, and dtypes by name.

known_configs.json has, of each model, the fields that TransformerLens reads; it is no substitute
for a checkpoint's own config, so only planning uses it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from tl_devicefix.checkpoints.hub import in_one_line
from tl_devicefix.placement.memory import is_out_of_memory


def read_config(name: str, directory: str | Path, **kwargs: Any) -> Any:
    """The fields that transformers reads from a checkpoint's config.json."""
    with reading_config(name):
        if (file := Path(directory) / "config.json").is_file():
            fields = json.loads(file.read_text())
            if not isinstance(architectures := fields.get("architectures") or [], list):
                raise ValueError(f"architectures must be a list of names, but is {architectures!r}")
        return AutoConfig.from_pretrained(name, **kwargs)


@contextlib.contextmanager
def reading_config(name: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Within it, whatever wrong values of a config.json make Python raise is one sentence of it."""
    try:
        yield
    except (ImportError, NotImplementedError):  # nothing is wrong with it
        raise
    except errors as error:
        if is_out_of_memory(error):
            raise
        is_strict = type(error).__name__.startswith("StrictDataclass")
        cause = (is_strict and error.__cause__) or error
        is_fetched = (Path(name) / "config.json").is_file()
        advice = "correct it, or fetch it again" if is_fetched else "is its name spelt right?"
        raise ValueError(
            f"config.json of {name!r} cannot be read ({in_one_line(cause)}); {advice}"
        ) from error


def known_config(name: str) -> PretrainedConfig | None:
    """The fields that transformers would read from a model's config.json."""
    if name not in known_fields():
        return None
    fields = dict(known_fields()[name])
    model_type = fields.pop("model_type")
    if model_type in CONFIG_MAPPING:
        return AutoConfig.for_model(model_type, **fields)
    return PretrainedConfig(**fields)  # Qwen 1, whose class comes with its checkpoint


@cache
def known_fields() -> dict[str, dict[str, Any]]:
    """Name -> the fields of the model's config.json on the hub; not to be changed."""
    entries = json.loads((Path(__file__).parent / "known_configs.json").read_text())
    fields: dict[str, dict[str, Any]] = {}
    for entry in entries:  # each says only in what it differs from the one it is like
        like = fields[entry["like"]] if "like" in entry else {}
        for name in entry["names"]:
            fields[name] = {**like, **entry["config"]}
    return fields


_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, or its name as HookedTransformer takes it ("bfloat16", "bf16", "torch.bfloat16")."""
    named: Any = dtype
    if isinstance(dtype, str):
        named = _SHORT.get(dtype, getattr(torch, dtype.removeprefix("torch."), None))
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(
            "dtype must be a floating-point torch.dtype or its name, such as 'bfloat16' or "
            f"'fp16', but is {dtype!r}"
        )
    return named
