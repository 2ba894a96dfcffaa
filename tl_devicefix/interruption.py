"""Weights that were left half processed, as that was interrupted: refused from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_UNFINISHED = "_tl_devicefix_unfinished"


@contextlib.contextmanager
def changing_weights(model: Any) -> Iterator[None]:
    """Within it, the model's weights are replaced one by one: left by an error, they are mixed."""
    model.__dict__[_UNFINISHED] = True
    yield
    del model.__dict__[_UNFINISHED]


def refuse_unfinished(model: Any) -> None:
    """Refuse a model whose weights are in part those from before.

    Raises:
        RuntimeError: saying how to mend it.
    """
    if _UNFINISHED in model.__dict__:
        raise RuntimeError(
            "this model's weights are only partly processed, as process_weights_() or "
            "load_and_process_state_dict(...) was interrupted: call load_and_process_state_dict "
            "with all of the unprocessed weights, or load the model again"
        )
