"""The transformers config that a Bridge is made by, and the dtype of its weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from tl_devicefix.checkpoints.known_configs import known_config


def torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    """A dtype, or its name ("bfloat16", "torch.bfloat16"); by default float32.

    Raises:
        ValueError: if there is no such dtype.
    """
    named: Any = torch.float32 if dtype is None else dtype
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(
            f"dtype={dtype!r} is no floating-point dtype: give one such as 'bfloat16', or a "
            "torch.dtype"
        )
    return named


def hf_config(config_or_model_name: Any) -> Any:
    """The transformers config of a model: that which is given, known here, or read.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(config_or_model_name, PretrainedConfig):
        return config_or_model_name
    if not isinstance(config_or_model_name, str | os.PathLike):
        raise ValueError(
            f"{type(config_or_model_name).__name__} is neither a model's name, nor a checkpoint "
            "directory, nor a transformers config"
        )
    name = os.fspath(config_or_model_name)
    known = known_config(name)
    if known is not None:
        return known
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the config of {name!r} cannot be had: {reason}") from error
