"""Who listens in a block; which blocks run `run_block`, and why others run the installed forward.

What `run_block` stands for is compared by a digest of its source. A TransformerLens whose digest is
not among those below runs its own forwards. Add one, which `test_block.py` names, after comparing
what has changed, and once that and `test_changed_blocks.py` pass with it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
import transformer_lens.components as components
from packaging.version import Version
from transformer_lens.components import (
    MLP,
    AbstractAttention,
    Attention,
    GatedMLP,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
)
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import attention as attention_utilities
from transformer_lens.utilities.addmm import batch_addmm

from tl_devicefix.attention.implementation import has_hooks
from tl_devicefix.attention.one_forward import made_once
from tl_devicefix.dispatch.stand_ins import Definitions, Modules, why_not_now
from tl_devicefix.dispatch.views import LOOK
from tl_devicefix.monkeypatch.applying import original
from tl_devicefix.monkeypatch.versions import installed

IS_2 = installed() < Version("3.dev0")
"""Whether it is TransformerLens 2, whose operations differ in places."""
POST_NORM = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""TransformerLens's POST_NORM_ARCHITECTURES: norms follow attention and MLP."""

NORMS = frozenset((LayerNorm, LayerNormPre, RMSNorm, RMSNormPre))
MLPS = frozenset((MLP, GatedMLP))
OWN = frozenset((*NORMS, *MLPS, Attention, GroupedQueryAttention, HookPoint))


def is_observed(module: Any) -> bool:
    """Whether a hook sees the input or output of a module or of its submodules."""
    modules = (module, *module._modules.values())
    return any(has_hooks(submodule) or type(submodule) not in OWN for submodule in modules)


