"""A block of a Bridge as transformers' own layer, without the Bridge's wrappers in it.

The embeddings, the final norm and the unembedding are fused in the same way. Hooks on a block's
input and output are called around the layer, and those of `_parts` in a second such layer, which
is made when the first of them is found. If there is any other hook, the Bridge's block runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    NormalizationBridge,
    RMSNormalizationBridge,
    RotaryEmbeddingBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import PretrainedConfig

from tl_devicefix.fusing.fused import BOUND, KINDS, Fused, class_of, why_replaced
from tl_devicefix.fusing.listening import (
    Listeners,
    hooks_of,
    records,
    relay_hooks,
    unsupported_mode,
)
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.patch import is_of_user
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.transformer_bridge.attention import (
    reads_masks_of_sdpa,
    this_forward,
    why_no_sdpa,
    why_not_eager,
    why_own_mask,
)
from tl_devicefix.transformer_bridge.unwrapping import (
    HOOKABLE,
    HookedPart,
    NotPlain,
    Unwrapping,
    is_wrapper,
)

SINCE = Version("4.dev0")
_FUSED_PARTS = (
    EmbeddingBridge,
    RotaryEmbeddingBridge,
    UnembeddingBridge,
    NormalizationBridge,
    RMSNormalizationBridge,
)
_STARTING = ("BlockBridge.forward", "_OptBlockBridge.forward", "_LLaDABlockBridge.forward")
_RUNNING = (*_STARTING, "BloomBlockBridge.forward", "OpaqueBlockBridge.forward")
"""Blocks' forwards that only hook the residual stream and call the layer."""


class FusedWrapper(Fused):
    """A fused wrapper of a Bridge."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """See `Fused`."""
        return is_wrapper(module) and (cls.is_block(module) or class_of(module) in _FUSED_PARTS)

    @classmethod
    def is_block(cls, module: nn.Module) -> bool:
        """See `Fused`."""
        return is_wrapper(module) and bool(module.is_list_item)

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """See `Fused`."""
        bound = bound_of(module)
        return bound.why or unsupported_mode() or (None if bound.may_run() else "it has hooks")

    @classmethod
    def why_pattern(cls, module: nn.Module) -> str | None:
        """See `Fused`."""
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
        if cls.is_block(module) and _forward_of(class_of(module)) not in _RUNNING:
            return f"a {class_of(module).__name__} computes in its own way"
        _drop_pattern(module)
        return why_replaced((*_classes(GeneralizedComponent), HookPoint))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the layer at once if it may run, and the wrapper itself has no hooks."""
        bound = self._bound_to_run(args, kwargs)
        if bound is None or any(hooks_of(vars(self))):
            return super().__call__(*args, **kwargs)
        if "forward" in vars(self):  # one of this package's, around that of the class
            return self.forward(*args, **kwargs)
        return bound.run(self, args, kwargs)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call transformers' own layer, or TransformerLens's forward if there are hooks inside."""
        bound = self._bound_to_run(args, kwargs)
        if bound is not None:
            return bound.run(self, args, kwargs)
        output = super().forward(*args, **kwargs)
        _drop_pattern(self)
        return output

    def _bound_to_run(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> BoundWrapper | None:
        now, is_block = this_forward(), self.is_list_item
        if not now.is_of_bridge or not is_enabled():
            return None
        # A hook that calls a block gives it nothing but a stream: the block's wrappers make the
        # mask and positions that its layer lacks.
        if is_block and len(args) + len(kwargs) == 1:
            return None
        bound = bound_of(self)
        if is_block and now.by_sdpa and bound.may_show_mask():
            raise RuntimeError(
                f"a hook was registered on a module of {self.name} while a forward ran without the "
                "Bridge's own attention mask: register it before the forward, or call unfuse_blocks"
            )
        return bound if bound.may_run() else None


def _drop_pattern(block: nn.Module) -> None:
    """Drop the pattern of the last forward, which a layer without wrappers never replaces.

    With a pattern that is part of an autograd graph, the block could not be deep-copied.
    """
    attention = block._modules.get("attn")
    if getattr(attention, "_pattern", None) is not None:
        vars(attention)["_pattern"] = None


KINDS.append(FusedWrapper)


def _classes(of: type[nn.Module]) -> Iterator[type]:
    yield of
    for kind in of.__subclasses__():
        yield from _classes(kind)


def bound_of(wrapper: nn.Module) -> BoundWrapper:
    """Return a fused wrapper's `BoundWrapper`; make a new one if a module was replaced."""
    bound: BoundWrapper | None = wrapper.__dict__.get(BOUND)
    if bound is None or not bound.is_current():
        bound = wrapper.__dict__[BOUND] = BoundWrapper(wrapper)
    return bound


