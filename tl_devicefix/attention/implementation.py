"""`set_attn_implementation(model, "sdpa")`, and what it says of each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint

from tl_devicefix.misspelt import shown
from tl_devicefix.monkeypatch.applying import is_enabled

EAGER, SDPA = "eager", "sdpa"
_IMPLEMENTATION = "_tl_devicefix_attn_implementation"

WHY_NOT: list[Callable[[Any, str, Any], Any]] = []
"""For each model class, why an attention would be eager now although SDPA is set.

Takes the model, the attention's name and the attention; returns a reason, None if it would be
SDPA, or NotImplemented for an attention of another class.
"""


def has_hooks(module: Any) -> bool:
    """Whether calling a module does more than its class's forward."""
    attributes = module.__dict__
    return bool(
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
    )


def listens(point: Any) -> bool:
    """Whether somebody sees the activation of a hook point: by a hook, or in its place."""
    return type(point) is not HookPoint or has_hooks(point)


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def is_sdpa(module: Any) -> bool:
    """Whether SDPA is set for a block's attention, or for a model."""
    return module.__dict__.get(_IMPLEMENTATION) == SDPA


def set_attn_implementation(
    model: Any, attn_implementation: str | None = None
) -> AttnImplementation:
    """Choose how a model's blocks attend, from now on or within a `with` block.

    With "sdpa", a block uses torch's fused attention, and builds neither scores nor pattern. Its
    memory grows with the tokens, and not with their square. If you hook `hook_attn_scores` or
    `hook_pattern` of a block, also by `run_with_cache`, that block is eager in this forward, with
    the installed TransformerLens's bits. So is a block that SDPA cannot express. All other hooks
    run as before.

        tl_devicefix.set_attn_implementation(model, "sdpa")            # from now on
        with tl_devicefix.set_attn_implementation(model, "sdpa"): ...  # for a while
        print(tl_devicefix.set_attn_implementation(model))             # each block, and why

    SDPA has no second derivatives: set "eager" before you differentiate twice.
    Within `torch.func`, forward-mode autograd and `torch.compile`, blocks are eager.

    Args:
        model: a HookedTransformer, or a TransformerBridge of TransformerLens 4, on any devices. You
            may also give a view or a block of one.
        attn_implementation: "sdpa", "eager", or None to change nothing.

    Returns:
        How each block attends. As a `with` block, it sets everything back at the end.

    Raises:
        ValueError: if there is no such implementation, or the model has no attention.
        RuntimeError: if TransformerLens is unpatched.
    """
    return AttnImplementation(model, attn_implementation)


class AttnImplementation:
    """How each block of a model attends; printing it shows a table.

    Args:
        model: the model.
        attn_implementation: what to set, if anything.
    """

    def __init__(self, model: Any, attn_implementation: str | None) -> None:
        is_module = isinstance(model, torch.nn.Module)
        self._modules = by_shortest_name(model, _attends) if is_module else {}
        check_attn_implementation(attn_implementation)
        if not self._modules:
            raise ValueError(
                f"no module of the {type(model).__name__} attends as TransformerLens's blocks do: "
                "give a HookedTransformer or a TransformerBridge"
            )
        if attn_implementation == SDPA and not is_enabled():
            raise RuntimeError(
                "TransformerLens is unpatched, so its blocks attend as installed: leave the "
                "`disabled()` block, or call tl_devicefix.enable(), first"
            )
        # The model as a whole too, for what a forward makes for all blocks.
        self._set = {"": model, **self._modules}
        self._before = {name: vars(m).get(_IMPLEMENTATION) for name, m in self._set.items()}
        self._asked = attn_implementation
        self.__enter__()

    def __enter__(self) -> AttnImplementation:
        if self._asked is not None:
            for module in self._set.values():
                _set(module, self._asked)
        return self

    def __exit__(self, *error: object) -> None:
        for name, implementation in self._before.items():
            _set(self._set[name], implementation)

    @property
    def blocks(self) -> dict[str, str]:
        """Name of each attention -> "sdpa", or "eager" and why, if a forward came now."""
        return attention_of_each(self._set[""], self._modules)

    def __repr__(self) -> str:
        blocks = self.blocks
        width = max(map(len, blocks))
        return "\n".join(
            f"{name:<{width}}  {implementation}" for name, implementation in blocks.items()
        )


def attention_of_each(model: Any, attentions: dict[str, Any] | None = None) -> dict[str, str]:
    """Name of each attention of a model -> "sdpa", or "eager" and why, if a forward came now."""
    attentions = by_shortest_name(model, _attends) if attentions is None else attentions
    return {
        name: _implementation_of(model, name, attention) for name, attention in attentions.items()
    }


def check_attn_implementation(attn_implementation: str | None) -> None:
    """Check that there is such an implementation, if one is asked for."""
    if attn_implementation not in (SDPA, EAGER, None):
        raise ValueError(
            f"attn_implementation must be 'sdpa' or 'eager', but is {shown(attn_implementation)}"
        )


def by_shortest_name(model: Any, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    """Modules of a kind by their shortest name: a Bridge's have transformers' names too."""
    names: dict[Any, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_one(module):
            names[module] = min(names.get(module, name), name, key=len)
    return {name: module for module, name in names.items()}


def _attends(module: Any) -> bool:
    computes = hasattr(module, "attn_scale") or hasattr(module, "_apply_reconstruct_attention_mask")
    return computes and all(
        isinstance(getattr(module, name, None), HookPoint)
        for name in ("hook_attn_scores", "hook_pattern")
    )


def set_sdpa(block: Any, implementations: Sequence[bool]) -> None:
    """Set for each attention in a block whether it is SDPA."""
    attentions = filter(_attends, block.modules())
    for module, is_set in zip(attentions, implementations, strict=True):
        if is_sdpa(module) is not is_set:
            _set(module, SDPA if is_set else EAGER)


def sdpa_in(block: Any) -> list[bool]:
    """For each attention in a block, whether it is SDPA."""
    return list(map(is_sdpa, filter(_attends, block.modules())))


def _set(module: Any, attn_implementation: str | None) -> None:
    if attn_implementation == SDPA:
        vars(module)[_IMPLEMENTATION] = SDPA
    else:
        vars(module).pop(_IMPLEMENTATION, None)


def _implementation_of(model: Any, name: str, module: Any) -> str:
    if not is_sdpa(module):
        return EAGER
    if not is_enabled():
        return "eager: TransformerLens is unpatched"
    reasons = (why(model, name, module) for why in WHY_NOT)
    why = next(
        (reason for reason in reasons if reason is not NotImplemented),
        f"a {type(module).__name__} attends in its own way",
    )
    return SDPA if why is None else f"eager: {why}"
