"""Models over the devices of a machine that is open for a whole module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spread_of_either_class import *  # noqa: F403


@pytest.fixture
def at_home(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens, where the model wants them."""
    return tokens.to(model.cfg.device)
