"""Weights that accelerate has offloaded: on meta in the model, and really on the CPU or on disk."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class OffloadedWeights:
    """The values of a model's tensors, wherever accelerate put them. Changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._stored = _stored(model)

    def values(self, module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer of `module`; if it is on meta, from where it was offloaded to.

        It may be the model's own, so copy it; it stays on meta if there are no values anywhere.
        """
        if not tensor.is_meta:
            return tensor
        # transformers 4 keeps weights that are tied on disk under one of their names only.
        tied = (
            (owner, its_name)
            for owner in self._stored
            for its_name, parameter in owner._parameters.items()
            if parameter is tensor
        )
        for owner, its_name in itertools.chain([(module, name)], tied):
            stored, prefix = self._stored.get(owner, ({}, ""))
            if (found := stored.get(prefix + its_name)) is not None:
                return found.to(tensor.dtype)
        return tensor


def _stored(model: nn.Module) -> dict[nn.Module, tuple[Mapping[str, Any], str]]:
    """Where accelerate holds a module's tensors, and what precedes their names there."""
    found: dict[nn.Module, tuple[Mapping[str, Any], str]] = {}
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if getattr(each, "offload", False) and each.weights_map is not None:
                owners = module.named_modules() if each.place_submodules else [("", module)]
                for name, owner in owners:
                    found[owner] = each.weights_map, f"{name}." if name else ""
    return found
