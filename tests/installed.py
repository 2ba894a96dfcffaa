"""TransformerLens as it is installed: unpatched, but that it loads weights sooner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

import tl_devicefix

_load_state_dict = torch.nn.Module.load_state_dict


def _load_one_where_it_belongs(
    model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """torch's `load_state_dict`, on the module whose weight it is.

    TransformerLens loads a weight at a time, and torch looks at every module each time: a sixth of
    what these tests took.
    """
    if len(state_dict) == 1 and not strict:
        ((key, weight),) = state_dict.items()
        path, _, name = key.rpartition(".")
        with contextlib.suppress(AttributeError):  # of no module here: torch leaves it out
            model, state_dict = model.get_submodule(path), {name: weight}
    return _load_state_dict(model, state_dict, strict, assign)


@contextlib.contextmanager
def as_installed() -> Iterator[None]:
    """Within it, TransformerLens is unpatched, but that it loads weights sooner."""
    sooner = mock.patch.object(torch.nn.Module, "load_state_dict", _load_one_where_it_belongs)
    with tl_devicefix.disabled(), sooner:
        yield
