"""Training a model that is spread over devices, which TransformerLens would gather on one first."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from transformer_lens.train import train as transformer_lens_train

from tl_devicefix.placement.devices import resolve


def train(model: Any, config: Any, dataset: Any) -> Any:
    """See `transformer_lens.train.train`. A spread model is trained where it lies.

    Args:
        model: a HookedTransformer.
        config: if its `device` is None or the model's home, a spread model stays spread; another
            device gathers it there, as TransformerLens does.
        dataset: as TransformerLens takes it.
    """
    placement = getattr(model, "placement", None)
    if placement is None or len(placement.memories) == 1:
        return transformer_lens_train(model, config, dataset)
    if config.device is not None and resolve(config.device, placement.home) != placement.home:
        return transformer_lens_train(model, config, dataset)
    config = copy.copy(config)
    config.device = str(placement.home)
    with _staying(model):
        return transformer_lens_train(model, config, dataset)


@contextlib.contextmanager
def _staying(model: Any) -> Iterator[None]:
    """Within it, `model.to(...)` moves nothing."""
    model.__dict__["to"] = lambda *_args, **_kwargs: model
    try:
        yield
    finally:
        del model.__dict__["to"]
