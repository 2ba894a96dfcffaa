"""Rebuild a transformers layer without the Bridge's wrappers, around the same parameters.

    Bridge   DecoderLayer  - AttentionBridge - Attention  - LinearBridge - Linear
    plain    DecoderLayer' ------------------- Attention' ---------------- Linear

Modules that contain a wrapper are copied (marked '). All others are shared by both trees, so no
weight is copied, and changes to weights show in both.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    JointGateUpMLPBridge,
    JointQKVAttentionBridge,
    JointQKVPositionEmbeddingsAttentionBridge,
    LinearBridge,
    NormalizationBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.generalized_components.gated_mlp import resolve_activation_fn

from tl_devicefix.dispatch.views import UnusedHookPoint
from tl_devicefix.fusing.fused import applies_dropout, class_of, own_method
from tl_devicefix.fusing.listening import Listeners, other_shape
from tl_devicefix.monkeypatch.patch import LIBRARIES, package_of
from tl_devicefix.offload import attach_parts
from tl_devicefix.placement.devices import OwnRandomNumbers

HOOKABLE = frozenset(("hook_in", "hook_out", "part"))
"""What `Listeners` may find in a Bridge's block that runs transformers' layer: the block's own hook
points, and those of parts."""


class NotPlain(Exception):
    """Raised with the reason why a block has to run the Bridge's forward."""


def is_wrapper(module: nn.Module | None) -> TypeGuard[GeneralizedComponent]:
    """Return True if a module is one of the Bridge's wrappers."""
    return isinstance(module, GeneralizedComponent)


