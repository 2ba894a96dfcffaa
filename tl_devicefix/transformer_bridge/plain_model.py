"""transformers' model around plain layers, for a forward of a Bridge.

Where nobody listens to anything of a block, nor of an embedding, final norm or unembedding, even
the wrapper around it is out of the way. What holds the blocks is copied for that, with the choice
that a forward made; hooks that come and go make another choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from tl_devicefix.transformer_bridge.plain_layer import PLAIN, PlainLayer, PlainPart, layer_of
from tl_devicefix.transformer_bridge.seen import Seen
from tl_devicefix.transformer_bridge.this_forward import this_forward


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`TransformersDriver.forward`, of a model whose wrappers are there where somebody listens."""
    if not this_forward.get().is_of_bridge:
        return original(self, *args, **kwargs)
    plain = _plain_of(self._model)
    twin = plain.now(self._model)
    if twin is None:
        return original(self, *args, **kwargs)
    driver: Any = object.__new__(type(self))
    vars(driver).update(vars(self), _model=twin.model)
    try:
        return original(driver, *args, **kwargs)
    finally:
        if twin.is_written():
            plain.stay_installed()


def prepare(bridge: Any) -> None:
    """Have the model and its blocks know what is plain, which views do not drop then."""
    _plain_of(bridge.original_model)
    for module in bridge.modules():
        if getattr(module, "is_list_item", False):
            layer_of(module)


def _plain_of(model: Any) -> PlainModel:
    plain: PlainModel | None = vars(model).get(PLAIN)
    if plain is None:
        plain = vars(model)[PLAIN] = PlainModel()
    return plain


class PlainModel:
    """The choices that there have been, and what the model was like."""

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._is_installed = False
        self._units: list[tuple[Any, PlainLayer]] = []
        self._twins: dict[tuple[Any, ...], _Twin | None] = {}

    # A copy's model makes its own.

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainModel:
        return PlainModel()

    def __reduce__(self) -> Any:
        return PlainModel, ()

    def now(self, model: Any) -> _Twin | None:
        """The model for this very forward; None if it is to run as it is."""
        if self._is_installed:
            return None
        if self._seen is None or not self._seen.is_as_seen():
            self._look_through(model)
        assert self._seen is not None
        if not self._units or self._seen.heard() is not None:
            return None
        chosen = tuple([layer.instead_of(unit) for unit, layer in self._units])
        if chosen not in self._twins:
            if len(self._twins) > _MOST:
                self._twins.clear()
            exchanged = {id(unit): each for (unit, _), each in zip(self._units, chosen)}
            is_same = all(unit is each for (unit, _), each in zip(self._units, chosen))
            self._twins[chosen] = None if is_same else _Twin(model, exchanged)
        return self._twins[chosen]

    def stay_installed(self) -> None:
        """Let the model run as it is from now on: it notes things in a forward."""
        self._is_installed = True
        self._units, self._twins = [], {}

    def _look_through(self, model: Any) -> None:
        self._twins = {}
        holders = list(_holders(model))
        self._seen = Seen([], holders)
        children = {child: None for each in holders for child in each.children()}
        units = [each for each in children if isinstance(each, GeneralizedComponent)]
        self._units = [
            (each, layer_of(each) if each.is_list_item else PlainPart()) for each in units
        ]
        if any(not _FORWARDS.isdisjoint(vars(each)) for each in holders):
            self._units = []


_MOST = 64
_FORWARDS = frozenset(("forward", "_hf_hook"))
"""What a module has that does not run its class's forward, but for a hook."""


def _holders(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those in it that hold a Bridge's wrappers, in which it does not look."""
    if any(isinstance(each, GeneralizedComponent) for each in module.modules()):
        yield module
        for child in module.children():
            if not isinstance(child, GeneralizedComponent):
                yield from _holders(child)


class _Twin:
    """transformers' model with some modules exchanged; what holds none is the model's own.

    Args:
        model: transformers'.
        exchanged: id of a module -> what is there instead.
    """

    def __init__(self, model: Any, exchanged: dict[int, Any]) -> None:
        self._made: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        known = {}
        for each in reversed(list(_holders(model))):
            twin = known[id(each)] = object.__new__(type(each))
            held = vars(twin)
            held.update(vars(each))
            # Or transformers would do so now, in modules that are not the twin's own.
            held["_output_capturing_hooks_installed"] = True
            held["_modules"] = {
                name: exchanged.get(id(child)) or known.get(id(child), child)
                for name, child in each._modules.items()
            }
            self._made.append((vars(each), held, dict(held)))
        self.model = known[id(model)]

    def is_written(self) -> bool:
        """Whether the forward has set an attribute, which the model has then too."""
        written = False
        for of_model, now, made in self._made:
            try:
                is_same = now == made
            except (RuntimeError, ValueError):  # tensors, others than before
                is_same = False
            if not is_same:
                written = True
                of_model.update((k, v) for k, v in now.items() if v is not made.get(k))
        return written