def config_of_sdpa(bridge: TransformerBridge) -> PretrainedConfig | None:
    """Return the config for which transformers may make masks for SDPA; None for eager masks.

    Every block has to accept masks for SDPA, even in TransformerLens's forward, and no hook may
    see one.
    """
    config = None
    for block in getattr(bridge, "blocks", ()):
        if isinstance(block, FusedWrapper):
            bound = bound_of(block)
            if bound.config is None or bound.may_show_mask():
                return None
            config = config or bound.config
        elif not hasattr(class_of(block), "is_remote"):  # a remote block's host reads FACTS
            return None
    return config


def forget_fused(bridge: TransformerBridge) -> None:
    """Drop the layers without wrappers: their weights are about to be replaced."""
    for module in bridge.modules():
        vars(module).pop(BOUND, None)


class BoundWrapper:
    """transformers' own module within a wrapper, and the hooks around and within it."""

    layer: Any = None  # the module without wrappers; None if it may not run
    why: str | None = None  # the reason why it may not run; None if it may
    # The attention's, if TransformerLens's own attention can read masks for SDPA
    config: PretrainedConfig | None = None
    _hookable: frozenset[str] = frozenset()  # hook points that are called with the layer
    _hooked_layer: Any = None  # the same, with hook points on its parts

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self._training = wrapper, wrapper.training
        modules = list(wrapper.modules())[1:]  # without the wrapper
        self._harmless = {key for module in modules for key in relay_hooks(module)}
        names = {getattr(part, name): "part" for part, name in _parts(wrapper)}
        names |= {wrapper._modules.get(name): name for name in ("hook_in", "hook_out")}
        for module in modules:
            names.setdefault(module, "point" if isinstance(module, HookPoint) else "module")
        named = [(names[module], module) for module in modules]
        self._listeners = Listeners(wrapper, named, self._are_harmless)
        try:
            self._by_sdpa = self._check_attention() if wrapper.is_list_item else []
            self.layer = Unwrapping(wrapper, self._by_sdpa).layer
        except NotPlain as reason:
            self.why = str(reason)

    def is_current(self) -> bool:
        """Return True if no module was replaced since, and the training mode is the same."""
        return self._training is self._wrapper.training and self._listeners.is_current()

    def may_run(self) -> bool:
        """Return True if a layer may run: it calls all hooks that there are within it."""
        hooked = self._listeners.look()
        may_run = self.why is None and hooked <= self._hookable
        return may_run and ("part" not in hooked or self._may_hook_parts())

    def _may_hook_parts(self) -> bool:
        """Make the layer with hook points on its parts; return False if there can be none."""
        if self._hooked_layer is None:
            parts = [HookedPart(*part, self._listeners) for part in _parts(self._wrapper)]
            try:
                self._hooked_layer = Unwrapping(self._wrapper, self._by_sdpa, parts).layer
            except NotPlain:
                self._hookable -= {"part"}
                return False
        return True

    def may_show_mask(self) -> bool:
        """Return True if a hook may read or edit the attention mask."""
        # `dry_run` and blocks that are not at home have this package's hooks.
        own = chain.from_iterable(hooks.values() for hooks in hooks_of(vars(self._wrapper)))
        return "module" in self._listeners.look() or any(map(is_of_user, own))

    def run(self, block: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call the layer in place of the wrapper, and the hooks on a block's input and output."""
        attributes, hooked = block.__dict__, self._listeners.look()
        if attributes.get("_start_at_layer_idx") is not None and starts_at(class_of(block)):
            args, kwargs = block._maybe_inject_start_residual(args, kwargs)
        if attributes.get("_stop_at_layer_idx") is not None:
            block._check_stop_at_layer(*args, **kwargs)
        if "hook_in" in hooked:
            args, kwargs = block._hook_input_hidden_states(args, kwargs)
            self._listeners.refuse_others(hooked)
        if "part" in hooked:
            output = self._hooked_layer(*args, **kwargs)
            hooked = self._listeners.look()  # a hook may have added one on the output
        else:
            output = self.layer(*args, **kwargs)
        if "hook_out" not in hooked:
            return output
        return block._apply_output_hook(output)

    def _are_harmless(self, hooks: dict[int, Callable[..., object]]) -> bool:
        """Return True for hooks by which libraries pass values on, or record what nobody reads."""
        if not hooks.keys() <= self._harmless:
            # TransformerLens requests attentions in each forward, but nobody reads them.
            self._harmless |= {key for key, hook in hooks.items() if records(hook)}
            # It fills its list of them in the block's first forward.
            handles = vars(self._wrapper).get("_capture_hook_handles", ())
            self._harmless |= {handle.id for handle in handles}
        return hooks.keys() <= self._harmless

    def _check_attention(self) -> list[nn.Module]:
        """Set `config` and `_hookable`; return the attention layers that use SDPA.

        Raises:
            NotPlain: if transformers' attention computes something other than the Bridge's.
        """
        block = self._wrapper
        wrappers: list[Any] = [module for module in block.modules() if is_wrapper(module)]
        wrappers = [it for it in wrappers if it.original_component is not None]
        by_sdpa = [it for it in wrappers if why_no_sdpa(it.original_component) is None]
        if by_sdpa and all(map(reads_masks_of_sdpa, by_sdpa)):
            self.config = by_sdpa[0].original_component.config
        if not by_sdpa and any(weight.dtype == torch.float64 for weight in block.parameters()):
            # A mask's lowest float64 becomes -inf in float32: a fully masked row gives NaN.
            raise NotPlain("transformers' eager attention has a softmax in float32")
        for attention in (wrapper.original_component for wrapper in wrappers):
            if (why := why_not_eager(attention) or why_own_mask(attention)) is not None:
                raise NotPlain(why)
        if class_of(block).forward is BlockBridge.forward:  # others call hooks in other places
            self._hookable = HOOKABLE
        return [it.original_component for it in by_sdpa]


_POINTS = {
    **dict.fromkeys(("q", "k", "v", "gate", "in"), "hook_out"),
    **dict.fromkeys(("o", "out"), "hook_in"),
}
"""Projections of attention and MLP, each with the hook point that TransformerLens has a name for:
`hook_q`, `hook_k`, `hook_v`, `hook_z`, `hook_pre`, `hook_pre_linear`, `hook_post`."""


def _parts(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the wrappers in a block that have a hook point which a layer can call, and its name.

    Those of the block itself have `hook_resid_mid`, `hook_attn_out` and `hook_mlp_out`.
    """
    for wrapper in filter(is_wrapper, block.children()):
        forward = _forward_of(class_of(wrapper))
        if forward == "NormalizationBridge.forward":
            yield wrapper, "hook_in"
        is_mlp = forward in ("MLPBridge.forward", "GatedMLPBridge.forward")
        if reads_masks_of_sdpa(wrapper) or (is_mlp and wrapper.name is not None):
            yield wrapper, "hook_out"
            for name, part in wrapper.named_children():
                if name in _POINTS and class_of(part) is LinearBridge:
                    yield part, _POINTS[name]


def starts_at(kind: Any) -> bool:
    """Return True if a block's class takes the stream of `start_at_layer`; others ignore it."""
    return hasattr(kind, "is_remote") or _forward_of(kind) in _STARTING


def _forward_of(kind: Any) -> str:
    return kind.forward.__qualname__  # type: ignore[no-any-return]
