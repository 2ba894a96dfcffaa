"""Cut a component into slices that are processed one by one, which needs little memory.

A slice is some heads of an attention layer, some neurons of an MLP, or a part of the vocabulary.
Steps treat a slice like the whole component, with two exceptions: b_O continues the sum of earlier
slices, and the vocabulary's means are computed beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tl_devicefix.weight_processing.steps import Weights

ELEMENTS_ON_CPU, ELEMENTS_ON_DEVICE = 2**19, 2**24
"""Elements of a slice: enough to fill a core's cache, or to keep a GPU busy."""


@dataclass(frozen=True)
class Slice:
    """A part of a component that can be processed by itself."""

    cut: dict[str, tuple[slice, ...]] = field(default_factory=dict)
    """Weights of which the slice has a part: name -> index of the part."""
    uncut: tuple[str, ...] = ()
    """Weights that the slice has in full; other slices may have them too."""

    def of(self, weights: Mapping[str, torch.Tensor], so_far: Weights) -> Weights:
        """Return the slice's weights: views of `weights`, and b_O (a sum of slices) of `so_far`."""
        # Before Python 3.12, a comprehension's frame in a traceback would keep tensors alive.
        views: Weights = {}
        for name, index in self.cut.items():
            views[name] = weights[name][index]
        for name in self.uncut:
            views[name] = so_far[name] if name == _SUM_OVER_HEADS else weights[name]
        return views


_SUM_OVER_HEADS = "attn.b_O"


# For each kind of layer, the axis along which each weight is cut (heads, neurons or tokens), and
# the weights that every slice has in full.
_LAYER_AXES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "attention": (
        {f"attn.{matrix}": 0 for matrix in ("W_Q", "W_K", "_W_K", "W_V", "_W_V", "W_O")}
        | {f"attn.{bias}": 0 for bias in ("b_Q", "b_K", "_b_K", "b_V", "_b_V")},
        ("ln1.w", "ln1.b", _SUM_OVER_HEADS),
    ),
    "MLP": (
        {"mlp.W_in": 1, "mlp.W_gate": 1, "mlp.b_in": 0, "mlp.W_out": 0},
        ("ln2.w", "ln2.b", "mlp.b_out"),
    ),
    "embeddings": ({"embed.W_E": 0}, ()),
    "positions": ({"pos_embed.W_pos": 0}, ()),
    "unembedding": ({"unembed.W_U": 1, "unembed.b_U": 0}, ("ln_final.w", "ln_final.b")),
}


def slices(weights: Mapping[str, torch.Tensor], elements: int) -> Iterator[Slice]:
    """Cut one component into slices of at most `elements` elements.

    The smallest slice is a key-value head with its query heads, a neuron, a token or an expert.
    SoLU's MLP is not cut: its inner norm mixes the neurons.
    """
    left = dict(weights)
    for layer, (axes, shared) in _LAYER_AXES.items():
        axes = {name: axis for name, axis in axes.items() if name in left}
        if not axes or (layer == "MLP" and "mlp.ln.w" in left):
            continue
        shared = tuple(name for name in shared if name in left)
        yield from _cut_evenly(left, axes, shared, elements)
        for name in (*axes, *shared):
            del left[name]
    if any(name.startswith("mlp.experts.") for name in left):
        yield from _experts(left)
    elif left:
        yield Slice(uncut=tuple(left))


def _cut_evenly(
    weights: Mapping[str, torch.Tensor],
    axes: dict[str, int],
    shared: tuple[str, ...],
    elements: int,
) -> Iterator[Slice]:
    # With grouped-query attention, a part is a key-value head and its query heads.
    n_parts = min(weights[name].shape[axis] for name, axis in axes.items())
    part_elements = sum(weights[name].numel() for name in axes) // n_parts
    parts_per_slice = max(1, elements // max(part_elements, 1))
    for start in range(0, n_parts, parts_per_slice):
        stop = min(start + parts_per_slice, n_parts)
        index = {}
        for name, axis in axes.items():
            width = weights[name].shape[axis] // n_parts
            index[name] = (slice(None),) * axis + (slice(start * width, stop * width),)
        yield Slice(index, shared)


def _experts(weights: Mapping[str, torch.Tensor]) -> Iterator[Slice]:
    """Cut a mixture of experts into its experts; the first also gets the router and all else."""
    norm = tuple(name for name in weights if name.startswith("ln2."))
    by_expert: dict[str, list[str]] = {}
    first = []
    for name in weights:
        if name.startswith("mlp.experts."):
            by_expert.setdefault(name.split(".")[2], []).append(name)
        elif name not in norm:
            first.append(name)
    for names in by_expert.values():
        yield Slice(uncut=(*norm, *first, *names))
        first = []


def working_dtype(weights: Mapping[str, torch.Tensor], asked: torch.dtype) -> torch.dtype:
    """Return the dtype to fold in: float32, or a wider one of the weights or the result."""
    dtype = torch.promote_types(torch.float32, asked)
    for tensor in weights.values():
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


class WorkingCopies(dict[str, torch.Tensor]):
    """A dict that copies each weight to a device, in a working dtype, when it is first read.

    - `[]` and `get` copy at the first read; `items()` does not copy, and returns unread tensors as
      given.
    - A copy keeps the layout (a transposed view stays one); integer and boolean tensors keep their
      dtype.
    - The given tensors are never changed.
    - `as_given` has the names of the weights that no step has read or replaced.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(weights)
        self._device, self._dtype = device, dtype
        self.as_given = set(weights)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = super().__getitem__(name)
        if name in self.as_given:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            # Move, then widen: fewer bytes are copied.
            moved = tensor.detach().to(self._device)
            tensor = moved.to(dtype, copy=moved.device == tensor.device)
            self[name] = tensor
        return tensor

    get: Any = Mapping.get  # dict.get does not call __getitem__

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self.as_given.discard(name)
        super().__setitem__(name, tensor)


def write(
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    like: torch.Tensor,
    device: torch.device,
    index: tuple[slice, ...] = (),
) -> None:
    """Write a value into the parameter or buffer `name`, rounded to its dtype.

    Args:
        model: the model. Names that it lacks are ignored, as in TransformerLens.
        name: the full name.
        value: a tensor on any device, in any dtype. It is copied.
        like: the given weight in full, for its layout.
        device: where to allocate a parameter that is still on meta.
        index: the part of the parameter to write.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return
    own = module._parameters.get(leaf, module._buffers.get(leaf))
    if own is None:
        return
    if own.is_meta:
        # Keep the layout of the given weight: TransformerLens's parameters are mostly transposed
        # views of a checkpoint's, and its forward transposes them back, so neither step copies.
        layout = like if like.shape == own.shape else own
        values = torch.empty_like(layout, dtype=own.dtype, device=device, requires_grad=False)
        own = nn.Parameter(values, requires_grad=own.requires_grad)
        module._parameters[leaf] = own
    part = own.detach()[index]
    # A checkpoint may store a scalar as a tensor of one element.
    part.copy_(value if value.shape == part.shape else value.reshape(part.shape))