class Unwrapping:
    """Rebuilds a wrapper's `layer`; raises NotPlain if it would compute something else.

    Args:
        block: the wrapper, usually a block.
        by_sdpa: the attention layers to run with SDPA.
        parts: what calls a hook point, in place of a wrapper within the block.
    """

    def __init__(
        self, block: nn.Module, by_sdpa: Sequence[nn.Module], parts: Sequence[HookedPart] = ()
    ) -> None:
        self._by_sdpa = by_sdpa
        self._parts = {id(part.wrapped): part for part in parts}
        self._replacements: dict[int, nn.Module] = {}  # id of a module -> its replacement
        # id of an attention layer -> its wrapper, which splits the layer's projection
        self._splitters: dict[int, GeneralizedComponent] = {}
        for module in block.modules():
            if (name := own_method(module)) is not None:
                kind = class_of(module).__name__
                raise NotPlain(f"it contains a {kind} with a {name} of its own")
            if is_wrapper(module):
                _check_wrapper(module)
            if applies_dropout(module):  # the Bridge draws random numbers in another order
                raise NotPlain("it applies dropout in training")
        self._wrapped: set[int] = set()  # ids of the wrapped modules that were reached
        self.layer = self._replacement(block)
        attach_parts(block, self.layer)
        used = self._wrapped.union(map(id, self.layer.modules()), self._replacements)
        for module in block.modules():
            own = module.original_component if is_wrapper(module) else None
            if own is not None and id(own) not in used:
                raise NotPlain(f"a {type(module).__name__} wraps a module outside the layer")
        if not all(part._modules for part in parts):
            raise NotPlain("it has hooks on a part that the layer does not call")

    def _replacement(self, module: nn.Module) -> nn.Module:
        unwrapped = self._unwrapped(module)
        part = self._parts.get(id(_innermost(module)))
        if part is None:
            return unwrapped
        part.module = unwrapped
        return part

    def _unwrapped(self, module: nn.Module) -> nn.Module:
        while is_wrapper(module):
            own: Any = module.original_component
            if own is None:
                raise NotPlain(f"it contains a {type(module).__name__} that wraps no module")
            self._wrapped.add(id(own))
            if _computes_itself(module):
                return NormOfBridge(module)
            self._replace_parts(module)
            module = own
        if id(module) not in self._replacements:
            self._replacements[id(module)] = self._copy(module)
        return self._replacements[id(module)]

    def _copy(self, module: nn.Module) -> nn.Module:
        kind: Any = type(module)
        if not any(map(is_wrapper, module.modules())):
            return module
        if package_of(kind) not in LIBRARIES:  # user code may depend on the original
            raise NotPlain(f"it contains a {kind.__name__}, which is not known")
        copied: nn.Module = object.__new__(_copy_class(kind))
        attributes = vars(copied)
        attributes.update((name, vars(module)[name]) for name in _OF_ANY_MODULE.difference(_HOOKS))
        attributes["_copy_of"], attributes["_splitter"] = module, self._splitters.get(id(module))
        # The copy has no hooks: if one has to be called, the Bridge's own forward runs.
        attributes.update((name, OrderedDict()) for name in _HOOKS)
        attributes["_modules"] = {
            name: None if child is None else self._replacement(child)
            for name, child in module._modules.items()
        }
        attributes.update(attributes["_modules"])  # faster than `__getattr__`
        if any(module is attention for attention in self._by_sdpa):
            # Copy the config, which other modules share.
            attributes["config"] = config = copy.copy(module.config)
            vars(config)["_attn_implementation_internal"] = "sdpa"
        return copied

    def _replace_parts(self, wrapper: GeneralizedComponent) -> None:
        """Replace the projection that a wrapper splits, and the activation that it overrides."""
        owner: Any = wrapper.original_component
        is_mlp = isinstance(wrapper, JointGateUpMLPBridge)
        # The attributes in which TransformerLens looks for the activation.
        usual_names = ("activation_fn", "act_fn", "act", "activation") if is_mlp else ("act_fn",)
        found = (getattr(owner, name, None) for name in usual_names)
        activation = next((one for one in found if one is not None), None)
        if getattr(wrapper, "_use_processed_weights", False) and activation is not None:
            self._replacements[id(activation)] = _Activation(wrapper.config)
        elif is_mlp and isinstance(wrapper._activation_fn, nn.Module):
            # The activation that the layer had at boot.
            self._replacements[id(activation)] = wrapper._activation_fn
        names: tuple[str, ...]
        if isinstance(wrapper, JointQKVAttentionBridge):
            self._splitters[id(owner)] = wrapper
            split, names = wrapper.split_qkv_matrix, ("q", "k", "v")
            name = wrapper.submodules["qkv"].name if "qkv" in wrapper.submodules else None
        elif isinstance(wrapper, JointGateUpMLPBridge):
            split, names = wrapper.split_gate_up_matrix, ("gate", "in")
            name = wrapper.fused_attr
        else:
            return
        joint = _innermost(owner._modules.get(name))
        if joint is None or not set(names) <= wrapper._modules.keys():
            raise NotPlain(f"a {type(wrapper).__name__} has no known projection")
        parts = [self._replacement(getattr(wrapper, part)) for part in names]
        self._replacements[id(joint)] = _Joined(parts, _order(wrapper, split, name, joint))


def _innermost(module: nn.Module | None) -> Any:
    """Return the module within any wrappers."""
    while is_wrapper(module):
        module = module.original_component
    return module


# `training` may change, so it is read from the module.
_OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}
_HOOKS = [name for name in _OF_ANY_MODULE if name.endswith("_hooks") and "state" not in name]


class _Copy:
    """Mixin for the copy of a module with other children.

    All other attributes, except an SDPA layer's config, are read from the module, so the copy sees
    later changes.
    """

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__
        original = attributes["_copy_of"].__dict__
        if name == "scaling" in original and attributes["_splitter"] is not None:
            return _scale_of(attributes["_splitter"])
        if name in original:
            return original[name]
        return super().__getattr__(name)  # type: ignore[misc]


def _scale_of(wrapper: GeneralizedComponent) -> float:
    """Return the scale of scores: a Bridge that splits a projection takes it from its config."""
    config: Any = wrapper.config
    scale: float = config.d_head**-0.5
    has_positions = isinstance(wrapper, JointQKVPositionEmbeddingsAttentionBridge)
    if config.scale_attn_by_inverse_layer_idx and not has_positions:
        scale /= wrapper._layer_idx + 1
    return scale


