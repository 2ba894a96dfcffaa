"""Whether the norms are what the config says: with weights, or folded into what reads them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformer_lens.components import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

from tl_devicefix.checking.report import Finding
from tl_devicefix.dispatch.naming import joined, listed
from tl_devicefix.hooked_transformer.components import (
    attention_kind,
    component_names,
    empty_component,
)

_NORMS = (LayerNorm, LayerNormPre, RMSNorm, RMSNormPre)


def norm_findings(model: Any) -> list[Finding]:
    """Norms of another class than TransformerLens builds by this config."""
    cfg = model.cfg
    says = f"cfg.normalization_type is {cfg.normalization_type!r}"
    wrong = _wrong_by(cfg, model)
    if not wrong:
        return []
    for other in ("LN", "LNPre", "RMS", "RMSPre"):
        if not _wrong_by(_with_type(cfg, other), model):
            message = f"{says}, but the norms ({listed(list(wrong))}) are those of {other!r}"
            fix = f'model.cfg.normalization_type = "{other}"'
            return [Finding("norms", "cfg.normalization_type", message, fix)]
    return [
        Finding(
            "norms",
            name,
            f"{name} is a {there}, but {says}, which asks for {asked}: load the model again, as "
            "its weights are folded in part only",
        )
        for name, (there, asked) in wrong.items()
    ]


def _wrong_by(cfg: Any, model: Any) -> dict[str, tuple[str, str]]:
    """The norms whose class is not the one by this config, and both classes' names.

    A module that a user has put in instead is not a norm of TransformerLens, and not compared.
    """
    modules = dict(model.named_modules())
    wrong = {}
    for name, asked in _asked(cfg):
        there = modules.get(name)
        if isinstance(there, _NORMS) and not isinstance(there, asked):
            wrong[name] = type(there).__name__, asked.__name__
    return wrong


def _asked(cfg: Any) -> Iterator[tuple[str, type[nn.Module]]]:
    """Each norm that TransformerLens builds by a config, and its class."""
    blocks: dict[str | None, nn.Module] = {}
    for name in component_names(cfg):
        if name.startswith("blocks."):
            kind = attention_kind(cfg, int(name.removeprefix("blocks.")))
            component = blocks.get(kind) or blocks.setdefault(kind, empty_component(name, cfg))
        else:
            component = empty_component(name, cfg)
        for path, module in component.named_modules():
            if isinstance(module, _NORMS):
                yield joined(name, path) if path else name, type(module)


def _with_type(cfg: Any, normalization_type: str) -> Any:
    cfg = copy.copy(cfg)
    cfg.normalization_type = normalization_type
    return cfg
