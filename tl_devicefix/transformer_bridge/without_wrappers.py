"""A layer of transformers' without the Bridge's wrappers, and whether it gives the same results."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    JointGateUpMLPBridge,
    JointQKVAttentionBridge,
    NormalizationBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from tl_devicefix.transformer_bridge.sdpa import BySdpa, like


class NotPlain(Exception):
    """Why a block runs the Bridge's forward."""


class Copies:
    """Makes a module tree without the Bridge's wrappers, which shares each module's tensors.

    Args:
        chosen: ids of the attentions that are to go by SDPA.
    """

    def __init__(self, chosen: set[int]) -> None:
        self.chosen = chosen
        self._known: dict[int, nn.Module] = {}
        self.parted: set[int] = set()
        """Ids of modules of which the Bridge has parts, whose weights are the ones that count."""

    def __call__(self, module: nn.Module) -> nn.Module:
        """The same module without wrappers.

        Raises:
            NotPlain: if that is not known.
        """
        while isinstance(module, GeneralizedComponent):
            if not self.chosen and isinstance(module, NormalizationBridge):
                norm = as_bridge_computes(module)
                if norm is not None:
                    return norm
            self._note_parts(module)
            wrapped = module.original_component
            if wrapped is None:
                raise NotPlain(f"a {type(module).__name__} in it stands for no module")
            module = wrapped
        known = self._known.get(id(module))
        if known is None:
            known = self._known[id(module)] = self._copy(module)
        return known

    def _note_parts(self, wrapper: Any) -> None:
        """Have the parts of a projection stand for it, if the Bridge has split it."""
        names: tuple[str, ...]
        name: Any
        if isinstance(wrapper, JointQKVAttentionBridge):
            split, names = wrapper.split_qkv_matrix, ("q", "k", "v")
            name = wrapper.submodules["qkv"].name if "qkv" in wrapper.submodules else None
        elif isinstance(wrapper, JointGateUpMLPBridge):
            split, names = wrapper.split_gate_up_matrix, ("gate", "in")
            name = wrapper.fused_attr
        else:
            return
        whole: Any = wrapper.original_component
        joint = whole._modules.get(name)
        while isinstance(joint, GeneralizedComponent):
            joint = joint.original_component
        if joint is None or not set(names) <= wrapper._modules.keys():
            raise NotPlain(f"a {type(wrapper).__name__} has no projection that is known")
        parts = [self(wrapper._modules[each]) for each in names]
        self._known[id(joint)] = Joined(parts, _order(split, whole, name, joint))
        self.parted.add(id(joint))

    def _copy(self, module: nn.Module) -> nn.Module:
        kind = type(module)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            if any(isinstance(each, GeneralizedComponent) for each in module.modules()):
                raise NotPlain(f"a {kind.__name__} in it is not known")
            return module  # a user's, which may keep what it sees
        twin = object.__new__(kind)
        held = vars(twin)
        held.update(vars(module))
        held.update((name, OrderedDict()) for name in _HOOKS)
        if _is_of_accelerate(module):
            for name in ("forward", "_hf_hook", "_old_forward"):
                held.pop(name, None)
        held["_modules"] = {
            name: None if child is None else self(child) for name, child in module._modules.items()
        }
        if id(module) in self.chosen:
            held["config"] = like(module.config, BySdpa)
        return twin


_LIBRARIES = ("torch", "transformers", "transformer_lens")
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks") and "state" not in name]


class Norm(nn.Module):
    """A norm in the Bridge's own steps, which are others than transformers', but for its hooks.

    Args:
        wrapper: the Bridge's.
    """

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        wrapped = wrapper.original_component
        self._parameters, self._buffers = wrapped._parameters, wrapped._buffers
        self.forward = wrapper._python_norm_forward


def as_bridge_computes(wrapper: Any) -> Norm | None:
    """A norm for a wrapper that does not call transformers' own; None if it does."""
    if type(wrapper).forward is not NormalizationBridge.forward:
        return None
    folds = getattr(wrapper.config, "layer_norm_folding", False)
    return None if wrapper.use_native_layernorm_autograd or folds else Norm(wrapper)


