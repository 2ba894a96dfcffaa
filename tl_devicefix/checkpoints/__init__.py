"""Where weights come from: read one component at a time, in HookedTransformer's format."""

from __future__ import annotations

from typing import Protocol

import torch

from tl_devicefix.checkpoints.huggingface import HuggingFaceSource
from tl_devicefix.checkpoints.state_dict import StateDictSource
from tl_devicefix.folding import Weights

__all__ = ["HuggingFaceSource", "Source", "StateDictSource"]


class Source(Protocol):
    """Anything that weights can be read from, one processing unit at a time."""

    computes: bool
    """Whether reading makes tensors the size of a component, so that one is read at a time."""

    def read(self, unit: str, device: torch.device) -> Weights:
        """The weights of one unit, by their names within it, wherever they lie.

        They may alias the source's own tensors, so they are for copying only.

        Args:
            unit: a component's name; ln_final's weights come with the unembedding's.
            device: where to compute what has to be computed (merged adapters, dequantised weights).
        """
