"""The transformers config that a Bridge is made by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from tl_devicefix.checkpoints.directories import is_checkpoint_directory, read_config
from tl_devicefix.checkpoints.known_configs import known_config
from tl_devicefix.placement.components import check_count


def hf_config(config_or_model_name: Any) -> Any:
    """The transformers config of a model: that which is given, known here, or read.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(config_or_model_name, PretrainedConfig):
        check_count("num_hidden_layers", getattr(config_or_model_name, "num_hidden_layers", 0))
        return config_or_model_name
    if not isinstance(config_or_model_name, str | os.PathLike):
        raise ValueError(
            f"a {type(config_or_model_name).__name__} is neither a model's name, nor a checkpoint "
            "directory, nor a transformers config"
        )
    name = os.fspath(config_or_model_name)
    known = known_config(name)
    if known is not None:
        return known
    return read_config(name, Path(name) if is_checkpoint_directory(name) else None)
