"""A block of a Bridge that nobody listens in runs transformers' own layer.

So do the embeddings, the final norm and the unembedding. At each forward of the Bridge, such a unit
asks whether anything in it listens or was exchanged: a few comparisons with lists that were made
when it was looked through. `unwrapping.py` makes the layer. Where somebody listens around a block
only, to the residual stream, the block's own code runs around the layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    EmbeddingBridge,
    NormalizationBridge,
    RMSNormalizationBridge,
    RotaryEmbeddingBridge,
    UnembeddingBridge,
)

from tl_devicefix.attention.implementation import (
    WHY_NOT,
    by_shortest_name,
    is_sdpa,
)
from tl_devicefix.attention.sdpa import why_not_here
from tl_devicefix.dispatch.stand_ins import (
    Modules,
    definitions_of,
    hooks_in,
    hooks_of,
    look_again,
    records,
    why_not_now,
)
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.transformer_bridge.attention import (
    ThisForward,
    blinds,
    built,
    config_of_sdpa,
    is_causal_itself,
    is_of_pairs,
    place_of_mask,
    this_forward,
    why_no_sdpa,
    why_not_eager,
)
from tl_devicefix.transformer_bridge.unwrapping import (
    NormOfBridge,
    NotPlain,
    Unwrapped,
    computes_itself,
    is_wrapper,
    replaced_in,
)

_PLAIN = "_tl_devicefix_plain"
_SDPA_CONFIG = "_tl_devicefix_sdpa_config"
_patches_block = functools.partial(
    patches,
    takes="self",
    why="transformers' own layer where nobody listens in a block",
    since="4.0",
)


@patches(
    "GeneralizedComponent",
    "__call__",
    takes="self",
    why="what a wrapper stands for, where nobody listens to anything of it",
    since="4.0",
)
def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A wrapper's `__call__`: at best, what it stands for is called and nothing else."""
    unit: PlainUnit | None = self.__dict__.get(_PLAIN)
    if unit is not None:
        now = this_forward()
        if now.is_of_bridge and (plain := unit.instead_of(self, now)) is not None:
            return plain(*args, **kwargs)
        runs_others = unit.may_run_others()
        output = original(self, *args, **kwargs)
        if runs_others:
            look_again()
        return output
    return original(self, *args, **kwargs)


@_patches_block("BlockBridge")
@_patches_block("BloomBlockBridge")
@_patches_block("OpaqueBlockBridge")
@_patches_block("AltUpBlockBridge")
def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A block's forward, around transformers' own layer where nobody listens in it."""
    unit, now = _unit_of(self), this_forward()
    # By itself, a block makes by its wrappers what its layer would have to be given.
    is_plain = now.is_of_bridge and unit.may_be_plain(self)
    if now.config_of_sdpa or unit.attends_by_sdpa or (now.may_pad and unit.minds_padding(self)):
        is_plain, args, kwargs = unit.with_its_mask(self, is_plain, args, kwargs)
    if is_plain:
        self = unit.around(self)
    return original(self, *args, **kwargs)


def why_installed(block: Any) -> str | None:
    """Why a block would run the Bridge's forward now; None if transformers' own layer."""
    if not is_enabled():
        return "TransformerLens is unpatched"
    if installed() < Version("4.0"):
        return f"transformer_lens {installed()} is older than 4.0"
    if _goes_its_own_way(type(block)):
        return f"a {type(block).__name__} computes in its own way"
    unit = _unit_of(block)
    return None if unit.may_be_plain(block) else unit.why(block)


def forward_of_each(model: Any) -> dict[str, str]:
    """Name of each block of a Bridge -> which forward it would run, and why."""
    blocks = by_shortest_name(model, lambda module: getattr(module, "is_list_item", False))
    whys = {name: why_installed(block) for name, block in blocks.items()}
    return {
        name: "transformers' own layer" if why is None else f"as installed: {why}"
        for name, why in whys.items()
    }


def prepare(bridge: Any) -> Any:
    """Let a Bridge's outermost wrappers be units; returns the config of masks made for SDPA."""
    attributes = vars(bridge)
    if _SDPA_CONFIG not in attributes:
        wrappers = list(_outermost_wrappers(bridge.original_model))
        of_bridge = frozenset[type]().union(*map(_classes_in, wrappers))
        for wrapper in wrappers:
            _unit_of(wrapper).of_bridge = of_bridge
        first = next(iter(getattr(bridge, "blocks", ())), None)
        attributes[_SDPA_CONFIG] = None if first is None else config_of_sdpa(first)
    return attributes[_SDPA_CONFIG]