def call_hook_point(modules: dict[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
    """An activation as it leaves its hook point, which is called if somebody listens there."""
    point = modules[name]
    if type(point) is not HookPoint:
        return point(x)  # type: ignore[no-any-return]
    if not has_hooks(point):
        return x
    attributes = point.__dict__
    if (
        "forward" in attributes
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes["_forward_hooks_with_kwargs"]
        or attributes["_forward_hooks_always_called"]
    ):
        return point(x)  # type: ignore[no-any-return]
    # What torch's `Module.__call__` does for these, at a third of its time.
    inputs = (x,)
    for hook in tuple(attributes["_forward_hooks"].values()):
        returned = hook(point, inputs, x)
        if returned is not None:
            x = returned
    return x


KNOWN = {"405070dd2689d6aa": "2.18.0", "61bc580051b6dc91": "3.8.0 - 3.9.0"}
"""Digest -> the versions of TransformerLens that have it."""

_STOOD_FOR = {
    "TransformerBlock": ("forward", "apply_mlp"),
    "AbstractAttention": (
        *("forward", "calculate_qkv_matrices", "calculate_attention_scores"),
        *("calculate_z_scores", "apply_causal_mask", "apply_rotary", "rotate_every_two"),
    ),
    "GroupedQueryAttention": (
        *("calculate_qkv_matrices", "calculate_attention_scores", "calculate_z_scores"),
        "_apply_qk_norm",
    ),
    "MLP": ("forward",),
    "GatedMLP": ("forward",),
    "LayerNorm": ("forward",),
    "LayerNormPre": ("forward",),
    "RMSNorm": ("forward",),
    "RMSNormPre": ("forward",),
}
"""Class -> its methods that `run_block` stands for."""


_OWN_METHODS = frozenset(
    (
        "_make_causal_mask",
        *_STOOD_FOR["TransformerBlock"],
        *_STOOD_FOR["AbstractAttention"],
        *_STOOD_FOR["GroupedQueryAttention"],
    )
) - {"forward"}
"""Methods of a block and its attention, which an instance may have in place of its class's."""

_OF_ATTENTION = ("forward", *(_OWN_METHODS - {"apply_mlp"}))
_NOT_CALLED: dict[type, tuple[str, ...]] = {
    torch.nn.Module: ("_call_impl",),
    HookPoint: ("forward",),
    TransformerBlock: ("apply_mlp", "forward"),
    Attention: _OF_ATTENTION,
    GroupedQueryAttention: (*_OF_ATTENTION, "W_K", "W_V", "b_K", "b_V"),
    **dict.fromkeys((*NORMS, *MLPS), ("forward",)),
}
"""Attributes of classes that `run_block` does not use, whatever somebody has put in their place."""


class Look(Modules):
    """The modules of a block, or of its attention, and which of them hide what happens in them."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._has_others = self.have_forward or not OWN.issuperset(self.classes)

    def has_hooks(self) -> bool:
        """Whether somebody listens in it: on a hook point or a component, or in place of one."""
        return self._has_others or any(self.hooks)

    def may_run_others(self) -> bool:
        """Whether it may run code of others than TransformerLens, also in place of a module."""
        return self._has_others or super().may_run_others()

    # A copy of the module has None in its place, and is looked at anew.

    def __reduce__(self) -> Any:
        return type(None), ()


def look_at(module: Any) -> Look:
    """The look at a block or its attention, renewed if something has changed."""
    namespace = module.__dict__
    look: Look | None = namespace.get(LOOK)
    if look is None or look.namespace is not namespace or not look.are_same():
        look = namespace[LOOK] = Look(module)
    return look


def why_as_installed(block: Any) -> str | None:
    """Why a block runs the installed forward; None if it does not."""
    return _why_module(block) or _why_now() or _why_by_config(block.cfg)


def why_attention_as_installed(attn: Any) -> str | None:
    """Why a block's attention runs the installed forward; None if it does not."""
    return (
        _why_module(attn)
        or _why_weights(attn)
        or _why_now()  # before the config, because unknown versions lack some of its attributes
        or _why_by_config(attn.cfg)
        or _why_attention_by_config(attn.cfg)
    )


def _why_module(module: Any) -> str | None:
    cls: Any = type(module)
    if cls is not TransformerBlock and cls not in _WEIGHTS:
        return f"its class {cls.__name__} is not TransformerLens's"
    attributes = module.__dict__.keys()
    if not attributes.isdisjoint(_OWN_METHODS):
        return f"its {min(attributes & _OWN_METHODS)} is not TransformerLens's"
    return None


_SHARED = "W_Q", "W_O", "b_Q", "b_O"
_WEIGHTS = {
    Attention: frozenset((*_SHARED, "W_K", "W_V", "b_K", "b_V")),
    GroupedQueryAttention: frozenset((*_SHARED, "_W_K", "_W_V", "_b_K", "_b_V")),
}


def _why_weights(attn: Any) -> str | None:
    weights = attn._parameters
    if not _WEIGHTS[type(attn)] <= weights.keys():
        missing = min(_WEIGHTS[type(attn)] - weights.keys())
        return f"its {missing} is not a parameter of its own"
    if weights["b_O"].device.type == "mps":
        return "it is on an Apple GPU, where TransformerLens multiplies differently"
    return None


def _why_by_config(cfg: Any) -> str | None:
    if cfg.use_attn_in or cfg.use_split_qkv_input:
        return "use_split_qkv_input or use_attn_in is set"
    return None


def _why_attention_by_config(cfg: Any) -> str | None:
    if cfg.use_attn_result:
        return "use_attn_result is set"
    if cfg.load_in_4bit:
        return "its weights have 4 bits"
    if not IS_2 and (cfg.use_dynamic_ntk_rope or cfg.use_logn_attn):
        return "its positions depend on the length (dynamic NTK, or log-n scaling)"
    if cfg.positional_embedding_type == "relative_positional_bias":
        return "it has relative position biases"
    return None


def _why_now() -> str | None:
    """Why all blocks run the installed forward now; None if some need not."""
    why = why_not_now("HookedTransformer", _define)
    if why is None and digest() not in KNOWN:
        return f"tl_devicefix does not know the blocks of transformer_lens {installed()}"
    return why


def _define() -> Iterator[Definitions]:
    installed_forwards = (original(cls, "forward") for cls in (TransformerBlock, AbstractAttention))
    yield Definitions(_NOT_CALLED, installed_forwards)


def fits(attn: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], entry: Any) -> bool:
    """Whether inputs agree in shape and device, and the block's tables are long enough.

    A rotary table that is too short for a text is extended first, as TransformerLens does.
    """
    query_input, key_input, value_input = inputs
    device = attn._parameters["b_O"].device
    if query_input.device != device:
        return False
    if not (
        key_input is value_input is query_input
        or (
            query_input.device == key_input.device == value_input.device
            and query_input.shape == key_input.shape == value_input.shape
        )
    ):
        return False
    buffers = attn._buffers
    table = buffers.get("rotary_cos")
    if table is None and not IS_2:
        return True
    n_keys = key_input.shape[1] + (0 if entry is None else entry.past_keys.size(1))
    if not IS_2 and len(table) < n_keys <= attn.cfg.n_ctx:
        _extend_rotary(attn, n_keys)
        table = buffers["rotary_cos"]
    tables = (table, buffers["mask"]) if IS_2 else (table,)
    return all(
        buffer is None or (n_keys <= len(buffer) and buffer.device == device) for buffer in tables
    )


def _extend_rotary(attn: Any, n_keys: int) -> None:
    """Extend a block's rotary table, once for all blocks that share it."""
    table = attn.rotary_cos
    n_positions = min(attn.cfg.n_ctx, max(n_keys, 2 * len(table)))

    def extended() -> tuple[torch.Tensor, torch.Tensor]:
        attn._extend_rotary_embeddings(n_positions)
        return attn.rotary_sin, attn.rotary_cos

    attn.rotary_sin, attn.rotary_cos = made_once((table,), n_positions, table.device, extended)


@functools.cache
def digest() -> str | None:
    """A digest of the source of all that `run_block` stands for; None where some of it is not."""
    functions = [attention_utilities.simple_attn_linear, batch_addmm]
    try:
        for cls, methods in _STOOD_FOR.items():
            functions += [original(getattr(components, cls), method) for method in methods]
        sources = [
            textwrap.dedent(inspect.getsource(inspect.unwrap(function))) for function in functions
        ]
    except (AttributeError, OSError, TypeError):
        return None
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]
