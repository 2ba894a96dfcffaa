"""A block of a Bridge that nobody listens in runs transformers' own layer.

The Bridge's wrappers sit in the layer's module tree, each around the module of transformers' that
it stands for. Beside it lies a copy of the tree without them, whose modules have the very dicts of
parameters and buffers that the layer's have, so that weights are never copied, and whatever becomes
of them is seen. At each forward, a block asks whether anything in it listens or was exchanged: a
few comparisons of lists that were made when it was looked through.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from packaging.version import Version
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.model_bridge.generalized_components import (
    EmbeddingBridge,
    NormalizationBridge,
    RMSNormalizationBridge,
    RotaryEmbeddingBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from tl_devicefix.attention.implementation import WHY_NOT, is_sdpa
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.transformer_bridge.sdpa import (
    blinds,
    built,
    is_causal_itself,
    is_of_pairs,
    place_of_mask,
    why_no_sdpa,
    why_not_eager,
)
from tl_devicefix.transformer_bridge.seen import Seen, hooks_of
from tl_devicefix.transformer_bridge.this_forward import this_forward
from tl_devicefix.transformer_bridge.without_wrappers import (
    Copies,
    NotPlain,
    as_bridge_computes,
    check,
    check_weights,
    replaced_in,
)


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A block's forward, with transformers' own layer where nobody listens in it."""
    layer, now = layer_of(self), this_forward.get()
    # By itself, a block makes by its wrappers what its layer would have to be given.
    is_plain = now.is_of_bridge and layer.is_unheard(self)
    if now.attends_by_sdpa or layer.attends_by_sdpa or (layer.minds_padding and now.may_pad):
        is_plain, args, kwargs = layer.with_its_mask(is_plain, args, kwargs)
    return original(layer.block_around_it(self) if is_plain else self, *args, **kwargs)


def why_installed(block: Any) -> str | None:
    """Why a block would run the Bridge's forward now; None if transformers' own layer."""
    if not is_enabled():
        return "TransformerLens is unpatched"
    if installed() < Version("4.0"):
        return f"transformer_lens {installed()} is older than 4.0"
    if _goes_its_own_way(type(block)):
        return f"a {type(block).__name__} computes in its own way"
    layer = layer_of(block)
    return None if layer.is_unheard(block) else layer.why(block)


def _goes_its_own_way(kind: type) -> bool:
    """Whether a class of blocks has a forward that does not come to the one above."""
    forwards = (vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each))
    for run in forwards:
        if hasattr(run, "__wrapped__"):
            return False
        if "__class__" not in run.__code__.co_freevars:  # by which it would call `super`
            return True
    return True


