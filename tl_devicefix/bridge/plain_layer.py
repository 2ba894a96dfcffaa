"""A block of a Bridge that nobody listens in runs transformers' own layer.

The Bridge's wrappers sit in the layer's module tree, each around the module of transformers' that
it stands for. Beside it lies a copy of the tree without them, whose modules have the very dicts of
parameters and buffers that the layer's have, so that weights are never copied, and whatever becomes
of them is seen. At each forward, a block asks whether anything in it listens or was exchanged: a
few comparisons of lists that were made when it was looked through.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from accelerate.hooks import AlignDevicesHook
from packaging.version import Version
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    JointGateUpMLPBridge,
    JointQKVAttentionBridge,
    NormalizationBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import masking_utils

from tl_devicefix.attention.implementation import WHY_NOT, is_sdpa, looks_away
from tl_devicefix.patching.applying import is_applied
from tl_devicefix.patching.versions import installed
from tl_devicefix.simulation.tensor import has_values

# --- What is asked at each forward ------------------------------------------------------------


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A block's forward, with transformers' own layer where nobody listens in it."""
    layer = _layer_of(self)
    is_plain = layer.is_unheard(self)
    now = _forward.get()
    if now.attends_by_sdpa or layer.attends_by_sdpa or (layer.is_compatible and now.may_pad):
        is_plain, args, kwargs = layer.with_its_mask(is_plain, args, kwargs)
    return original(layer.block_around_it(self) if is_plain else self, *args, **kwargs)


def why_installed(block: Any) -> str | None:
    """Why a block would run the Bridge's forward now; None if transformers' own layer."""
    if not is_applied():
        return "TransformerLens is unpatched"
    if installed() < Version("4.0"):
        return f"transformer_lens {installed()} is older than 4.0"
    for kind in type(block).__mro__:
        run = vars(kind).get("forward")
        if run is not None and not hasattr(run, "__wrapped__"):
            if "__class__" not in run.__code__.co_freevars:  # by which it would call `super`
                return f"a {type(block).__name__} computes in its own way"
        elif run is not None:
            break
    layer = _layer_of(block)
    with within_bridge():
        return None if layer.is_unheard(block) else layer.why(block)


def forward_of_each(bridge: Any) -> dict[str, str]:
    """Name of each block of a Bridge -> which forward it would run, and why."""
    names: dict[Any, str] = {}
    for name, module in bridge.named_modules(remove_duplicate=False):  # transformers' names too
        if getattr(module, "is_list_item", False):
            names[module] = min(names.get(module, name), name, key=len)
    whys = {name: why_installed(block) for block, name in names.items()}
    return {
        name: "transformers' own layer" if why is None else f"as installed: {why}"
        for name, why in whys.items()
    }


_LAYER = "_tl_devicefix_plain_layer"


def _layer_of(block: Any) -> PlainLayer:
    layer: PlainLayer | None = vars(block).get(_LAYER)
    if layer is None:
        layer = vars(block)[_LAYER] = PlainLayer()
    return layer


def prepare(bridge: Any) -> None:
    """Have each block know its plain layer, which views restore then and do not drop."""
    for module in bridge.modules():
        if getattr(module, "is_list_item", False):
            _layer_of(module)


def forget(bridge: Any) -> None:
    """Let go of plain layers, which hold weights that are about to be exchanged."""
    for module in bridge.modules():
        vars(module).pop(_LAYER, None)


_hooks_of = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_FORWARD_STATE = ("_start_at_layer_idx", "_start_residual", "_stop_at_layer_idx")


