"""A tokenizer of a run's own, where TransformerLens changes one for the time of a call."""

from __future__ import annotations

import copy
from typing import Any

from tl_devicefix.running.turns import current_run


def take_own_tokenizer(model: Any) -> None:
    """Have a run's view change a copy: other runs in flight read the tokenizer meanwhile."""
    if current_run() is not None and model.tokenizer is not None:
        model.tokenizer = copy.copy(model.tokenizer)