def forget(bridge: Any) -> None:
    """Let go of plain layers, which hold weights that are about to be exchanged."""
    vars(bridge).pop(_SDPA_CONFIG, None)
    for module in bridge.modules():
        vars(module).pop(_PLAIN, None)


def _outermost_wrappers(module: nn.Module) -> Iterator[Any]:
    if is_wrapper(module):
        yield module
    else:
        for child in module.children():
            yield from _outermost_wrappers(child)


def _classes_in(wrapper: Any) -> frozenset[type]:
    """Classes of the modules in a wrapper, and of transformers' modules that they stand for."""
    modules = list(wrapper.modules())
    originals = (module.original_component for module in modules if is_wrapper(module))
    return frozenset(map(type, (*modules, *originals)))


def _unit_of(wrapper: Any) -> PlainUnit:
    unit: PlainUnit | None = vars(wrapper).get(_PLAIN)
    if unit is None:
        unit = vars(wrapper)[_PLAIN] = PlainUnit()
    return unit


def _goes_its_own_way(kind: type) -> bool:
    """Whether a class of blocks has a forward that does not come to the one above."""
    for base in kind.__mro__:
        run = vars(base).get("forward")
        if hasattr(run, "__wrapped__"):
            return False
        code = getattr(run, "__code__", None)
        if run is not None and (code is None or "__class__" not in code.co_freevars):  # no `super`
            return True
    return True