class PlainLayer:
    """transformers' own layer of a block, and what the block was like when it was made."""

    def __init__(self) -> None:
        self._why: str | None = None
        self._heard: dict[int, Any] | None = None
        self._heard_hooks: list[int] = []
        self._is_known = False
        self.attends_by_sdpa = False
        """Whether it attends by SDPA where nobody listens."""
        self.is_compatible = False
        """Whether it is in compatibility mode."""
        self._mask_at = -1
        self._unheard_since = -1

    # A copy's block makes its own.

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainLayer:
        return PlainLayer()

    def __reduce__(self) -> Any:
        return PlainLayer, ()

    def is_unheard(self, block: Any) -> bool:
        """Whether the block may run transformers' own layer in this very forward."""
        if self._heard is not None:
            if list(self._heard) == self._heard_hooks:
                return False  # those that were there the last time
            self._is_known &= not self._heard
            self._heard = None
        if not (self._is_known and self._is_as_seen()):
            self._look_through(block)
        if self._why is not None or _has_any_global_hook() or torch.compiler.is_compiling():
            return False
        if self._records and not _forward.get().is_of_bridge:
            return False
        if self._listens(block):
            return False
        return not (self.attends_by_sdpa and _differentiates_otherwise())

    def _listens(self, block: Any) -> bool:
        now = RemovableHandle.next_id
        if self._unheard_since == now:
            pass
        elif any(self._flat):
            self._heard = next(filter(None, self._flat))
            self._heard_hooks = list(self._heard)
            return True
        self._unheard_since = now
        return any(map(vars(self._config).get, _FLAGS)) if self._config is not None else False

    def why(self, block: Any) -> str:
        """Why it may not."""
        if self._heard is not None:
            names = [
                name
                for name, module in block.named_modules(remove_duplicate=False)
                if any(each is self._heard for each in _hooks_of(vars(module)))
            ]
            return f"{min(names, key=lambda name: ('_original' in name, len(name)))} has hooks"
        if self._why is not None:
            return self._why
        if self._listens(block):
            return "it is asked for results or inputs of each head"
        return "torch has hooks for every module, or is tracing"

    def _is_as_seen(self) -> bool:
        """Whether modules, their hooks' dicts, and attributes of transformers' are the same.

        torch counts the hooks that are registered, anywhere: where none was, none is looked for.
        """
        try:
            if self._unheard_since != RemovableHandle.next_id and not (
                self._hooks == list(map(_hooks_of, self._all))
                and all(list(hooks) == known for hooks, known in self._harmless)
            ):
                return False
            return (
                self._lengths == list(map(len, self._all))
                and self._children == self._children_now
                and self._values == [get(held) for get, held in self._attributes]
            )
        except (RuntimeError, ValueError, KeyError):  # tensors among attributes, and others now
            return False

    # --- Looked through, when something is otherwise ------------------------------------------

    def _look_through(self, block: Any) -> None:
        """Make the layer, or know why not."""
        self._is_known, self._heard, self._unheard_since = True, None, -1
        self._config = getattr(block, "config", None)
        if not hasattr(self._config, "__dict__"):
            self._config = None
        modules = [each for each in block.modules() if each is not block]
        outside = {id(block._modules.get(name)) for name in ("hook_in", "hook_out")}
        inside = [each for each in modules if id(each) not in outside]
        self._all = [vars(block), *map(vars, inside)]
        self._lengths = list(map(len, self._all))
        self._hooks = list(map(_hooks_of, self._all))
        with_children = [each for each in (block, *inside) if each._modules]
        self._children_now = [each._modules for each in with_children]
        self._children = [dict(each._modules) for each in with_children]
        self._attributes = [_getter(vars(each)) for each in inside if _is_of_layer(each)]
        self._values = [get(held) for get, held in self._attributes]
        self._sort_hooks(block, inside)
        self.attends_by_sdpa = False
        try:
            self._block = self._around(block)
            self._why = None
        except _NotPlain as reason:
            self._why = str(reason)

    def _sort_hooks(self, block: Any, inside: list[nn.Module]) -> None:
        """Which dicts of hooks may have none, and which have some that do nothing by themselves."""
        wired = {handle.id for handle in getattr(block, "_capture_hook_handles", ())}
        self._flat: list[dict[int, Any]] = []
        self._harmless: list[tuple[dict[int, Any], list[int]]] = []
        self._records = False
        for module in inside:
            wired |= _relays(module)
            for hooks in _hooks_of(vars(module)):
                recording = {key for key, hook in hooks.items() if _is_of_transformers(hook)}
                away = {key for key, hook in hooks.items() if looks_away(hook)}
                if hooks and wired | recording | away >= hooks.keys():
                    self._harmless.append((hooks, list(hooks)))
                    self._records |= bool(recording)
                else:
                    self._flat.append(hooks)

    def _around(self, block: Any) -> Any:
        """The block, for one forward of its own code: around the plain layer.

        Raises:
            _NotPlain: if there is something in the block that the plain layer would leave out.
        """
        layer = block.original_component
        if layer is None:
            raise _NotPlain("it has no layer")
        wrappers = [each for each in block.modules() if isinstance(each, GeneralizedComponent)]
        chosen = [each.original_component for each in wrappers if is_sdpa(each)]
        self.is_compatible = block.compatibility_mode
        self._mask_at = _place_of_mask(layer)
        copies = _Copies({id(each) for each in chosen if why_no_sdpa(each) is None})
        self.attends_by_sdpa = bool(copies.chosen)
        for module in block.modules():
            _check(module, block)
        plain = copies(layer)
        _check_weights(block, plain, copies.parted)
        twin = object.__new__(type(block))
        vars(twin).update(vars(block))
        vars(twin).update(
            _modules={**block._modules, "_original_component": plain},
            _maybe_wire_capture_hooks=_nothing,
            _clear_attention_capture=_nothing,
            _filter_kwargs_for_forward=_Filter(layer),
        )
        return twin

    def block_around_it(self, block: Any) -> Any:
        """The block to run instead: of the same class, around the plain layer."""
        held, now = vars(self._block), vars(block)
        for name in _FORWARD_STATE:
            held[name] = now.get(name)
        return self._block

    def with_its_mask(
        self, is_plain: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        """Whether it may be plain; arguments with the mask for "eager" if that is to be seen.

        Of a query that sees no key, SDPA makes nothing, as the Bridge does in compatibility mode.
        Otherwise such a query gets a mean, as by the mask for "eager", and its gradients are those
        of scores that do not count, which SDPA has not.
        """
        residual = args[0] if args else kwargs["hidden_states"]
        is_named = "attention_mask" in kwargs
        if not is_named and not len(args) > self._mask_at > 0:
            return is_plain, args, kwargs
        mask = kwargs["attention_mask"] if is_named else args[self._mask_at]
        if is_plain and self.attends_by_sdpa and (mask is None or _is_of_pairs(mask)):
            if mask is None or self.is_compatible or not _blinds(mask):
                return True, args, kwargs
            is_plain = not (residual.requires_grad and torch.is_grad_enabled())
        elif is_plain and self.is_compatible:
            is_plain = not _blinds(mask)
        mask = _built(mask, residual)
        if is_named:
            return is_plain, args, {**kwargs, "attention_mask": mask}
        return is_plain, (*args[: self._mask_at], mask, *args[self._mask_at + 1 :]), kwargs


_FLAGS = ("use_attn_result", "use_split_qkv_input", "use_attn_in")
"""By which TransformerLens computes attention in other steps, also if nobody listens to them."""


class _NotPlain(Exception):
    """Why a block runs the Bridge's forward."""


def _nothing() -> None:
    """Instead of what the plain layer needs not."""


class _Filter:
    """`BlockBridge._filter_kwargs_for_forward`, by a signature that is looked up once."""

    def __init__(self, layer: Any) -> None:
        takes = inspect.signature(layer.forward).parameters
        self._names = list(takes)
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())

    def __call__(self, kwargs: dict[str, Any], num_positional_args: int = 0) -> dict[str, Any]:
        """The arguments that the layer takes."""
        if self._takes_any:
            return kwargs
        names = self._names[num_positional_args:]
        return {name: value for name, value in kwargs.items() if name in names}


