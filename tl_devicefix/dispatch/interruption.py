"""Weights that were left half processed, as that was interrupted: refused from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_UNFINISHED = "_tl_devicefix_unfinished"

WHY_REFUSED = (
    "this model's weights are only partly processed, as that was interrupted: load the model "
    "again (or give a HookedTransformer's load_and_process_state_dict all unprocessed weights)"
)


@contextlib.contextmanager
def changing_weights(model: Any) -> Iterator[None]:
    """Within it, the model's weights are replaced one by one: left by an error, they are mixed."""
    model.__dict__[_UNFINISHED] = True
    yield
    del model.__dict__[_UNFINISHED]


def load_state_dict(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.nn.Module.load_state_dict`: with all the weights, the model can be used again."""
    result = original(self, *args, **kwargs)
    if not result.missing_keys:
        self.__dict__.pop(_UNFINISHED, None)
    return result


def is_unfinished(model: Any) -> bool:
    """Whether the model's weights are in part those from before."""
    return _UNFINISHED in model.__dict__


def refuse_unfinished(model: Any) -> None:
    """Refuse a model whose weights are in part those from before.

    Raises:
        RuntimeError: saying how to mend it.
    """
    if is_unfinished(model):
        raise RuntimeError(WHY_REFUSED)
