"""Masks that transformers makes for all blocks of a Bridge, which are not built unless asked for.

A mask of every query and key is as large as the scores of one head. Within a Bridge's forward,
transformers' function for them is asked for a promise; a block that goes without scores reads off
it what is seen, and any other builds it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers import masking_utils

from tl_devicefix.attending import promises
from tl_devicefix.attending.masks import Causal, unpadded
from tl_devicefix.attending.promises import Promised, rule
from tl_devicefix.simulation.tensor import has_values

_wanted: ContextVar[bool] = ContextVar("tl_devicefix_promised_masks", default=False)
_lock = threading.Lock()
_within = 0
"""How many forwards are under way, in all threads, with which the function is another."""


class Mask(Promised):
    """What is added to scores, [batch, 1, query_pos, key_pos]."""

    causal: Causal


@contextlib.contextmanager
def promised_masks() -> Iterator[None]:
    """Within it, transformers' masks of this thread are promises; afterwards all is as before."""
    _exchange(1)
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)
        _exchange(-1)


def _exchange(more: int) -> None:
    """Exchange transformers' function with the first forward, and put it back after the last."""
    global _within
    functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    with _lock:
        _within += more
        if _within == 1 and functions["eager"] is masking_utils.eager_mask:  # and no user's own
            functions["eager"] = _mask
        elif _within == 0 and functions["eager"] is _mask:
            del functions["eager"]  # before transformers' own, which is still there


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Make a mask as transformers does, or promise it."""
    causal = _causal(**kwargs) if _wanted.get() and not args else None
    if causal is None:
        return masking_utils.eager_mask(*args, **kwargs)
    # It leaves nothing out, now; hooks may edit it before a block has this one built.
    kwargs["attention_mask"] = None
    shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
    return promises.promise(
        Mask,
        shape,
        kwargs["dtype"],
        torch.device(kwargs["device"]),
        functools.cache(lambda: masking_utils.eager_mask(**kwargs)),
        causal=causal,
    )


def _causal(
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: Any = None,
    kv_offset: Any = None,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = True,
    **others: Any,
) -> Causal | None:
    """What a mask shows that transformers is asked for; None if it is not a known one."""
    lengths = q_length, kv_length, q_offset, kv_offset
    if use_vmap or any(type(each) is not int for each in lengths):
        return None  # of a function of the user's, or of a cache of fixed length
    if q_offset + q_length != kv_offset + kv_length or not others.keys() >= _MADE:
        return None
    mask_function = _of_one_sequence(mask_function)
    is_plain = mask_function is masking_utils.causal_mask_function
    if not is_plain and not (_slides(mask_function) and type(local_size) is int):
        return None
    if not _leaves_nothing_out(attention_mask, kv_offset + kv_length):
        return None
    return Causal(q_offset - kv_offset, window=None if is_plain else local_size)


_MADE = {"batch_size", "dtype", "device"}


def _leaves_nothing_out(padding: torch.Tensor | None, n_tokens: int) -> bool:
    return padding is None or (padding.shape[-1] == n_tokens and unpadded(padding))


def _slides(mask_function: Any) -> bool:
    """Whether it is of `sliding_window_causal_mask_function`."""
    return _made_by(_parts(mask_function)) == ["sliding_window_overlay", "causal_mask_function"]


def _of_one_sequence(mask_function: Any) -> Any:
    """The function less what separates packed sequences, if these were found in a rehearsal.

    transformers looks at the values of positions, and a rehearsal has none.
    """
    parts = _parts(mask_function)
    if _made_by(parts) != ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return mask_function
    packed, remapped = (inspect.getclosurevars(each).nonlocals for each in parts)
    found = has_values(packed["packed_sequence_mask"])
    return mask_function if found else remapped["mask_function"]


def _parts(mask_function: Any) -> Sequence[Any]:
    """What transformers' `and_masks` was given for it; nothing if it is of something else."""
    if not inspect.isfunction(mask_function):
        return ()
    parts: Sequence[Any] = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    return parts


def _made_by(functions: Sequence[Any]) -> list[str]:
    return [getattr(each, "__qualname__", "").partition(".")[0] for each in functions]


@rule(Mask, torch.Tensor.to)
def _to(mask: Any, device: Any = None, **options: Any) -> Any:
    """Bring it to another device; what is built of it there is built once, here."""
    if options.keys() - {"device", "non_blocking"}:
        return NotImplemented
    target = options.pop("device", device)
    if not isinstance(target, str | torch.device):
        return NotImplemented
    target = torch.device(target)
    if target == mask.device:
        return mask
    first = mask._first  # not the mask: it would be held by its copies, which go when it does
    return promises.promise(
        Mask,
        mask.shape,
        mask.dtype,
        target,
        functools.cache(lambda: first().to(target, **options)),
        causal=mask.causal,
    )


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


@rule(Mask, _getter("requires_grad"), torch.Tensor.is_inference)
def _no(mask: Any) -> Any:
    return False


@rule(Mask, _getter("_version"))
def _version(mask: Any) -> Any:
    """How often it was changed: whatever changes one changes what is built of it."""
    return 0
