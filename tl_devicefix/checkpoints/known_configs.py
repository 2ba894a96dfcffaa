"""The config.json of models that are looked up on the hub, so that they plan without it.

known_configs.json has, of each, the fields that TransformerLens reads; it is no substitute for a
checkpoint's own config, so only planning uses it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig


def known_config(name: str) -> PretrainedConfig | None:
    """What transformers would read of a model's config.json.

    Args:
        name: the name that TransformerLens lists the model by, or the hub's.

    Returns:
        A new config, or None if the model is not among those known here.
    """
    if name not in known_fields():
        return None
    fields = dict(known_fields()[name])
    model_type = fields.pop("model_type")
    if model_type in CONFIG_MAPPING:
        return AutoConfig.for_model(model_type, **fields)
    return PretrainedConfig(**fields)  # Qwen 1, whose class comes with its checkpoint


@cache
def known_fields() -> dict[str, dict[str, Any]]:
    """Name -> what is known of the model's config.json, as it is on the hub; not to be changed."""
    entries = json.loads((Path(__file__).parent / "known_configs.json").read_text())
    fields: dict[str, dict[str, Any]] = {}
    for entry in entries:  # each says only in what it differs from the one it is like
        of_like = fields[entry["like"]] if "like" in entry else {}
        for name in entry["names"]:
            fields[name] = {**of_like, **entry["config"]}
    return fields
