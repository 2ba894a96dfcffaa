"""What is asked of a TransformerBridge otherwise than of a HookedTransformer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.checking.report import Finding
from tl_devicefix.checking.tensors import placement_of_model, tensors
from tl_devicefix.dispatch.carrying import not_carried_to
from tl_devicefix.dispatch.naming import listed, named_modules
from tl_devicefix.transformer_bridge.alignment import register_hooks, settle_bridge

_REPAIR = "tl_devicefix.check(model, repair=True)"
_FOLDED = ("ln1", "ln2", "ln_final")
"""The norms that folding takes into what reads them."""


def norm_findings(bridge: Any) -> list[Finding]:
    """Norms of a processed Bridge that still have weights, where others are folded."""
    if not bridge._weights_processed:
        return []
    identity = 0.0 if getattr(bridge.cfg, "rmsnorm_uses_offset", False) else 1.0
    folded = {
        tensor.path: bool((tensor.value == identity).all())
        for tensor in tensors(bridge)
        if tensor.name == "weight" and tensor.path.rpartition(".")[2] in _FOLDED
        if not tensor.value.is_meta
    }
    left = [path for path, is_folded in folded.items() if not is_folded]
    if not left or len(left) == len(folded):  # processed without `fold_ln`
        return []
    message = (
        f"the weights are processed, but {listed(left)} still scales, while the other norms are "
        "folded: boot the model again, as its weights are folded in part only"
    )
    return [Finding("norms", left[0], message)]


def setup_findings(bridge: Any) -> Iterator[Finding]:
    """Components whose hook points the Bridge does not know, or that no input is brought to."""
    modules = list(named_modules(bridge))
    placement = placement_of_model(bridge)
    unknown = [] if placement is None else not_carried_to(bridge, placement)
    known = set(bridge.hook_dict.values())
    unknown += [
        path.rpartition(".")[0]
        for path, module in modules
        if isinstance(module, HookPoint) and module not in known
    ]
    for path in sorted(set(unknown), key=unknown.index):
        if not any(path != other and path.startswith(f"{other}.") for other in unknown):
            message = f"{path} has changed since the Bridge was booted: it lacks hooks"
            yield Finding("setup", path, message, _REPAIR)


def are_tied(bridge: Any, one: str, other: str) -> bool:
    """Whether two parameters of a Bridge may share memory.

    The embedding and the unembedding may, until the weights are processed, and parts of one
    attention or MLP, as q, k and v are views of GPT-2's combined weight.
    """
    heads = {one.partition(".")[0], other.partition(".")[0]}
    if heads == {"embed", "unembed"}:
        return not bridge._weights_processed
    return one.startswith("blocks.") and one.split(".")[:3] == other.split(".")[:3]


def put_right(bridge: Any) -> None:
    """Move what is misplaced, and make the config, the hooks and the registry of hooks follow."""
    for tensor in list(tensors(bridge)):
        if tensor.is_misplaced:
            mover = _MoveOne(tensor.value, tensor.planned)
            nn.Module._apply(tensor.module, mover, recurse=False)
    placement = placement_of_model(bridge)
    if placement is not None:
        settle_bridge(bridge, placement)
    register_hooks(bridge)


class _MoveOne:
    """A conversion of one tensor, and of its gradient, that leaves the others where they are.

    Args:
        tensor: the tensor.
        device: where it goes.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._wanted = {id(each) for each in (tensor, tensor.grad) if each is not None}
        self._device = device

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, moved if it is the one."""
        return tensor.to(self._device) if id(tensor) in self._wanted else tensor


def count_parameters(bridge: Any) -> int:
    """How many numbers the parameters are; those of views, and of what is tied, count once."""
    sizes: dict[int, int] = {}
    for tensor in tensors(bridge):
        if isinstance(tensor.value, nn.Parameter):
            storage = tensor.value.untyped_storage()
            held = storage.nbytes() // tensor.value.itemsize
            known = sizes.setdefault(storage._cdata, 0)
            sizes[storage._cdata] = min(held, known + tensor.value.numel())
    return sum(sizes.values())


def bytes_held(bridge: Any) -> dict[torch.device, int]:
    """Bytes of parameters and buffers on each device; memory that several share counts once."""
    held: dict[torch.device, int] = {}
    seen: set[int] = set()
    for tensor in tensors(bridge):
        storage = tensor.value.untyped_storage()
        if not tensor.value.is_meta and storage._cdata not in seen:
            seen.add(storage._cdata)
            device = tensor.value.device
            held[device] = held.get(device, 0) + storage.nbytes()
    return held
