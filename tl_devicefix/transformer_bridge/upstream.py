"""What is used of TransformerLens's own Bridge loading, wherever the installed version has it."""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf

try:
    from transformer_lens.model_bridge.sources._hf_format import (
        determine_architecture_from_hf_config,
    )
    from transformer_lens.model_bridge.sources.transformers.helpers import (
        get_hf_model_class_for_architecture,
    )
except ImportError:  # TransformerLens 3.9
    from transformer_lens.model_bridge.sources.transformers import (
        determine_architecture_from_hf_config,
        get_hf_model_class_for_architecture,
    )

__all__ = ["ArchitectureAdapterFactory", "adapter_for", "hf_model_class"]


def adapter_for(config: Any, model_name: str, dtype: torch.dtype) -> Any:
    """The adapter that TransformerLens would choose for a model with this transformers config.

    Raises:
        ValueError: if TransformerLens has none for its architecture.
    """
    architecture = determine_architecture_from_hf_config(config)
    cfg = build_bridge_config_from_hf(config, architecture, model_name, dtype)
    return ArchitectureAdapterFactory.select_architecture_adapter(cfg)


def hf_model_class(adapter: Any) -> Any:
    """The class of transformers that loads an adapter's architecture."""
    return get_hf_model_class_for_architecture(adapter.cfg.architecture)
