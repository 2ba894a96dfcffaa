"""The differences between the two model classes: one adapter for each.

An adapter is a package, `hooked_transformer` or `transformer_bridge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

import torch

from tl_devicefix.dispatch.views import View
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer
from tl_devicefix.placement.placement import Placement
from tl_devicefix.types import Model


class Adapter(Protocol):
    """The interface to a class of models."""

    name: str
    """The name of the class, for messages."""
    model_class: type[Model]
    run_methods: tuple[str, ...]
    """Methods that run a model. If a subclass or a model overrides one, sweeps run all blocks."""
    has_dropout: bool
    """True if its modules behave differently in training mode."""

    def view_of(self, model: Model) -> View[Model]:
        """Make a view of a model: its own modules and hooks, the same weights."""

    def realign(self, model: Model, placement: Placement | None) -> None:
        """Update the config and the hooks after parts were moved or assigned."""

    def passes_stream_alone(self, model: Model) -> bool:
        """Return True if blocks pass on the residual stream and nothing else."""

    def option_names(self, config_or_model_name: object) -> Sequence[str]:
        """Return the names of the loader's options that `estimate` and `dry_run` take."""

    def read_blueprint(
        self,
        config_or_model_name: object,
        dtype: torch.dtype | str | None,
        options: dict[str, Any],
        cls: type | None = None,
    ) -> Any:
        """Return the `planning.plan.Blueprint` of the model that would be loaded."""


@cache
def adapters() -> dict[str, Adapter]:
    """Return the adapters of the installed TransformerLens by class name."""
    # Import them late: the installed TransformerLens may lack one of the classes.
    installed: list[ModuleType] = []
    if has_hooked_transformer():
        from tl_devicefix import hooked_transformer

        installed.append(hooked_transformer)
    if has_bridge():
        from tl_devicefix import transformer_bridge

        installed.append(transformer_bridge)
    return {adapter.name: cast(Adapter, adapter) for adapter in installed}


def is_model(model: object) -> bool:
    """Return True if this is a model of one of the two classes."""
    return isinstance(model, tuple(adapter.model_class for adapter in adapters().values()))


def adapter_of(model: object) -> Adapter:
    """Return the adapter of a model's class.

    Raises:
        TypeError: if it is of neither class.
    """
    for adapter in adapters().values():
        if isinstance(model, adapter.model_class):
            return adapter
    names = " or a ".join(adapters())
    raise TypeError(
        f"the model must be a {names}, but this is a {type(model).__name__}: give the model first"
    )
