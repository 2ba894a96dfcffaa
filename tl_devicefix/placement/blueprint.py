"""A model that is yet to be made, of either class: what planning, estimating and rehearsing need.

Each class has its own: `hooked_transformer/blueprint.py`, `transformer_bridge/blueprint.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from tl_devicefix.placement.components import ComponentSize
from tl_devicefix.placement.placement import Placement


class Generation(ABC):
    """Generating with a KV cache, of which only the first and the last step are taken."""

    @abstractmethod
    def prompt(self) -> None:
        """Run the prompt, which fills the KV cache."""

    @abstractmethod
    def skip_to(self, length: int) -> None:
        """Have the KV cache as long as if this many tokens had been run."""

    @abstractmethod
    def last_token(self) -> None:
        """Run one token more."""


class Blueprint(ABC):
    """A model at its full size: its config, and how it is made without values."""

    name: str
    dtype: torch.dtype
    n_ctx: int
    n_layers: int

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> Blueprint:
        """The same model with weights of another dtype."""

    @abstractmethod
    def sizes(self) -> tuple[ComponentSize, ...]:
        """What its components weigh, in the order they run."""

    @abstractmethod
    def make(self, placement: Placement, tokenizer: Any = None) -> Any:
        """The model, on the devices of a `simulate(..., values=False)`."""

    @abstractmethod
    def room_to_load(self, placement: Placement) -> int:
        """Bytes that loading takes on a device beside the weights."""

    @abstractmethod
    def largest_stack(self, model: Any) -> int:
        """Bytes that the largest stacked weight (`model.W_in`) of a model takes, as it is made."""

    @abstractmethod
    def generation(self, model: Any, batch_size: int, seq_len: int) -> Generation:
        """Generating from prompts of `seq_len` tokens."""
