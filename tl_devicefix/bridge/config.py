"""The transformers config that a Bridge is made by."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tl_devicefix.checkpoints.known_configs import known_config


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