def _getter(held: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """What reads the attributes of a module that its forward may read."""
    names = [name for name in held if name in _READ or name not in _OF_ANY_MODULE]
    return itemgetter(*names), held


_READ = ("training", "_parameters", "_buffers")
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def _is_of_layer(module: nn.Module) -> bool:
    return not isinstance(module, (HookPoint, GeneralizedComponent))


def _relays(point: nn.Module) -> set[int]:
    """Which hooks of a hook point hand on to another, in a module that only stands for a part."""
    return {
        handle.hook.id
        for handle in getattr(point, "fwd_hooks", ())
        if isinstance(point, HookPoint)
        and getattr(inspect.unwrap(handle.user_hook or _nothing), "__module__", None)
        == "transformer_lens.model_bridge.component_setup"
    }


def _is_of_transformers(hook: Any) -> bool:
    """Whether it is the hook by which transformers records what a forward is asked for.

    TransformerLens asks for attentions in each forward, and gives them to nobody.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


class _Forward(NamedTuple):
    """What is known of the forward that this thread is in."""

    is_of_bridge: bool = False
    """What transformers records of it goes to nobody."""
    may_pad: bool = False
    attends_by_sdpa: bool = False


_NONE = _Forward()
_forward: ContextVar[_Forward] = ContextVar("tl_devicefix_bridge_forward", default=_NONE)


@contextlib.contextmanager
def within_bridge(
    bridge: Any = None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Within it, blocks know which forward of a Bridge they are in.

    Args:
        bridge: whose forward it is.
        args: of `TransformerBridge.forward`.
        kwargs: of it too.
    """
    kwargs = kwargs or {}
    tokens = args[0] if args else kwargs.get("input")
    masks = (kwargs.get(name) for name in ("attention_mask", "one_zero_attention_mask"))
    may_pad = len(args) > 2 or isinstance(tokens, list) or any(m is not None for m in masks)
    by_sdpa = bridge is not None and is_sdpa(bridge) and _let_masks_be_for_sdpa(bridge)
    token = _forward.set(_Forward(True, may_pad, by_sdpa))
    try:
        yield
    finally:
        _forward.reset(token)


def _differentiates_otherwise() -> bool:
    """Whether torch does what SDPA has no derivatives for."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


# --- Whether there is anything that the plain layer would leave out ---------------------------


def _check(module: nn.Module, block: Any) -> None:
    """Check that a module of a block computes what the plain layer's does.

    Raises:
        _NotPlain: if not.
    """
    held, kind = vars(module), type(module)
    for name, value in held.items():
        if callable(value) and not isinstance(value, nn.Module) and hasattr(kind, name):
            if module is block or (name == "forward" and _is_put_in_by_accelerate(module, value)):
                continue
            if isinstance(getattr(kind, name), (types.FunctionType, property)):
                raise _NotPlain(f"{name} of a {kind.__name__} in it is not its class's")
    hook = held.get("_hf_hook")
    if hook is not None and not _is_of_accelerate(module):
        raise _NotPlain(f"accelerate's {type(hook).__name__} is on a {kind.__name__} in it")
    if isinstance(module, GeneralizedComponent):
        if kind.__module__.partition(".")[0] != "transformer_lens":
            raise _NotPlain(f"a {kind.__name__} in it is not TransformerLens's")
        for name, child in module._modules.items():
            if name in module._hook_registry and type(child) is not HookPoint:
                raise _NotPlain(f"a {type(child).__name__} is its {name}")
    if getattr(module, "_use_processed_weights", False) and _has_norms(module.original_component):
        raise _NotPlain(f"a {kind.__name__} leaves out a norm, with weights that are processed")
    if isinstance(module, HookPoint) and (type(module) is not HookPoint or "forward" in held):
        raise _NotPlain(f"a hook point in it is a {kind.__name__}")
    if module.training and _drops_out(module):
        raise _NotPlain("it drops out in training")


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


def _check_weights(block: Any, plain: nn.Module, parted: set[int]) -> None:
    """Check that the plain layer has every weight that a wrapper has.

    Raises:
        _NotPlain: if it would leave one out.
    """
    used = set(map(id, plain.parameters()))
    for module in block.modules():
        if isinstance(module, GeneralizedComponent) and module is not block:
            own = module.original_component
            if own is None or id(own) in parted:
                continue
            if any(id(each) not in used for each in own.parameters(recurse=False)):
                raise _NotPlain(f"a {type(module).__name__} has weights that its layer has not")


# --- The layer without wrappers ---------------------------------------------------------------


class _Copies:
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
            _NotPlain: if that is not known.
        """
        while isinstance(module, GeneralizedComponent):
            if not self.chosen and isinstance(module, NormalizationBridge):
                norm = _as_bridge_computes(module)
                if norm is not None:
                    return norm
            self._note_parts(module)
            wrapped = module.original_component
            if wrapped is None:
                raise _NotPlain(f"a {type(module).__name__} in it stands for no module")
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
            raise _NotPlain(f"a {type(wrapper).__name__} has no projection that is known")
        parts = [self(wrapper._modules[each]) for each in names]
        self._known[id(joint)] = Joined(parts, _order(split, whole, name, joint))
        self.parted.add(id(joint))

    def _copy(self, module: nn.Module) -> nn.Module:
        kind = type(module)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            if any(isinstance(each, GeneralizedComponent) for each in module.modules()):
                raise _NotPlain(f"a {kind.__name__} in it is not known")
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
            held["config"] = _like(module.config, _BySdpa)
        return twin


_LIBRARIES = ("torch", "transformers", "transformer_lens")
_HOOKS = [name for name in _OF_ANY_MODULE if name.endswith("_hooks") and "state" not in name]


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


def _as_bridge_computes(wrapper: Any) -> Norm | None:
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
        raise _NotPlain(f"a {type(joint).__name__} is split in it")
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
            raise _NotPlain(f"how a {type(whole).__name__} is split in it is not known")
        order = found.argsort()
        _orders[key] = None if torch.equal(order, torch.arange(n_out)) else order
    return _orders[key]


# --- Attention without a pattern --------------------------------------------------------------


def why_no_sdpa(attention: Any) -> str | None:
    """Why attention of transformers' cannot go by SDPA; None if it can."""
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return f"a {type(attention).__name__} computes in its own way"
    if any(getattr(attention, name, None) is not None for name in _SOFT_CAPS):
        return "its scores have a soft cap"
    if getattr(attention, "sinks", None) is not None:
        return "it has attention sinks"
    if getattr(attention, "reorder_and_upcast_attn", False):
        return "its scores are computed in float32"
    if getattr(attention, "is_causal", None) is not True:
        return "it is not causal"
    return None


_SOFT_CAPS = ("attn_logit_softcapping", "softcap", "logits_soft_cap")


class _Config:
    """A config of transformers', all of which is another's but for how it attends."""

    _of: type
    _attn_implementation_internal: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _given_back, (self._of, vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_given_back(self._of, vars(self)), memo)


def _given_back(kind: type, held: dict[str, Any]) -> Any:
    config: Any = object.__new__(kind)
    vars(config).update(held)
    return config


class _BySdpa(_Config):
    """With it, transformers attends by SDPA."""

    _attn_implementation = "sdpa"


class _ByForward(_Config):
    """With it, transformers makes masks for SDPA in a forward that attends so."""

    @property
    def _attn_implementation(self) -> Any:
        return "sdpa" if _forward.get().attends_by_sdpa else self._attn_implementation_internal


@functools.cache
def _class_of(way: type, kind: type) -> type:
    return type(kind.__name__, (way, kind), {"_of": kind, "__module__": kind.__module__})


def _like(config: Any, way: type) -> Any:
    """A config that changes as the given one does."""
    kind = config._of if isinstance(config, _Config) else type(config)
    twin: Any = object.__new__(_class_of(way, kind))
    twin.__dict__ = vars(config)
    return twin


def _why_not(model: Any, name: str, attention: Any) -> str | None:
    """Why a Bridge's block cannot go without scores now; None if it can."""
    if not isinstance(attention, GeneralizedComponent) or not hasattr(attention, "_masked_softmax"):
        return NotImplemented
    parts = name.split(".") if name else []
    for end in range(len(parts) - 1, 0, -1):
        block = model.get_submodule(".".join(parts[:end]))
        if getattr(block, "is_list_item", False):
            why = why_no_sdpa(attention.original_component)
            return why or why_installed(block)
    return why_no_sdpa(attention.original_component)


WHY_NOT.append(_why_not)


def _let_masks_be_for_sdpa(bridge: Any) -> bool:
    """Have the masks of a forward made for SDPA, which are none where none is needed."""
    functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    if functions["eager"] is not masking_utils.eager_mask:  # a user's, which SDPA's would pass by
        return False
    if _MAKER not in vars(bridge):
        maker = _maker_of_masks(bridge)
        config = getattr(maker, "config", None)
        fits = getattr(config, "_attn_implementation", None) == "eager"
        if fits:
            maker.config = _like(config, _ByForward)
        vars(bridge)[_MAKER] = fits
    fits = vars(bridge)[_MAKER]
    return fits


_MAKER = "_tl_devicefix_masks"


def _maker_of_masks(bridge: Any) -> Any:
    """transformers' model that has the blocks in a list of its own."""
    first = next(iter(getattr(bridge, "blocks", ())), None)
    if first is None or not any(why_no_sdpa(each) is None for each in first.modules()):
        return None  # and whose masks are causal
    for module in bridge.original_model.modules():
        for child in module._modules.values():
            if isinstance(child, nn.ModuleList) and len(child) and child[0] is first:
                return module
    return None


def _place_of_mask(layer: Any) -> int:
    names = list(inspect.signature(layer.forward).parameters)
    return names.index("attention_mask") if "attention_mask" in names else -1


_made_of = WeakIdKeyDictionary()
"""A mask that was made for SDPA -> how often it was changed, and what was made of it then."""


def _once(mask: torch.Tensor, make: Callable[..., Any], *args: Any) -> Any:
    """What is made of a mask, once for all blocks."""
    state = None if mask.is_inference() else mask._version
    known, made = _made_of.get(mask, (None, {}))
    if known != state:
        made = {}
    what = make, args
    if what not in made:
        made[what] = make(mask, *args)
        _made_of[mask] = state, made
    return made[what]


def _built(mask: Any, residual: torch.Tensor) -> Any:
    """A mask as transformers makes it for "eager", of one that it made for SDPA."""
    n_queries = residual.shape[1]
    if mask is None and n_queries > 1:  # all that SDPA needs is that it is causal
        mask = torch.ones(n_queries, n_queries, dtype=torch.bool, device=residual.device).tril_()
        return _added(mask[None, None], residual.dtype)
    return _once(mask, _added, residual.dtype) if _is_of_pairs(mask) else mask


def _is_of_pairs(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 4


def _added(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return added.masked_fill_(~seen, torch.finfo(dtype).min)


def _blinds(mask: Any) -> bool:
    """Whether there are queries that see no key."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return mask is not None
    return bool(_once(mask, _any_blind))


def _any_blind(mask: torch.Tensor) -> bool:
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return has_values(seen) and not bool(seen.any(dim=-1).all())
