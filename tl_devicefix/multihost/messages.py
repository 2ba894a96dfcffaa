"""The messages between the driver, *home*, and the worker of another host, and their order.

    home                                        worker
    differences(files, name)              --->  compares its files of the checkpoint
    load(model, ...)                      --->  loads its blocks from its own files

    block 6, no hooks: it waits
    block 7, a hook on hook_z, a *tap*
    begin(RunRequest(blocks 6 and 7))     --->  part 0: block 6, and block 7 up to hook_z
      hook(z)                             <---  Reply(tap="hook_z", value=z)
    proceed(run, hook(z))                 --->  part 1: block 7 runs on with that
      block 8                             <---  Reply(tap="", value=the output)

    backward(run, part 1, gradient)       --->  the graph of part 1
      backward hooks of hook_z            <---  the gradient of hook(z)
    backward(run, part 0, gradient)       --->  the graph of part 0
      the block before                    <---  the gradient of x

    fetch(number, name)                   --->  a weight, a cached activation, or keys or values
    apply(model, "process_weights", ...)  --->  changes all weights of its blocks

The worker keeps models, paused runs with their graphs, activations and KV caches, each under a
number that home chose. Each call also has the numbers of those that home has dropped since the last
one. A tensor that the worker keeps is named by a `KeptTensor`, in both directions. `Host` lists the
types that can be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch.utils._pytree import register_dataclass
from transformers import cache_utils

PLAIN = (type(None), bool, int, float, str, torch.dtype)
"""The types of attributes and settings that are sent, besides tensors and devices."""

Output: TypeAlias = torch.Tensor | tuple[Any, ...]
"""What a block returns: the residual stream, or a tuple that begins with it."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that the worker keeps: the value with this number, or the tensor `name` in it."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor, number: int, name: str = "") -> KeptTensor:
        """Return the `KeptTensor` of a tensor."""
        return KeptTensor(number, name, tuple(tensor.shape), tensor.dtype)


CacheEntry: TypeAlias = Any
"""A block's part of a KV cache: TransformerLens's entry, or a layer of transformers' cache."""


@dataclass
class EntryState:
    """A `CacheEntry` as it is sent. Its tensors stay with the worker until home reads them.

    1. Home sends keys and values; for those that only the worker has, each one's `KeptTensor`.
    2. The worker builds an entry from it, and the block appends to that entry.
    3. The worker keeps the new tensors; home's entry gets `RemoteTensor`s for them.
    """

    kind: type  # its class
    attributes: dict[str, object]  # its tensors, and its attributes that are plain values
    is_in_cache: bool  # True if the block is given transformers' cache, with this as its layer
    new: int  # the number under which the worker keeps its tensors once it has grown


@dataclass
class StepRequest:
    """One block of a run."""

    layer: int  # the block's index
    arguments: tuple[list[object], dict[str, object]]  # after the stream: by position, by name
    taps: dict[str, list[str]]  # hook point -> the kinds of its hooks ("fwd", "bwd")
    cached: dict[str, int]  # hook point whose hooks only look -> the number to keep it under
    is_fused: bool
    has_mlp_in: bool | None  # a Bridge's setting that is in no config; None if it is not set
    config: dict[str, dict[str, object]]  # path of a module with a config -> changed settings


@dataclass
class RunRequest:
    """A run of blocks, one after the other."""

    run: int  # its number
    model: int  # the number of the model
    x: Float[torch.Tensor, "batch pos d_model"]  # the residual stream
    steps: list[StepRequest]
    leaves: list[int]  # the positions, among x and all arguments, of tensors that get gradients
    has_graph: bool  # True if gradients are enabled
    settings: list[Any]  # home's values of torch's settings that change results
    facts: object  # about the model's forward, which its blocks need (`FACTS`)


@dataclass
class Reply:
    """A run that is paused at a tap of a step, or has ended."""

    step: int  # the index of the block in the run
    tap: str  # the hook point; "" at the end
    value: Output | None  # the activation, or the last block's output; None if home has the tensor
    same_as: int | None
    """If home has the tensor, its index among those that both sides have: x, and then the
    activation of each tap."""
    has_graph: bool  # True if the value has a graph on the worker
    # Since the last reply: step, hook point and tensor of each activation that was kept, and step
    # and attributes of each entry of a KV cache that has grown.
    cached: list[tuple[int, str, KeptTensor]]
    grown: list[tuple[int, dict[str, object]]]


for _kind in (EntryState, StepRequest, RunRequest, Reply):
    register_dataclass(_kind)  # so that `tree_map` finds the tensors in it


_GROWING = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer


def layer_of_cache(cache: cache_utils.Cache, index: int) -> CacheEntry | None:
    """Return a layer's entry of transformers' cache; None if the entry cannot be sent.

    Only entries that grow by appending can be sent: a linear attention's state cannot.
    """
    # Require the exact class: subclasses store keys and values elsewhere, or quantised.
    if type(cache) is not cache_utils.DynamicCache or index > len(cache.layers):
        return None
    if index == len(cache.layers):  # transformers adds a layer on first use
        if not cache.layer_class_to_replicate:
            return None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    return layer if type(layer) in _GROWING else None


def attributes_of(entry: CacheEntry) -> dict[str, object]:
    """Return an entry's keys and values, and its plain attributes, such as `frozen`."""
    types = *PLAIN, torch.Tensor, torch.device
    return {name: value for name, value in vars(entry).items() if isinstance(value, types)}


def set_attributes(entry: CacheEntry, attributes: dict[str, object], device: torch.device) -> None:
    """Set an entry's attributes, replacing the sender's devices with `device`."""
    for name, value in attributes.items():
        setattr(entry, name, device if isinstance(value, torch.device) else value)


def as_cache(entry: CacheEntry, index: int) -> cache_utils.Cache:
    """Return a transformers cache that holds one layer's entry."""
    cache = cache_utils.DynamicCache()
    # Earlier layers are None: a layer reads its own entry only, by its index.
    cache.layers = [None] * index + [entry]  # type: ignore[assignment]  # typed without None
    return cache
