"""What weights are read from, one component at a time, in HookedTransformer's format."""

from __future__ import annotations

from typing import Protocol

import torch

from tl_devicefix.weight_processing import Weights


class Source(Protocol):
    """Anything that weights can be read from, one processing unit at a time."""

    computes: bool
    """Whether reading makes tensors the size of a component, so that one is read at a time.

    If not, several threads read at once.
    """

    def read(self, unit: str, device: torch.device) -> Weights:
        """The weights of one unit, by their names within it, wherever they lie.

        They may alias the source's own tensors, so they are for copying only.

        Args:
            unit: a component's name; ln_final's weights come with the unembedding's.
            device: where to compute what has to be computed (merged adapters, dequantised weights).
        """