@functools.cache
def _copy_class(kind: Any) -> Any:
    # A module may override a class attribute (`gradient_checkpointing`): read it from the module.
    values: dict[str, Any] = {
        name: property(operator.attrgetter(f"_copy_of.{name}"))
        for name in set(dir(kind)).difference(dir(nn.Module))
        if not (name.startswith("__") or hasattr(getattr(kind, name), "__get__"))
    }
    copied: Any = type(kind.__name__, (_Copy, kind), {**values, "__module__": kind.__module__})
    if "forward" in vars(copied):  # transformers wraps it again for each subclass
        del copied.forward
    return copied


def _check_wrapper(wrapper: GeneralizedComponent) -> None:
    """Raise NotPlain unless a wrapped module computes the same as its wrapper."""
    kind = class_of(wrapper)
    if package_of(kind) != "transformer_lens":
        raise NotPlain(f"it contains a {kind.__name__}, which is not TransformerLens's")
    for name, child in wrapper._modules.items():
        if name in wrapper._hook_registry and type(child) not in (HookPoint, UnusedHookPoint):
            raise NotPlain(f"its {name} is a {type(child).__name__}, not a HookPoint")
    if not all(is_wrapper(wrapper._modules.get(name)) for name in wrapper.submodules):
        raise NotPlain(f"a component of a {kind.__name__} is no wrapper of the Bridge")
    own = wrapper.original_component
    if kind is LinearBridge and getattr(own, "weight", None) is None:
        # Such a module in place of `v` could be read as more heads.
        raise NotPlain(f"its {wrapper.name} ({type(own).__name__}) has no weight")
    if own is not None and getattr(wrapper, "_use_processed_weights", False):
        # It reads its projections' weights, and calls no other module that has weights.
        parts = (*own.children(), *(wrapper._modules[name] for name in wrapper.submodules))
        for part in map(_innermost, parts):
            if list(part.parameters()) and type(part).forward is not nn.Linear.forward:
                called = type(part).__name__
                raise NotPlain(f"a {kind.__name__} with processed weights leaves out a {called}")


def _computes_itself(wrapper: GeneralizedComponent) -> bool:
    """Return True if a wrapper computes its norm itself instead of calling the wrapped norm."""
    if class_of(wrapper).forward is not NormalizationBridge.forward:
        return False
    folds = getattr(wrapper.config, "layer_norm_folding", False)
    return not (wrapper.use_native_layernorm_autograd or folds)


