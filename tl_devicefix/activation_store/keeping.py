"""What of a forward's activations is kept: by name, reduced, in a dtype, of some tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tl_devicefix.activation_store.format import NOT_BY_TOKEN, Axis, Entry, can_be_stored
from tl_devicefix.gathering.caches import CacheAtHome
from tl_devicefix.misspelt import did_you_mean

Reduce = Callable[[torch.Tensor], torch.Tensor]
Keep = Callable[[torch.Tensor], torch.Tensor] | Literal["attention_mask"]


class Found(NamedTuple):
    """What is stored of a forward's activations."""

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]
    """For each name of the cache, in its order, the one under which it is in `tensors`."""


@dataclass(frozen=True)
class Keeping:
    """What is kept of each forward.

    Attributes:
        names_filter: as `run_with_cache` takes it.
        dtype: to which floating-point activations are converted, on their device.
        reduce: a function of an activation, or one for each of some names.
        keep: which tokens are stored: a function of tokens `[batch, pos]` that returns booleans of
            that shape, or "attention_mask" for those that are no padding. None for all.
    """

    names_filter: Any = None
    dtype: torch.dtype | None = None
    reduce: Reduce | Mapping[str, Reduce] | None = None
    keep: Keep | None = None

    def __post_init__(self) -> None:
        """Refuse a `transform` that cannot be called."""
        given = self.reduce.values() if isinstance(self.reduce, Mapping) else [self.reduce]
        for each in given:
            if each is not None and not callable(each):
                raise TypeError(
                    "transform must be a function of an activation, or a dict from names to such, "
                    f"but has {each!r}: give lambda activation: activation.mean(1), for example"
                )

    def tokens_of(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Which tokens are stored, on the CPU; None for all.

        Raises:
            ValueError: if `token_mask` is or returns something else.
        """
        if self.keep is None:
            return None
        if self.keep == "attention_mask":
            return mask
        if not callable(self.keep):
            raise ValueError(
                'token_mask must be a function of tokens, or "attention_mask", but is '
                f"{self.keep!r}"
            )
        kept = self.keep(tokens)
        if not isinstance(kept, torch.Tensor):
            raise ValueError(
                "token_mask must return a tensor of booleans of the tokens' shape, but returned a "
                f"{type(kept).__name__}"
            )
        if kept.shape != tokens.shape or kept.dtype != torch.bool:
            raise ValueError(
                f"token_mask must return booleans of the tokens' shape {list(tokens.shape)}, but "
                f"returned {kept.dtype} of {list(kept.shape)}"
            )
        return kept.cpu()

    def of(
        self, cache: Mapping[str, Any], kept: torch.Tensor | None, points: Mapping[str, Any]
    ) -> Found:
        """What is stored of a cache, each tensor on its device.

        Args:
            cache: of a forward.
            kept: which tokens are, `[batch, pos]` on the CPU.
            points: by name, hook points. A Bridge has some by two names, and then one tensor twice.

        Raises:
            TypeError: if `transform` returns no tensor.
            ValueError: if it is for names that are not there, or tokens are to be left out of what
                has no axis for them.
        """
        stored = cache.stored() if isinstance(cache, CacheAtHome) else cache
        found: dict[str, torch.Tensor] = {}
        first: dict[Any, str] = {}
        names: dict[str, str] = {}
        if isinstance(self.reduce, Mapping) and (unknown := self.reduce.keys() - stored.keys()):
            name = min(unknown)
            raise ValueError(
                f"transform has {name}, which is not kept{did_you_mean(name, list(stored))}"
            )
        for name, activation in stored.items():
            if not isinstance(activation, torch.Tensor):
                continue
            same = points.get(name, name), self._reduce_of(name)
            names[name] = first.setdefault(same, name)
            if names[name] == name:
                found[name] = self._kept(name, activation.detach(), kept)
        return Found(found, names)

    def _reduce_of(self, name: str) -> Reduce | None:
        return self.reduce.get(name) if isinstance(self.reduce, Mapping) else self.reduce

    def _kept(self, name: str, activation: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        reduce = self._reduce_of(name)
        if reduce is not None:
            activation = reduce(activation)
        if not isinstance(activation, torch.Tensor):
            raise TypeError(
                f"transform must return a tensor of {name}, but returned a "
                f"{type(activation).__name__}"
            )
        if self.dtype is not None and activation.is_floating_point():
            activation = activation.to(self.dtype)
        if kept is None:
            return activation
        if activation.shape[:2] != kept.shape or name.endswith(NOT_BY_TOKEN):
            raise ValueError(
                f"token_mask cannot leave tokens out of {name}, as that is "
                f"{list(activation.shape)} and not [batch, pos, ...]: leave it out of "
                "names_filter, or save it without token_mask"
            )
        rows = kept.flatten().nonzero().flatten().to(activation.device)
        return activation.flatten(0, 1).index_select(0, rows)


def entries_of(found: Found, n_rows: int, by_token: bool) -> tuple[Entry, ...]:
    """How what was kept of a batch is stored.

    Args:
        found: as `Keeping.of` returns it.
        n_rows: of the batch: its examples, or its tokens that are kept.
        by_token: whether a row is a token.

    Raises:
        ValueError: for a dtype that safetensors has not, or nothing at all.
    """
    if not found.names:
        raise ValueError("names_filter keeps no activation of this model: see model.hook_dict")
    entries = []
    for name, stored_as in found.names.items():
        tensor = found.tensors[stored_as]
        if not can_be_stored(tensor.dtype):
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors cannot hold: give dtype")
        dtype = str(tensor.dtype).removeprefix("torch.")
        has_rows = tensor.dim() > 0 and len(tensor) == n_rows
        axis: Axis = "shared" if not has_rows else "token" if by_token else "example"
        shape = tuple(tensor.shape[1:] if has_rows else tensor.shape)
        entries.append(Entry(name, dtype, shape, axis, None if stored_as == name else stored_as))
    return tuple(entries)
