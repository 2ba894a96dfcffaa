"""What each component of a model weighs, by its config or its name."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch

from tl_devicefix.versions import has_hooked_transformer

if TYPE_CHECKING:
    from tl_devicefix.components import ComponentSize


def weigh(
    config_or_model_name: Any, dtype: torch.dtype | str | None
) -> tuple[tuple[ComponentSize, ...], torch.dtype]:
    """The sizes of a model's components, in the order they run, and the dtype they are weighed in.

    Args:
        config_or_model_name: as for `plan`.
        dtype: by default that of a config, and float32 for a name.

    Raises:
        ValueError: if the config cannot be had.
    """
    if has_hooked_transformer() and not hasattr(config_or_model_name, "model_type"):
        return _weigh_hooked(config_or_model_name, dtype)
    from tl_devicefix.bridge.sizes import weigh_bridge

    return weigh_bridge(config_or_model_name, dtype)


def _weigh_hooked(
    config_or_model_name: Any, dtype: torch.dtype | str | None
) -> tuple[tuple[ComponentSize, ...], torch.dtype]:
    from tl_devicefix.hooked_components import component_sizes
    from tl_devicefix.model_config import model_config, torch_dtype

    if isinstance(config_or_model_name, str | os.PathLike):
        wanted = torch.float32 if dtype is None else torch_dtype(dtype)
        name = os.fspath(config_or_model_name)
        cfg = model_config(name, prefer_known=True, dtype=wanted)
    elif dtype is None:
        cfg = config_or_model_name
    else:
        cfg = copy.copy(config_or_model_name)
        cfg.dtype = torch_dtype(dtype)
    return component_sizes(cfg), cfg.dtype
