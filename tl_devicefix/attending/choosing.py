"""Which way a model's blocks attend: `attention(model, "sdpa")`, and what it says of each block."""

from __future__ import annotations

import difflib
from types import TracebackType
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attending.listening import why_not
from tl_devicefix.patching.applying import is_applied

AS_INSTALLED, SDPA = "as_installed", "sdpa"
_WAY = "_tl_devicefix_attention"


def goes_without_scores(attention: Any) -> bool:
    """Whether a block's attention may build no scores in this forward."""
    return is_chosen(attention) and why_not(attention) is None


def is_chosen(module: Any) -> bool:
    """Whether `attention(model, "sdpa")` holds for a block's attention, or was said of a model."""
    return vars(module).get(_WAY) == SDPA


def attention(model: Any, way: str | None = None) -> Attention:
    """Choose how a model's blocks attend, from now on or within a `with` block.

    With "sdpa", a block builds neither scores nor pattern in a forward in which nobody listens to
    them: `torch.nn.functional.scaled_dot_product_attention` takes memory that grows with the tokens
    and not with their square. A block that has a hook on `hook_attn_scores` or `hook_pattern`, also
    one of `run_with_cache`, takes the installed path, bit for bit; so does one that has what SDPA
    cannot express. All other hooks fire as ever. Keys and values of a KV cache grow in place.

        tl_devicefix.attention(model, "sdpa")            # from now on
        with tl_devicefix.attention(model, "sdpa"): ...  # for a while
        print(tl_devicefix.attention(model))             # which block goes which way, and why

    Second derivatives, `torch.func`, forward-mode autograd and `torch.compile` do not go through
    SDPA: the last three take the installed path by themselves; before you differentiate twice,
    choose "as_installed".

    Args:
        model: a HookedTransformer, or a TransformerBridge of TransformerLens 4, on whatever
            devices; a view or a block of one will do.
        way: "sdpa", "as_installed", or None to change nothing.

    Returns:
        What each block does; after a `with` block, all is chosen as before it.

    Raises:
        ValueError: if there is no such way, or nothing in the model that attends.
        RuntimeError: if TransformerLens is unpatched.
    """
    return Attention(model, way)


class Attention:
    """How each block of a model attends; printing it shows a table.

    Args:
        model: the model.
        way: what to choose, if anything.
    """

    def __init__(self, model: Any, way: str | None) -> None:
        self._modules = _all_that_attend(model) if isinstance(model, torch.nn.Module) else {}
        check_way(way)
        if not self._modules:
            raise ValueError(
                f"no module of the {type(model).__name__} attends as TransformerLens's blocks do: "
                "give a HookedTransformer or a TransformerBridge"
            )
        if way == SDPA and not is_applied():
            raise RuntimeError(
                "TransformerLens is unpatched, so that blocks can only attend as installed: call "
                "tl_devicefix.apply(), and leave `unpatched`, first"
            )
        # The model as a whole too, for what a forward makes for all blocks.
        self._chosen = {"": model, **self._modules}
        self._way = way
        self._before: dict[str, str | None] | None = self._begin()

    def _begin(self) -> dict[str, str | None]:
        """Choose the way; returns what was chosen before."""
        before = {name: vars(each).get(_WAY) for name, each in self._chosen.items()}
        if self._way is not None:
            for each in self._chosen.values():
                _choose(each, self._way)
        return before

    def __enter__(self) -> Attention:
        if self._before is None:  # entered again
            self._before = self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before, self._before = self._before or {}, None
        for name, way in before.items():
            _choose(self._chosen[name], way)

    @property
    def blocks(self) -> dict[str, str]:
        """Name of each attention -> "sdpa", or "as installed" and why, if a forward came now."""
        return {name: _said(module) for name, module in self._modules.items()}

    def __repr__(self) -> str:
        blocks = self.blocks
        width = max(map(len, blocks))
        return "\n".join(f"{name:<{width}}  {said}" for name, said in blocks.items())


def check_way(way: str | None) -> None:
    """Check that there is such a way to attend, if one is asked for.

    Raises:
        ValueError: if there is not.
    """
    if way not in (SDPA, AS_INSTALLED, None):
        close = difflib.get_close_matches(str(way).lower(), (SDPA, AS_INSTALLED), n=1, cutoff=0.3)
        hint = f"did you mean {close[0]!r}?" if close else "give 'sdpa' or 'as_installed'"
        raise ValueError(f"there is no attention {way!r}: {hint}")


def _all_that_attend(model: Any) -> dict[str, Any]:
    """Each module that does, by its shortest name: a Bridge's has transformers' names too."""
    names: dict[Any, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _attends(module):
            names[module] = min(names.get(module, name), name, key=len)
    return {name: module for module, name in names.items()}


def _attends(module: Any) -> bool:
    computes = hasattr(module, "attn_scale") or hasattr(module, "_apply_reconstruct_attention_mask")
    return computes and all(
        isinstance(getattr(module, name, None), HookPoint)
        for name in ("hook_attn_scores", "hook_pattern")
    )


def _choose(module: Any, way: str | None) -> None:
    if way == SDPA:
        vars(module)[_WAY] = SDPA
    else:
        vars(module).pop(_WAY, None)


def _said(module: Any) -> str:
    if not is_chosen(module):
        return "as installed"
    if not is_applied():
        return "as installed: TransformerLens is unpatched"
    why = why_not(module)
    return SDPA if why is None else f"as installed: {why}"
