"""A whole state dict in HookedTransformer's format as a source, as the small `.pth` models come."""

from __future__ import annotations

import torch

from tl_devicefix.checkpoints.units import name_in_unit, processing_unit
from tl_devicefix.weight_processing import Weights


class StateDictSource:
    """A state dict that is in memory, or mapped, already."""

    computes = False

    def __init__(self, state_dict: Weights) -> None:
        self._state_dict = state_dict

    def read(self, unit: str, device: torch.device) -> Weights:
        """See `Source.read`."""
        return of_unit(self._state_dict, unit)


def of_unit(state_dict: Weights, unit: str) -> Weights:
    """The weights of one processing unit, by their names within it."""
    return {
        name_in_unit(name): tensor
        for name, tensor in state_dict.items()
        if processing_unit(name) == unit
    }