def forward_of_each(model: Any) -> dict[str, str]:
    """Name of each block of a Bridge -> which forward it would run, and why."""
    names: dict[Any, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # transformers' names too
        if getattr(module, "is_list_item", False):
            names[module] = min(names.get(module, name), name, key=len)
    whys = {name: why_installed(block) for block, name in names.items()}
    return {
        name: "transformers' own layer" if why is None else f"as installed: {why}"
        for name, why in whys.items()
    }


PLAIN = "_tl_devicefix_plain"


def layer_of(block: Any) -> PlainLayer:
    """A block's plain layer."""
    layer: PlainLayer | None = vars(block).get(PLAIN)
    if layer is None:
        layer = vars(block)[PLAIN] = PlainLayer()
    return layer


def forget(bridge: Any) -> None:
    """Let go of plain layers, which hold weights that are about to be exchanged."""
    for module in (bridge.original_model, *bridge.modules()):
        vars(module).pop(PLAIN, None)


_FORWARD_STATE = ("_start_at_layer_idx", "_start_residual", "_stop_at_layer_idx")


class PlainLayer:
    """transformers' own layer of a block, and what the block was like when it was made."""

    def __init__(self) -> None:
        self._why: str | None = None
        self._seen: Seen | None = None
        self._heard: dict[int, Any] | None = None
        self._heard_hooks: list[int] = []
        self.attends_by_sdpa = False
        """Whether it attends by SDPA where nobody listens."""
        self.is_compatible = False
        """Whether it is in compatibility mode."""
        self.minds_padding = False
        """Whether the Bridge may make other things of padding."""
        self._mask_at = -1
        self._plain: Any = None

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
            if self._heard:
                self._seen = None
            self._heard = None
        seen = self._seen
        if seen is None or not seen.is_as_seen():
            seen = self._look_through(block)
        if self._why is not None or _has_any_global_hook() or torch.compiler.is_compiling():
            return False
        if self._listens(seen):
            return False
        return not (self.attends_by_sdpa and _differentiates_otherwise())

    def _listens(self, seen: Seen) -> bool:
        self._heard = seen.heard()
        if self._heard is None:
            return seen.is_asked_for_heads()
        self._heard_hooks = list(self._heard)
        return True

    def why(self, block: Any) -> str:
        """Why it may not."""
        if self._heard is not None:
            names = [
                name
                for name, module in block.named_modules(remove_duplicate=False)
                if any(each is self._heard for each in hooks_of(vars(module)))
            ]
            return f"{min(names, key=lambda name: ('_original' in name, len(name)))} has hooks"
        if self._why is not None:
            return self._why
        if self._seen is not None and self._seen.is_asked_for_heads():
            return "it is asked for results or inputs of each head"
        return "torch has hooks for every module, or is tracing"

    def _look_through(self, block: Any) -> Seen:
        """Make the layer, or know why not."""
        around = [block, block._modules.get("hook_in"), block._modules.get("hook_out")]
        inside = [each for each in block.modules() if each not in around]
        self._seen = Seen([each for each in around if each is not None], inside)
        self.attends_by_sdpa = False
        self._plain = None
        try:
            self._make(block)
            self._why = None
        except NotPlain as reason:
            self._why = str(reason)
        return self._seen

    def instead_of(self, block: Any) -> Any:
        """What may be called instead of the block in this very forward: at best the plain layer."""
        unheard = self.is_unheard(block) and self._seen and not self._seen.is_heard_around()
        return self._plain if unheard and self._plain and self._is_all(block) else block

    def _is_all(self, block: Any) -> bool:
        """Whether the plain layer, given what the block is given, is all that the block runs."""
        now, held = this_forward.get(), vars(block)
        has_own_mask = now.may_pad and (self.attends_by_sdpa or self.minds_padding)
        return (
            now.attends_by_sdpa == self.attends_by_sdpa
            and not has_own_mask
            and held.get("_start_at_layer_idx") is None
            and held.get("_stop_at_layer_idx") is None
        )

    def _make(self, block: Any) -> None:
        """Make the layer, and the block for one forward of its own code, around the layer.

        Raises:
            NotPlain: if there is something in the block that the plain layer would leave out.
        """
        wrappers = [each for each in block.modules() if isinstance(each, GeneralizedComponent)]
        for each in wrappers:
            if (why := why_not_eager(each.original_component)) is not None:
                raise NotPlain(why)
        chosen = [each.original_component for each in wrappers if is_sdpa(each)]
        copies = Copies({id(each) for each in chosen if why_no_sdpa(each) is None})
        self.attends_by_sdpa = bool(copies.chosen)
        for module in block.modules():
            check(module, is_outermost=module is block)
        layer, plain = block.original_component, copies(block)
        check_weights(block, plain, copies.parted)
        self.is_compatible = block.compatibility_mode
        self.minds_padding = self.is_compatible or any(map(is_causal_itself, layer.modules()))
        self._mask_at = place_of_mask(layer)
        twin: Any = object.__new__(type(block))
        vars(twin).update(vars(block))
        vars(twin).update(
            _modules={**block._modules, "_original_component": plain},
            _maybe_wire_capture_hooks=_nothing,
            _clear_attention_capture=_nothing,
            _filter_kwargs_for_forward=_Filter(layer),
        )
        self._block = twin
        if replaced_in(block) is None and not _goes_its_own_way(type(block)):
            self._plain = plain

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
        if is_plain and self.attends_by_sdpa and (mask is None or is_of_pairs(mask)):
            if mask is None or self.is_compatible or not blinds(mask, residual.shape[1]):
                return True, args, kwargs
            is_plain = not (residual.requires_grad and torch.is_grad_enabled())
        elif is_plain and self.minds_padding:
            is_plain = not blinds(mask, residual.shape[1])
        if not this_forward.get().attends_by_sdpa:  # the mask is as for "eager"
            return is_plain, args, kwargs
        mask = built(mask, residual)
        if is_named:
            return is_plain, args, {**kwargs, "attention_mask": mask}
        return is_plain, (*args[: self._mask_at], mask, *args[self._mask_at + 1 :]), kwargs


class PlainPart(PlainLayer):
    """transformers' own module of an embedding, a norm or an unembedding outside of blocks."""

    def _make(self, block: Any) -> None:
        wrapped = block.original_component
        if type(block) not in _PARTS or _is_wrapped(wrapped):
            raise NotPlain(f"a {type(block).__name__} computes in its own way")
        for module in block.modules():
            check(module)
        self._plain = as_bridge_computes(block) or wrapped

    def _is_all(self, block: Any) -> bool:
        return True


_PARTS = (
    *(EmbeddingBridge, RotaryEmbeddingBridge, UnembeddingBridge),
    *(NormalizationBridge, RMSNormalizationBridge),
)


def _is_wrapped(module: Any) -> bool:
    return module is None or any(
        isinstance(each, GeneralizedComponent) for each in module.modules()
    )


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


def _differentiates_otherwise() -> bool:
    """Whether torch does what SDPA has no derivatives for."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


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