class PlainUnit:
    """transformers' own layer of a block, or module of another unit, and what they were like."""

    def __init__(self) -> None:
        self.attends_by_sdpa = False
        """Whether it attends by SDPA where nobody listens."""
        self.of_bridge = frozenset[type]()
        """The classes in all units of its Bridge, whose functions are looked at together."""
        self._seen: _Seen | None = None
        self._why: str | None = None
        self._layer: Any = None
        self._classes = frozenset[type]()
        self._is_all = False  # whether the layer may be called instead of the block
        self._forward: Any = None  # the one of its class, then
        self._is_causal_itself, self._mask_at = False, -1

    # A copy's unit makes its own, and so does a view's.

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainUnit:
        return PlainUnit()

    def __reduce__(self) -> Any:
        return PlainUnit, ()

    def instead_of(self, wrapper: Any, now: ThisForward) -> Any:
        """What may be called instead of the wrapper in this very forward, if anything."""
        attributes, seen = wrapper.__dict__, self._look_through(wrapper)
        if (
            seen.has_hooks_around()
            or "forward" in attributes
            or attributes.get("_start_at_layer_idx") is not None
            or attributes.get("_stop_at_layer_idx") is not None
            or not self._may_be_plain(seen)
            or not self._is_all
            or type(wrapper).forward is not self._forward
        ):
            return None
        if wrapper.is_list_item and (
            (now.config_of_sdpa is not None) is not self.attends_by_sdpa
            or (now.may_pad and (self.attends_by_sdpa or self.minds_padding(wrapper)))
        ):
            return None  # it may have to be given another mask
        return self._layer

    def may_be_plain(self, wrapper: Any) -> bool:
        """Whether transformers' own layer may run in this very forward."""
        return self._may_be_plain(self._look_through(wrapper))

    def _may_be_plain(self, seen: _Seen) -> bool:
        return (
            self._why is None
            and not seen.hooks_within()
            and self._why_replaced() is None
            and not (self.attends_by_sdpa and why_not_here())
        )

    def may_run_others(self) -> bool:
        """Whether code may run in it that is neither TransformerLens's nor transformers'."""
        return not self._is_all or self._seen is None or self._seen.may_run_others()

    def why(self, wrapper: Any) -> str:
        """Why transformers' own layer may not run."""
        hooks = self._look_through(wrapper).hooks_within()
        if self._why is not None:
            return self._why
        if hooks is not None:
            names = [
                name
                for name, module in wrapper.named_modules(remove_duplicate=False)
                if any(of_kind is hooks for of_kind in hooks_of(vars(module)))
            ]
            return f"{min(names, key=lambda name: ('_original' in name, len(name)))} has hooks"
        return self._why_replaced() or "SDPA is not in place"

    def _why_replaced(self) -> str | None:
        return why_not_now(self._classes, functools.partial(definitions_of, self._classes))

    def minds_padding(self, block: Any) -> bool:
        """Whether the Bridge may treat padding in another way."""
        return bool(block.compatibility_mode or self._is_causal_itself)

    def _look_through(self, wrapper: Any) -> _Seen:
        """Make the layer, or know why not, if anything is not as it was seen last."""
        if self._seen is not None and self._seen.is_as_seen():
            return self._seen
        seen = _Seen(wrapper)
        classes = _classes_in(wrapper)
        self._classes = self.of_bridge if classes <= self.of_bridge else classes
        self._forward = type(wrapper).forward
        self.attends_by_sdpa, self._layer, self._is_all = False, None, False
        try:
            (self._make_layer if wrapper.is_list_item else self._make_part)(wrapper)
            self._why = None
        except NotPlain as reason:
            self._why = str(reason)
        self._seen = seen  # last, as another thread may ask meanwhile
        return seen

    def _make_part(self, wrapper: Any) -> None:
        if type(wrapper) not in _PARTS:
            raise NotPlain(f"a {type(wrapper).__name__} computes in its own way")
        Unwrapped(wrapper, set())  # checks it; it is run with accelerate's hooks, though
        self._layer = wrapper.original_component
        if computes_itself(wrapper):
            self._layer = NormOfBridge(wrapper, self._layer)
        self._is_all = not any(map(is_wrapper, self._layer.modules()))

    def _make_layer(self, block: Any) -> None:
        attentions = [module for module in block.modules() if is_wrapper(module)]
        for module in attentions:
            if (why := why_not_eager(module.original_component)) is not None:
                raise NotPlain(why)
        chosen = [module.original_component for module in attentions if is_sdpa(module)]
        by_sdpa = {id(attention) for attention in chosen if why_no_sdpa(attention) is None}
        self.attends_by_sdpa = bool(by_sdpa)
        self._layer = Unwrapped(block, by_sdpa).layer
        self._is_causal_itself = any(map(is_causal_itself, block.original_component.modules()))
        self._mask_at = place_of_mask(block.original_component)
        self._is_all = replaced_in(block) is None and not _goes_its_own_way(type(block))

    def around(self, block: Any) -> Any:
        """The block as it is now, around the plain layer."""
        copied: Any = object.__new__(type(block))
        copied.__dict__.update(block.__dict__, **_NOT_NEEDED)
        copied.__dict__["_modules"] = {**block._modules, "_original_component": self._layer}
        return copied

    def with_its_mask(
        self, block: Any, is_plain: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        if is_plain and self.attends_by_sdpa and (mask is None or is_of_pairs(mask)):
            if mask is None or block.compatibility_mode or not blinds(mask, residual.shape[1]):
                return True, args, kwargs
            is_plain = not (residual.requires_grad and torch.is_grad_enabled())
        elif is_plain and self.minds_padding(block):
            is_plain = not blinds(mask, residual.shape[1])
        if not this_forward().config_of_sdpa:  # the mask is as for "eager"
            return is_plain, args, kwargs
        mask = built(mask, residual)
        if is_named:
            return is_plain, args, {**kwargs, "attention_mask": mask}
        return is_plain, (*args[: self._mask_at], mask, *args[self._mask_at + 1 :]), kwargs


_PARTS = (
    *(EmbeddingBridge, RotaryEmbeddingBridge, UnembeddingBridge),
    *(NormalizationBridge, RMSNormalizationBridge),
)


def _nothing() -> None:
    """Stands in for calls that the plain layer does not need."""


_NOT_NEEDED = dict.fromkeys(("_maybe_wire_capture_hooks", "_clear_attention_capture"), _nothing)
"""Methods that a block does not need around the plain layer."""


@patches(
    "BlockBridge",
    "_filter_kwargs_for_forward",
    takes="self kwargs num_positional_args",
    why="each layer's signature is looked up once",
    since="4.0",
)
def accepted_by_layer(
    original: Any, self: Any, kwargs: dict[str, Any], num_positional_args: int = 0
) -> Any:
    """`BlockBridge._filter_kwargs_for_forward`: those that the layer takes."""
    forward = getattr(getattr(self.original_component, "forward", None), "__func__", None)
    if not isinstance(forward, FunctionType):  # no method of its class
        return original(self, kwargs, num_positional_args)
    names, takes_any = _parameters(forward, forward.__code__)
    if takes_any:
        return kwargs
    by_name = names[1 + num_positional_args :]
    return {name: value for name, value in kwargs.items() if name in by_name}


@functools.lru_cache(maxsize=64)
def _parameters(method: Any, code: Any) -> tuple[list[str], bool]:
    """Names of the parameters of a method with this code, and whether it takes any."""
    parameters = inspect.signature(method).parameters
    return list(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class _Seen(Modules):
    """What a unit's modules were like when it was looked through, and who listens in them."""

    def __init__(self, unit: Any) -> None:
        super().__init__(unit)
        around = [unit, unit._modules.get("hook_in"), unit._modules.get("hook_out")]
        inside = [module for module in unit.modules() if module not in around]
        self._around = hooks_in(module for module in around if module is not None)
        self._inside = hooks_in(inside)
        # A list that grows when the block's own forward runs first.
        self._wired = vars(unit).get("_capture_hook_handles", ())
        self._harmless = {number for module in inside for number in _relays(module)}
        # Of transformers' modules that hold others, the plain layer may have copies.
        parents = [module for module in inside if module._modules or "_hf_hook" in vars(module)]
        self._attributes = [(itemgetter("training"), vars(unit))]
        self._attributes += [_getter(module) for module in parents if not is_wrapper(module)]
        self._values = [get(attributes) for get, attributes in self._attributes]

    def is_as_seen(self) -> bool:
        """Whether modules, and attributes of transformers', are the same."""
        try:
            return self.are_same() and self._values == [
                get(attributes) for get, attributes in self._attributes
            ]
        except (RuntimeError, ValueError, KeyError):  # tensors among attributes, and others now
            return False

    def hooks_within(self) -> Any:
        """Hooks that listen, of the first module that has any."""
        for hooks in filter(None, self._inside):
            if not hooks.keys() <= self._harmless:
                # TransformerLens asks for attentions in each forward, and gives them to nobody.
                self._harmless |= {key for key, hook in hooks.items() if records(hook)}
                self._harmless |= {handle.id for handle in self._wired}
                if not hooks.keys() <= self._harmless:
                    return hooks
        return None

    def has_hooks_around(self) -> bool:
        """Whether there are hooks on a block, its first or its last hook point."""
        return any(self._around)


def _getter(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """A getter of the attributes of a module that its forward may read."""
    attributes = vars(module)
    names = [name for name in attributes if name == "training" or name not in _OF_ANY_MODULE]
    return itemgetter(*names), attributes


_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def _relays(point: nn.Module) -> Iterator[int]:
    """Hooks of a hook point that hand on to another, in a module that only stands for a part."""
    for handle in point.fwd_hooks if isinstance(point, HookPoint) else ():
        hook = inspect.unwrap(handle.user_hook) if handle.user_hook else None
        if getattr(hook, "__module__", None) == "transformer_lens.model_bridge.component_setup":
            yield handle.hook.id


def _why_eager(model: Any, name: str, attention: Any) -> str | None:
    """Why a Bridge's block cannot go without scores now; None if it can."""
    if not is_wrapper(attention) or not hasattr(attention, "_masked_softmax"):
        return NotImplemented
    why = why_no_sdpa(attention.original_component)
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        block = model.get_submodule(".".join(parts[:end]))
        if getattr(block, "is_list_item", False):
            return why or why_installed(block)
    return why


WHY_NOT.append(_why_eager)
