"""Read batches of tokens; select, transform and convert the activations to save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int

from tl_devicefix.activation_store.format import (
    CODES,
    MASK,
    NOT_BY_TOKEN,
    TOKEN_MASK,
    TOKENS,
    Axis,
    StoredTensor,
    dtype_name,
)
from tl_devicefix.errors import shown
from tl_devicefix.gathering import CacheAtHome
from tl_devicefix.placement.devices import version_of
from tl_devicefix.types import Model

if TYPE_CHECKING:
    from transformer_lens.hook_points import NamesFilter

Transform = Callable[[torch.Tensor], torch.Tensor]
"""Maps an activation [batch, ...] to the tensor that is stored in its place."""
TokenMask = Callable[[torch.Tensor], torch.Tensor] | Literal["attention_mask"]
"""Maps tokens [batch, pos] to booleans, True to store; "attention_mask" is all but padding."""


@dataclass(frozen=True)
class Selection:
    """The activations to save of each forward; see `save_activations`."""

    names_filter: list[str] | Callable[[str], bool] | None
    dtype: torch.dtype | None
    transform: Transform | Mapping[str, Transform] | None
    token_mask: TokenMask | None

    def saved_tokens(
        self, tokens: Int[torch.Tensor, "batch pos"], mask: Bool[torch.Tensor, "batch pos"]
    ) -> Bool[torch.Tensor, "batch pos"] | None:
        """Return the mask of tokens to save, on the CPU; None for all."""
        if self.token_mask is None:
            return None
        if self.token_mask == "attention_mask":
            return mask
        saved = self.token_mask(tokens)
        if saved.shape != tokens.shape or saved.dtype != torch.bool:
            raise ValueError(
                f"token_mask must return a tensor of booleans {list(tokens.shape)}, as the tokens, "
                f"but returned {saved.dtype} {list(saved.shape)}"
            )
        return saved.to("cpu", copy=True)  # it is written later, and may be a reused buffer

    def select(
        self, cache: Mapping[str, torch.Tensor], batch: TokenBatch
    ) -> dict[str, torch.Tensor]:
        """Select the activations of a batch's saved tokens from a cache, on their devices."""
        stored = cache.stored() if isinstance(cache, CacheAtHome) else cache
        activations = {
            name: activation
            for name, activation in stored.items()
            if isinstance(activation, torch.Tensor) and self._is_asked_for(name)
        }
        by_name: Mapping[str, Transform | None] = (
            self.transform
            if isinstance(self.transform, Mapping)
            else dict.fromkeys(activations, self.transform)
        )
        if unknown := by_name.keys() - activations.keys():
            name = min(unknown)
            raise ValueError(f"transform has {name}, which is not saved")
        for name, activation in activations.items():
            activation = activation.detach()
            # One row for all examples, such as a Bridge's rotary tables: [1, ...] -> [batch, ...]
            if activation.shape[:1] == (1,):
                activation = activation.expand(len(batch.inputs), *activation.shape[1:])
            is_by_token = not name.endswith(NOT_BY_TOKEN)
            if (transform := by_name.get(name)) is not None:
                activation, is_by_token = _transformed(name, activation, transform), True
            if self.dtype is not None and activation.is_floating_point():  # not masks or indices
                activation = activation.to(self.dtype)
            if (saved := batch.saved) is not None:
                if not is_by_token or activation.shape[:2] != saved.shape:
                    raise ValueError(
                        f"token_mask cannot leave tokens out of {name}, which is "
                        f"{list(activation.shape)} and not [batch, pos, ...]: remove it from "
                        "names_filter, or save it without token_mask"
                    )
                # [batch, pos, ...] -> [saved_tokens, ...]
                rows = saved.flatten().nonzero().flatten().to(activation.device)
                activation = activation.flatten(0, 1).index_select(0, rows)
            activations[name] = activation
        return activations

    def _is_asked_for(self, name: str) -> bool:
        # Ask again: a Bridge caches some activations under a second name too.
        asked = self.names_filter
        return asked is None or bool(asked(name) if callable(asked) else name in asked)

    def entries_of(
        self, tensors: Mapping[str, torch.Tensor], batch: TokenBatch
    ) -> dict[str, StoredTensor]:
        """Return the index entries of a batch's selected activations.

        Raises:
            ValueError: for activations that cannot be stored, and names without an activation.
        """
        asked = self.names_filter if isinstance(self.names_filter, list) else []
        if missing := [name for name in asked if name not in tensors]:
            raise ValueError(
                f"the forward gives no tensor at {missing[0]}: remove it from names_filter, raise "
                "stop_at_layer, or switch it on (model.set_use_attn_result(True) for hook_result)"
            )
        if not tensors:
            raise ValueError(
                "names_filter selects no activation of this model: see model.hook_dict"
            )
        axis: Axis = "example" if batch.saved is None else "token"
        n_rows = len(batch.inputs) if batch.saved is None else int(batch.saved.sum())
        entries = {}
        for name, tensor in tensors.items():
            if tensor.shape[:1] != (n_rows,):
                raise ValueError(
                    f"{name} is {list(tensor.shape)}, which has no row for each of {n_rows} "
                    f"{axis}s: remove it from names_filter, or have transform return [batch, ...]"
                )
            if (dtype := dtype_name(tensor.dtype)) not in CODES:
                raise ValueError(f"{name} is {dtype}: give one of the dtypes {', '.join(CODES)}")
            entries[name] = StoredTensor(name, dtype, tuple(tensor.shape[1:]), axis)
        return entries