class Joined(nn.Module):
    """A projection of which the Bridge has parts.

    Args:
        parts: queries', keys' and values', or gate's and input's.
        order: where each output of the projection is in what the parts give together; None if it
            is there already.
    """

    def __init__(self, parts: list[nn.Module], order: torch.Tensor | None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._order = order

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """What the projection gives."""
        together = torch.cat([part(residual) for part in self.parts], dim=-1)
        if self._order is None:
            return together
        if self._order.device != together.device:
            self._order = self._order.to(together.device)
        return together.index_select(-1, self._order)


_orders: dict[Any, torch.Tensor | None] = {}


def _order(split: Any, whole: Any, name: str, joint: Any) -> torch.Tensor | None:
    """`Joined`'s order, as TransformerLens splits a projection whose outputs are numbered."""
    is_in_out = not isinstance(joint, nn.Linear)  # of a Conv1D
    if is_in_out and type(joint).__name__ != "Conv1D":
        raise NotPlain(f"a {type(joint).__name__} is split in it")
    n_out, n_in = joint.weight.shape[::-1] if is_in_out else joint.weight.shape
    key = type(whole), name, n_out, n_in, getattr(split, "__qualname__", None)
    if key not in _orders:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            numbers = torch.arange(n_out, dtype=torch.float32)
            weight = numbers[:, None].expand(n_out, n_in)
            numbered, holder = object.__new__(type(joint)), object.__new__(type(whole))
            vars(numbered).update(vars(joint))
            vars(holder).update(vars(whole))
            bias = None if joint.bias is None else nn.Parameter(numbers.clone())
            weight = weight.T.contiguous() if is_in_out else weight.contiguous()
            vars(numbered)["_parameters"] = {"weight": nn.Parameter(weight), "bias": bias}
            vars(holder)["_modules"] = {**whole._modules, name: numbered}
            found = torch.cat([each.weight[:, 0] for each in split(holder)]).long()
        if not torch.equal(found.sort().values, torch.arange(n_out)):
            raise NotPlain(f"how a {type(whole).__name__} is split in it is not known")
        order = found.argsort()
        _orders[key] = None if torch.equal(order, torch.arange(n_out)) else order
    return _orders[key]


def replaced_in(module: nn.Module) -> str | None:
    """Name of a method that a module has in place of its class's, but for accelerate's forward."""
    held, kind = vars(module), type(module)
    for name, value in held.items():
        if callable(value) and not isinstance(value, nn.Module) and hasattr(kind, name):
            if name == "forward" and _is_put_in_by_accelerate(module, value):
                continue
            if isinstance(getattr(kind, name), (types.FunctionType, property)):
                return name
    return None


def check(module: nn.Module, is_outermost: bool = False) -> None:
    """Check that a module of a block computes what the plain layer's does.

    Args:
        module: the block, or one in it.
        is_outermost: whether it is the block, whose own methods are run.

    Raises:
        NotPlain: if not.
    """
    held, kind = vars(module), type(module)
    replaced = None if is_outermost else replaced_in(module)
    if replaced is not None:
        raise NotPlain(f"{replaced} of a {kind.__name__} in it is not its class's")
    hook = held.get("_hf_hook")
    if hook is not None and not _is_of_accelerate(module):
        raise NotPlain(f"accelerate's {type(hook).__name__} is on a {kind.__name__} in it")
    if isinstance(module, GeneralizedComponent):
        if kind.__module__.partition(".")[0] != "transformer_lens":
            raise NotPlain(f"a {kind.__name__} in it is not TransformerLens's")
        for name, child in module._modules.items():
            if name in module._hook_registry and type(child) is not HookPoint:
                raise NotPlain(f"a {type(child).__name__} is its {name}")
    if getattr(module, "_use_processed_weights", False) and _has_norms(module.original_component):
        raise NotPlain(f"a {kind.__name__} leaves out a norm, with weights that are processed")
    if module.training and _drops_out(module):
        raise NotPlain("it drops out in training")


def _has_norms(mlp: Any) -> bool:
    """Whether there is more in an MLP than projections and an activation."""
    parts = (each for each in mlp.children() if not isinstance(each, GeneralizedComponent))
    return any(list(each.parameters()) and not isinstance(each, nn.Linear) for each in parts)


def _is_of_accelerate(module: nn.Module) -> bool:
    """Whether accelerate carries to a module what it takes, and does nothing else."""
    hook: Any = vars(module).get("_hf_hook")
    return type(hook) is AlignDevicesHook and not hook.offload


def _is_put_in_by_accelerate(module: nn.Module, forward: Any) -> bool:
    called = getattr(getattr(forward, "func", None), "__module__", None)
    return called == "accelerate.hooks" and _is_of_accelerate(module)


def _drops_out(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rates = (value for name, value in vars(module).items() if "dropout" in name)
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def check_weights(block: Any, plain: nn.Module, parted: set[int]) -> None:
    """Check that the plain layer has every weight that a wrapper has.

    Raises:
        NotPlain: if it would leave one out.
    """
    used = set(map(id, plain.parameters()))
    for module in block.modules():
        if isinstance(module, GeneralizedComponent) and module is not block:
            own = module.original_component
            if own is None or id(own) in parted:
                continue
            if any(id(each) not in used for each in own.parameters(recurse=False)):
                raise NotPlain(f"a {type(module).__name__} has weights that its layer has not")
