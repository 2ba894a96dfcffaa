"""A dict of activations that are stored where they were computed, and handed out at home.

Also a dict of weights that stay where they lie. "Home" is the device of `gather_on` where that is
in force.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.placement.in_use import chosen_device


class CacheAtHome(dict[str, torch.Tensor]):
    """A cache of activations that stores each tensor where it was computed and reads it at home.

    Args:
        home: the device that every read brings the tensor to.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._home = home

    @property
    def home(self) -> torch.device:
        """The device that every read brings the tensor to."""
        return chosen_device(self._home) or self._home

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._at_home(super().__getitem__(name))

    def _at_home(self, value: Any) -> Any:
        return move(self._where_it_lies(value), self.home)

    def _where_it_lies(self, value: Any) -> Any:
        """The tensor that something stored here is; a subclass may store what stands for one."""
        return value

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors where they were computed, as a plain dict."""
        get = super().__getitem__
        return {name: self._where_it_lies(get(name)) for name in self}

    def __iter__(self) -> Iterator[str]:
        # Python copies a dict's values as they lie (dict(cache), {**cache}) unless it has this.
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As `dict.setdefault`, at home."""
        return self._at_home(super().setdefault(name, default))

    def popitem(self) -> tuple[str, torch.Tensor]:
        """As `dict.popitem`, at home."""
        name, value = super().popitem()
        return name, self._at_home(value)

    def get(self, name: str, default: Any = None) -> Any:
        """As `dict.get`, at home."""
        return self._at_home(super().get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        """As `dict.pop`, at home."""
        return self._at_home(super().pop(name, *default))

    def values(self) -> ValuesAtHome:  # type: ignore[override]
        """As `dict.values`; each tensor comes home when it is reached."""
        return ValuesAtHome(self)

    def items(self) -> ItemsAtHome:  # type: ignore[override]
        """As `dict.items`; each tensor comes home when it is reached."""
        return ItemsAtHome(self)

    def copy(self) -> CacheAtHome:
        """A shallow copy that reads at home too."""
        return self._with(lambda value: value)

    def __copy__(self) -> CacheAtHome:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheAtHome:
        return self._with(lambda value: copy.deepcopy(value, memo))

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> CacheAtHome:
        """A cache of changed tensors, each where this one has it."""
        return self.of({name: change(value) for name, value in self.stored().items()})

    def of(self, activations: Mapping[str, torch.Tensor]) -> CacheAtHome:
        """A cache of other activations, wherever they are, that is read where this one is."""
        new = CacheAtHome(self._home)
        new.update(activations)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as a plain dict, at home, so that torch.load can load it with weights_only.
        return OrderedDict, (), None, None, iter(self.items())


class ValuesAtHome(ValuesView[torch.Tensor]):
    """The values of a `CacheAtHome`; one tensor at a time is at home."""

    _mapping: CacheAtHome

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._mapping[name] for name in self._mapping)


class ItemsAtHome(ItemsView[str, torch.Tensor]):
    """The items of a `CacheAtHome`; one tensor at a time is at home."""

    _mapping: CacheAtHome

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._mapping[name]) for name in self._mapping)