def checked_names(
    names_filter: NamesFilter, model: Model
) -> list[str] | Callable[[str], bool] | None:
    """Return a `names_filter` whose names the model has."""
    if names_filter is None or callable(names_filter):
        return names_filter
    names = [names_filter] if isinstance(names_filter, str) else list(names_filter)
    for name in names:
        if name not in model.hook_dict:  # `run_with_cache` would ignore it
            raise ValueError(
                f"names_filter has {shown(name)}, which is no hook point of this model: names are "
                'in model.hook_dict; lambda name: name.endswith("hook_resid_post") selects several'
            )
    return names


class TokenBatch(NamedTuple):
    """The input of one forward, and the tensors that are stored beside its activations."""

    inputs: Int[torch.Tensor, "batch pos"]  # on the user's device
    arguments: dict[str, torch.Tensor]  # the attention mask for the forward, if there is one
    stored: dict[str, torch.Tensor]  # tokens and masks, each [batch, pos] on the CPU
    skip: int = 0  # the number of its examples that are on disk already

    @property
    def saved(self) -> Bool[torch.Tensor, "batch pos"] | None:
        """The mask of tokens whose activations are saved; None for all."""
        return self.stored.get(TOKEN_MASK)


def read_batches(items: Iterable[object], selection: Selection) -> Iterator[TokenBatch]:
    """Yield the batches that a user gives; see `save_activations`."""
    for number, item in enumerate(items):
        inputs, mask = _tokens_and_mask(item, number)
        if mask is None and isinstance(how := selection.token_mask, str):
            raise ValueError(
                f"token_mask={how!r} needs batches with an attention_mask, but item {number} has "
                "none: give dicts with one, or "
                "token_mask=lambda tokens: tokens != model.tokenizer.pad_token_id"
            )
        inputs = inputs.clone()  # a loader may reuse the memory for its next batch
        mask = None if mask is None else _as_tensor(mask).clone()
        if mask is not None and mask.shape != inputs.shape:
            raise ValueError(
                f"the attention_mask of a batch is {list(mask.shape)}, but its tokens are "
                f"{list(inputs.shape)}: give one value for each token"
            )
        # Both [batch, pos]. Tokens are int64 on disk, whatever dtype the loader gives.
        tokens = inputs.cpu().long()
        seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.cpu().bool()
        stored = {TOKENS: tokens, MASK: seen}
        if (saved := selection.saved_tokens(tokens, seen)) is not None:
            stored[TOKEN_MASK] = saved
        yield TokenBatch(inputs, {} if mask is None else {"attention_mask": mask}, stored)


def _as_tensor(values: object) -> torch.Tensor:
    # `torch.as_tensor` would move a tensor to torch's default device.
    return values if isinstance(values, torch.Tensor) else torch.as_tensor(values)


# Other inputs of models, which a tokenizer or a collator may give.
_NOT_PASSED_ON = (
    *("decoder_input_ids", "input_values", "inputs_embeds", "pixel_values", "position_ids"),
    "token_type_ids",
)


def _tokens_and_mask(item: object, number: int) -> tuple[torch.Tensor, object]:
    """Return the tokens `[batch, pos]` of an item, and its mask."""
    given, mask = item, None
    if isinstance(item, Mapping):
        given, mask = item.get("tokens", item.get("input_ids")), item.get("attention_mask")
        for name in _NOT_PASSED_ON:
            value = item.get(name)
            # Many tokenizers give a mask of types that is all zeros.
            if value is not None and (name != "token_type_ids" or _as_tensor(value).any()):
                raise ValueError(
                    f"item {number} of batches has {name}, which are not passed on to the model: "
                    "remove them"
                )
    elif isinstance(item, (list, tuple)) and len(item) == 1 and isinstance(item[0], torch.Tensor):
        (given,) = item  # as from a DataLoader of a TensorDataset
    try:
        tokens = _as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        kind = f"dict with {sorted(item)}" if isinstance(item, Mapping) else type(item).__name__
    else:
        kind = f"tensor {list(tokens.shape)} of {tokens.dtype}"
        if tokens.dim() == 2 and tokens.numel() and not tokens.is_floating_point():
            return tokens, mask
    raise TypeError(
        f"item {number} of batches is a {kind}: give tokens [batch, pos], such as those of "
        'model.to_tokens(texts).split(8), or a dict with "tokens" or "input_ids", and '
        '"attention_mask" if there is padding'
    )


def _transformed(name: str, activation: torch.Tensor, transform: Transform) -> torch.Tensor:
    version = version_of(activation)
    result: object = transform(activation)
    if version_of(activation) != version:
        raise ValueError(
            f"transform changed {name} in place, which other names may share: return a new tensor"
        )
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"transform must return a tensor, but returned {shown(result)}: {name}")
    return result