class HookedPart(nn.Module):
    """A module without its wrapper, and the wrapper's hook point on its input or its output."""

    module: nn.Module

    def __init__(self, wrapper: nn.Module, point: str, listeners: Listeners) -> None:
        super().__init__()
        attributes = vars(self)  # none of these is a submodule
        attributes.update(
            wrapped=wrapper.original_component,
            _point=getattr(wrapper, point),
            _is_input=point == "hook_in",
            _is_linear=isinstance(wrapper, LinearBridge),
            _listeners=listeners,
        )

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute: transformers reads some, such as a weight's dtype."""
        parts = vars(self)["_modules"]
        return parts[name] if name == "module" else getattr(parts["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook point before the module or after it."""
        if self._is_input:
            x = args[0]
            if self._is_linear and x.requires_grad:
                # SDPA keeps its output for the backward, and a hook may edit `hook_z` in place.
                x = x.clone()
            return self.module(self._call_hooks(x), *args[1:], **kwargs)
        output = self.module(*args, **kwargs)
        if isinstance(output, tuple):  # of attention: its output and the pattern, or None
            return (self._call_hooks(output[0]), *output[1:])
        hooked = self._call_hooks(output)
        if self._point.hook_conversion is not None and hooked.shape != output.shape:
            # transformers would read a smaller batch of keys or values as fewer heads.
            raise other_shape(self._point)
        return hooked

    def _call_hooks(self, activation: torch.Tensor) -> torch.Tensor:
        activation = self._point(activation)
        self._listeners.refuse_others(HOOKABLE)
        return activation


class NormOfBridge(nn.Module):
    """The norm that a wrapper computes, with the epsilon of the Bridge's config."""

    def __init__(self, wrapper: GeneralizedComponent) -> None:
        super().__init__()
        norm: Any = wrapper.original_component
        self._parameters = norm._parameters
        vars(self)["_wrapper"] = wrapper  # not a submodule: its parameters would appear twice
        self._is_usual = type(norm) is nn.LayerNorm and class_of(wrapper) is NormalizationBridge

    def forward(self, x: Float[torch.Tensor, "... d_model"]) -> Float[torch.Tensor, "... d_model"]:
        """Return the normalised activations."""
        wrapper, named = vars(self)["_wrapper"], self._parameters
        weight, bias = named.get("weight"), named.get("bias")
        if not self._is_usual or any(p is None or p.dtype != x.dtype for p in (weight, bias)):
            return wrapper._python_norm_forward(x)  # type: ignore[no-any-return]
        eps = getattr(wrapper.config, "eps", 1e-5)
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)


class _Activation(nn.Module):
    """The activation that a Bridge's gated MLP reads from its config, not from the layer."""

    def __init__(self, config: TransformerBridgeConfig | None) -> None:
        super().__init__()
        self._config = config

    def forward(self, x: Float[torch.Tensor, "... d_mlp"]) -> Float[torch.Tensor, "... d_mlp"]:
        """Return the activated neurons."""
        return resolve_activation_fn(self._config)(x)  # type: ignore[no-any-return]


class _Joined(nn.Module):
    """A fused projection rebuilt from the Bridge's split layers: of Q, K and V, or gate and input.

    `order` is the permutation from the concatenated outputs to the original layout; None if it is
    the identity.
    """

    _order: torch.Tensor | None

    def __init__(self, parts: list[nn.Module], order: torch.Tensor | None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("_order", order, persistent=False)

    def forward(self, x: Float[torch.Tensor, "... d_model"]) -> Float[torch.Tensor, "... n_out"]:
        """Return the projection's output."""
        joined = torch.cat([part(x) for part in self.parts], dim=-1)  # [..., n_out]
        if self._order is None:
            return joined
        if self._order.device != joined.device:
            with torch.inference_mode(False):  # later forwards may record gradients
                self._order = self._order.to(joined.device)
        return joined.index_select(-1, self._order)


_orders: MutableMapping[object, dict[object, torch.Tensor | None]] = WeakIdKeyDictionary()
"""The orders for each Bridge config: the split depends on its number of heads, too."""


@torch.inference_mode(False)  # later forwards may record gradients
def _order(
    wrapper: GeneralizedComponent, split: Callable[..., Any], name: str | None, joint: Any
) -> torch.Tensor | None:
    """Find `_Joined`'s order: let TransformerLens split a projection whose rows are numbered."""
    owner: Any = wrapper.original_component
    known = _orders.setdefault(wrapper.config or wrapper, {})
    is_in_out = type(joint).__name__ == "Conv1D"
    if not is_in_out and not isinstance(joint, nn.Linear):
        raise NotPlain(f"it splits a {type(joint).__name__}, which is not a linear layer")
    n_out, n_in = joint.weight.shape[::-1] if is_in_out else joint.weight.shape
    key = type(owner), name, n_out, n_in, getattr(split, "__qualname__", None)
    if key not in known:
        with OwnRandomNumbers(), torch.no_grad(), torch.device("cpu"):
            numbers = torch.arange(n_out, dtype=torch.float32)
            weight = numbers[:, None].expand(n_out, n_in)  # row i is filled with i
            numbered, holder = copy.copy(joint), copy.copy(owner)
            bias = None if joint.bias is None else nn.Parameter(numbers.clone())
            weight = weight.T.contiguous() if is_in_out else weight.contiguous()
            vars(numbered)["_parameters"] = {"weight": nn.Parameter(weight), "bias": bias}
            vars(holder)["_modules"] = {**owner._modules, name: numbered}
            split_numbers = torch.cat([part.weight[:, 0] for part in split(holder)]).long()
        if not torch.equal(split_numbers.sort().values, numbers.long()):
            raise NotPlain(f"it splits a {type(owner).__name__} in an unknown way")
        order = split_numbers.argsort()
        known[key] = None if torch.equal(order, numbers.long()) else order
    return known[key]
