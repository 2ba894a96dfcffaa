"""Cut a component into slices that are processed one after the other, so that little is copied.

Some heads are an attention layer, some neurons an MLP, and a part of the vocabulary an embedding:
each step does to such a slice what it does to the whole. Only b_O sums over the heads, so it is
carried from one slice to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from tl_devicefix.weight_processing.weights import Weights

ELEMENTS_ON_CPU, ELEMENTS_ON_DEVICE = 2**19, 2**24
"""How much is worked on at a time: what a core's cache holds; what keeps a GPU busy."""


@dataclass(frozen=True)
class Slice:
    """A part of a component that can be processed by itself."""

    cut: dict[str, tuple[slice, ...]] = field(default_factory=dict)
    """Weights of which it has a part: name -> index of that part."""
    uncut: tuple[str, ...] = ()
    """Weights that it has whole; other slices may have them too."""

    def of(self, weights: Mapping[str, torch.Tensor], carried: Weights) -> Weights:
        """Its weights: views of the component's, or what was carried to here."""
        # No comprehension over tensors: an error's traceback would keep them (until Python 3.12).
        views: Weights = {}
        for name, index in self.cut.items():
            views[name] = weights[name][index]
        for name in self.uncut:
            views[name] = carried.get(name, weights[name])
        return views

    def to_carry(self, processed: Weights) -> Weights:
        """Weights that the next slice continues from."""
        return {_SUM: processed[_SUM]} if _SUM in self.uncut else {}


_SUM = "attn.b_O"
"""The weight that sums over the heads."""


# Of each kind of layer: each weight's axis of heads, neurons or tokens, and what slices have whole.
_LAYERS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "attention": (
        {f"attn.{matrix}": 0 for matrix in ("W_Q", "W_K", "_W_K", "W_V", "_W_V", "W_O")}
        | {f"attn.{bias}": 0 for bias in ("b_Q", "b_K", "_b_K", "b_V", "_b_V")},
        ("ln1.w", "ln1.b", _SUM),
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
    """Cut one component; each weight is cut in slices that make it up, or whole in some.

    A slice has at most so many elements, but at least one key and value head with its query heads,
    one neuron, one token or one expert. SoLU's MLP is not cut: its inner norm mixes the neurons.
    """
    left = dict(weights)
    for layer, (axes, shared) in _LAYERS.items():
        axes = {name: axis for name, axis in axes.items() if name in left}
        if not axes or (layer == "MLP" and "mlp.ln.w" in left):
            continue
        shared = tuple(name for name in shared if name in left)
        yield from _parts(left, axes, shared, elements)
        for name in (*axes, *shared):
            del left[name]
    if any(name.startswith("mlp.experts.") for name in left):
        yield from _experts(left)
    elif left:
        yield Slice(uncut=tuple(left))


def _parts(
    weights: Mapping[str, torch.Tensor],
    axes: dict[str, int],
    shared: tuple[str, ...],
    elements: int,
) -> Iterator[Slice]:
    # With grouped-query attention a part is a key and value head and the query heads that use it.
    n_parts = min(weights[name].shape[axis] for name, axis in axes.items())
    of_one_part = sum(weights[name].numel() for name in axes) // n_parts
    at_once = max(1, elements // max(of_one_part, 1))
    for start in range(0, n_parts, at_once):
        stop = min(start + at_once, n_parts)
        index = {}
        for name, axis in axes.items():
            width = weights[name].shape[axis] // n_parts
            index[name] = (slice(None),) * axis + (slice(start * width, stop * width),)
        yield Slice(index, shared)


def _experts(weights: Mapping[str, torch.Tensor]) -> Iterator[Slice]:
    """A mixture of experts, expert by expert; the router is with the first."""
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
