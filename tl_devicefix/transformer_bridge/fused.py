"""A block of a Bridge as transformers' own layer, without the Bridge's wrappers within it.

The embeddings, the final norm and the unembedding are fused in the same way. If only the residual
stream around a block is hooked, the block's own code runs around the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    EmbeddingBridge,
    NormalizationBridge,
    RMSNormalizationBridge,
    RotaryEmbeddingBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import PretrainedConfig

from tl_devicefix.fusing.fused import BOUND, KINDS, Fused, class_of, why_replaced
from tl_devicefix.fusing.listening import Listeners, hooks_of, records, unsupported_mode
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.patch import is_of_user
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.transformer_bridge.attention import (
    are_masks_edited,
    eager_mask_of,
    place_of_mask,
    this_forward,
    why_no_sdpa,
    why_not_eager,
    why_own_mask,
)
from tl_devicefix.transformer_bridge.unwrapping import NotPlain, Unwrapped, is_wrapper, replaced_in

SINCE = Version("4.dev0")
_PARTS = (
    *(EmbeddingBridge, RotaryEmbeddingBridge, UnembeddingBridge),
    *(NormalizationBridge, RMSNormalizationBridge),
)
_BLOCKS = ("BlockBridge", "BloomBlockBridge", "OpaqueBlockBridge")
"""Classes whose `forward` hooks the residual stream and calls the layer, and does nothing else."""


class FusedWrapper(Fused):
    """A fused wrapper of a Bridge.

    __call__   nobody listens, or only to hook_in and hook_out: the layer in its place
    forward    somebody listens to the wrapper itself: TransformerLens's block, around the layer
    super()    somebody listens within: the Bridge's own steps
    """

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """See `Fused`."""
        return is_wrapper(module) and (cls.is_block(module) or class_of(module) in _PARTS)

    @classmethod
    def is_block(cls, module: nn.Module) -> bool:
        """See `Fused`."""
        return is_wrapper(module) and bool(module.is_list_item)

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """See `Fused`."""
        if hasattr(class_of(module), "is_remote"):
            return None
        bound = bound_of(module)
        return bound.why or unsupported_mode() or ("it has hooks" if bound.is_listened() else None)

    @classmethod
    def why_pattern(cls, module: nn.Module) -> str | None:
        """See `Fused`."""
        if hasattr(class_of(module), "is_remote"):
            return None
        attentions: list[Any] = [
            wrapper.original_component
            for wrapper in filter(is_wrapper, module.modules())
            if isinstance(getattr(wrapper, "hook_pattern", None), HookPoint)
        ]
        return next(filter(None, map(why_no_sdpa, attentions)), None)

    @classmethod
    def prepare(cls, module: nn.Module) -> str | None:
        """See `Fused`."""
        if installed() < SINCE:
            return f"a Bridge of transformer_lens {installed()}, which is older than 4.0"
        if cls.is_block(module) and not _runs_its_layer(class_of(module)):
            return f"a {class_of(module).__name__} computes in its own way"
        _drop_pattern(module)
        return why_replaced((*_classes(GeneralizedComponent), HookPoint))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the layer alone, if nobody listens to its wrapper."""
        now = this_forward()
        if now.is_of_bridge and is_enabled():
            bound, by_sdpa = bound_of(self), now.config_of_sdpa is not None
            is_edited = by_sdpa and self.is_list_item and are_masks_edited()
            if not is_edited and bound.may_stand_for(self, by_sdpa):
                return bound.run(self, args, kwargs)
            if is_edited or (by_sdpa and bound.shows_mask(self)):
                args, kwargs = bound.with_built_mask(args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run a block's forward, around transformers' own layer if nobody listens in that."""
        now = this_forward()
        # Called by itself, a block makes by its wrappers what its layer would have to be given.
        if not now.is_of_bridge or not self.is_list_item or not is_enabled():
            return super().forward(*args, **kwargs)
        bound = bound_of(self)
        is_plain = bound.why is None and not bound.is_listened()
        if now.config_of_sdpa is not None and not (is_plain and bound.by_sdpa):
            args, kwargs = bound.with_built_mask(args, kwargs)
        if not is_plain:
            output = super().forward(*args, **kwargs)
            _drop_pattern(self)
            return output
        return class_of(self).forward(bound.around(self), *args, **kwargs)


def _drop_pattern(block: nn.Module) -> None:
    """Drop the last pattern that attention keeps, because plain layers would never replace it.

    It may hold a graph, with which a block cannot be copied.
    """
    attention = block._modules.get("attn")
    if getattr(attention, "_pattern", None) is not None:
        vars(attention)["_pattern"] = None


KINDS.append(FusedWrapper)


def _classes(of: type[nn.Module]) -> Iterator[type]:
    yield of
    for kind in of.__subclasses__():  # type: type[nn.Module]
        yield from _classes(kind)


def bound_of(wrapper: nn.Module) -> BoundWrapper:
    """Return a fused wrapper's `BoundWrapper`, made anew if a module or hook was exchanged."""
    attributes = wrapper.__dict__
    bound: BoundWrapper | None = attributes.get(BOUND)
    if bound is None or not bound.is_current(attributes):
        bound = attributes[BOUND] = BoundWrapper(wrapper)
    return bound


def config_of_sdpa(bridge: TransformerBridge) -> PretrainedConfig | None:
    """Return the config by which transformers makes a fused Bridge's masks, if for SDPA."""
    blocks = list(getattr(bridge, "blocks", ()))
    # All of them, because an unfused block would attend to all tokens if it gets no mask.
    is_by_sdpa = bool(blocks) and first_unfused(bridge) is None
    by_first = is_by_sdpa and isinstance(blocks[0], FusedWrapper)
    return bound_of(blocks[0]).config if by_first else None


def first_unfused(bridge: TransformerBridge) -> int | None:
    """Return the index of the first block that is not fused, here or on its host; None if none."""
    for index, block in enumerate(getattr(bridge, "blocks", ())):
        if not isinstance(block, FusedWrapper) and not hasattr(class_of(block), "is_remote"):
            return index
    return None


def forget(bridge: TransformerBridge) -> None:
    """Drop the plain layers, because they hold weights that are about to be exchanged."""
    for module in bridge.modules():
        vars(module).pop(BOUND, None)


class BoundWrapper:
    """transformers' own module within a wrapper, and the hooks around and within it.

    Attributes:
        layer: the module without wrappers; None if it may not run.
        why: the reason why it may not run; None if it may.
        by_sdpa: True if the layer attends by SDPA.
        config: the config by which transformers makes masks for SDPA; None if it makes none.
    """

    layer: Any = None
    why: str | None = None
    config: PretrainedConfig | None = None
    by_sdpa = _is_all = False  # _is_all: the layer may be called instead of the wrapper
    _hookable: frozenset[str] = frozenset()  # hook points that are called around the layer
    _mask_at = -1

    def __init__(self, wrapper: Any) -> None:
        self._training = wrapper.training
        children = wrapper._modules
        around = {wrapper: "itself"}
        around |= {children.get(name): name for name in ("hook_in", "hook_out")}
        modules = list(wrapper.modules())
        self._harmless = {key for module in modules for key in _relays(module)}
        # TransformerLens's list. It is read late, because the block's first forward fills it.
        self._wired = vars(wrapper).get("_capture_hook_handles", ())
        named = ((around.get(module, "within"), module) for module in modules)
        self._listeners = Listeners(named, self._only_wires)
        try:
            if wrapper.is_list_item:
                self._make_layer(wrapper)
            else:
                self.layer, self._is_all = Unwrapped(wrapper, set()).layer, True
        except NotPlain as reason:
            self.why = str(reason)

    def is_current(self, attributes: dict[str, object]) -> bool:
        """Return True if nothing was exchanged since this was made."""
        return self._training is attributes["training"] and self._listeners.is_current()

    def is_listened(self) -> bool:
        """Return True if somebody listens within the wrapper, and not only around it."""
        return "within" in self._listeners.look()

    def shows_mask(self, wrapper: FusedWrapper) -> bool:
        """Return True if a user's hook on a block itself is called, which may edit the mask."""
        if not wrapper.is_list_item or "itself" not in self._listeners.look():
            return False
        hooks = (hook for hooks in hooks_of(wrapper.__dict__) for hook in hooks.values())
        return unsupported_mode() is not None or any(map(is_of_user, hooks))

    def may_stand_for(self, wrapper: FusedWrapper, by_sdpa: bool) -> bool:
        """Return True if the layer may be called instead of the wrapper, in this very forward."""
        attributes = wrapper.__dict__
        return (
            self._is_all
            and self._listeners.look() <= self._hookable
            and "forward" not in attributes
            and attributes.get("_start_at_layer_idx") is None
            and attributes.get("_stop_at_layer_idx") is None
            and (self.by_sdpa or not by_sdpa or not wrapper.is_list_item)
        )

    def run(self, block: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call the layer in place of the wrapper, and the hooks on a block's input and output."""
        hooked = self._listeners.look()
        if "hook_in" in hooked:
            args, kwargs = block._hook_input_hidden_states(args, kwargs)
        output = self.layer(*args, **kwargs)
        if "hook_out" not in hooked:
            return output
        as_tuple = block._is_standalone_hidden_state_call(args, kwargs)
        return block._apply_output_hook(output, force_tuple_for_bare_tensor=as_tuple)

    def _only_wires(self, hooks: dict[int, Callable[..., object]]) -> bool:
        """Return True if hooks are TransformerLens's or transformers' own, and pass things on."""
        if not hooks.keys() <= self._harmless:
            # TransformerLens asks for attentions in each forward, and gives them to nobody.
            self._harmless |= {key for key, hook in hooks.items() if records(hook)}
            self._harmless |= {handle.id for handle in self._wired}
        return hooks.keys() <= self._harmless

    def _make_layer(self, block: Any) -> None:
        self._mask_at = place_of_mask(block.original_component)
        wrapped: list[Any] = [m.original_component for m in block.modules() if is_wrapper(m)]
        by_sdpa = [attention for attention in wrapped if why_no_sdpa(attention) is None]
        if by_sdpa:
            self.by_sdpa, self.config = True, by_sdpa[0].config
        elif any(weight.dtype == torch.float64 for weight in block.parameters()):
            # In float32 the lowest float64 is minus infinity, and a fully masked row gives NaN.
            raise NotPlain("transformers' eager attention has a softmax in float32")
        for attention in wrapped:
            if (why := why_not_eager(attention) or why_own_mask(attention)) is not None:
                raise NotPlain(why)
        self.layer = Unwrapped(block, set(map(id, by_sdpa))).layer
        self._is_all = replaced_in(block) is None
        if class_of(block).forward is BlockBridge.forward:  # others hook in ways of their own
            self._hookable = frozenset(("hook_in", "hook_out"))

    def around(self, block: nn.Module) -> nn.Module:
        """Return a copy of the block as it is now, unfused, around the plain layer."""
        copied: nn.Module = object.__new__(class_of(block))
        copied.__dict__.update(block.__dict__, **_NOT_NEEDED)
        # A dict of its own, because the block keeps its wrappers.
        copied.__dict__["_modules"] = {**block._modules, "_original_component": self.layer}
        return copied

    def with_built_mask(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return a block's arguments with the mask for "eager" in place of the one for SDPA."""
        residual: Any = args[0] if args else kwargs["hidden_states"]
        if "attention_mask" in kwargs:
            return args, {
                **kwargs,
                "attention_mask": eager_mask_of(kwargs["attention_mask"], residual),
            }
        at = self._mask_at
        if len(args) > at > 0:
            args = (*args[:at], eager_mask_of(args[at], residual), *args[at + 1 :])
        return args, kwargs


def _runs_its_layer(kind: type) -> bool:
    """Return True if a class of blocks ends up in the `forward` of one of `_BLOCKS`."""
    for base in kind.__mro__:
        run = vars(base).get("forward")
        if run is not None and base.__name__ in _BLOCKS:
            return True
        if run is not None and "__class__" not in run.__code__.co_freevars:  # no `super`
            return False
    return False


_NOT_NEEDED = {
    "_maybe_wire_capture_hooks": lambda *_: None,
    "_clear_attention_capture": lambda *_: None,
    "_filter_kwargs_for_forward": lambda kwargs, n_positional=0: kwargs,
}
"""Methods that a block does not need around the plain layer."""


def _relays(point: nn.Module) -> Iterator[int]:
    """Yield the ids of a hook point's hooks that only pass the value on to another hook point."""
    for handle in point.fwd_hooks if isinstance(point, HookPoint) else ():
        hook = inspect.unwrap(handle.user_hook) if handle.user_hook else None
        if getattr(hook, "__module__", None) == "transformer_lens.model_bridge.component_setup":
            yield handle.hook.id
