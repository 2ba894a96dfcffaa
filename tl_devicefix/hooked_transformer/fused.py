"""Run a block of a HookedTransformer as one function of its weights.

    no hooks inside                            `_block`
    other hooks inside, or an unknown norm     TransformerLens's block around `_fused_attention`
    hooks on scores or pattern, anything else  TransformerLens's block, which builds a pattern

Hooks on the residual stream, and on what attention and MLP add to it, count as outside. `_block`
calls attention as a module if it needs a pattern even without hooks, as with a soft cap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from packaging.version import Version
from torch import nn
from torch.nn.attention import SDPBackend
from transformer_lens import HookedTransformerConfig
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

from tl_devicefix.fusing import kv_cache
from tl_devicefix.fusing.fused import BOUND, KINDS, Fused, class_of, own_method, why_replaced
from tl_devicefix.fusing.kv_cache import Heads
from tl_devicefix.fusing.listening import Listeners, other_shape, unsupported_mode
from tl_devicefix.fusing.one_forward import cached_for_forward, state_of
from tl_devicefix.hooked_transformer.components import POST_NORM
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.placement.devices import has_values

Residual = Float[torch.Tensor, "batch pos d_model"]
Padding = Int[torch.Tensor, "batch key_pos"]
Mask = Bool[torch.Tensor, "batch 1 query_pos key_pos"]
Modules = dict[str, Any]  # by name

SINCE = Version("3.8.dev0")  # earlier blocks compute differently
_ParameterNames = dict[type, tuple[str, ...]]  # class -> the names of its parameters
_NORMS: _ParameterNames = {
    LayerNorm: ("w", "b"),
    LayerNormPre: (),
    RMSNorm: ("w",),
    RMSNormPre: (),
    nn.Identity: (),
}
_MLPS: _ParameterNames = {
    MLP: ("W_in", "b_in", "W_out", "b_out"),
    GatedMLP: ("W_gate", "W_in", "b_in", "W_out", "b_out"),
}
_ATTENTIONS: _ParameterNames = {
    Attention: ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O", "b_O"),
    GroupedQueryAttention: ("W_Q", "_W_K", "_W_V", "b_Q", "_b_K", "_b_V", "W_O", "b_O"),
}
_OUTER_POINTS = frozenset(
    ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
)
"""Hook points of a block that do not count as inside."""
_KINDS: dict[str, _ParameterNames] = {"hook_": {HookPoint: ()}, "attn": _ATTENTIONS, "mlp": _MLPS}
"""Prefix of a module's name -> its allowed classes. Others must be in `_NORMS`."""
_PARAMETER_NAMES: _ParameterNames = {HookPoint: (), **_NORMS, **_MLPS, **_ATTENTIONS}
_PATTERN_MODULES = ("attn", "attn.hook_attn_scores", "attn.hook_pattern")
"""Modules whose hooks need a pattern. A torch hook on `attn` runs only if `attn` is called."""
_WHOLE_VECTOR_NORMS = ("OlmoeForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures that normalise queries and keys before these are split into heads."""


class FusedBlock(Fused):
    """A fused `TransformerBlock`."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """See `Fused`."""
        return isinstance(module, TransformerBlock)

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """See `Fused`."""
        bound = _bound_of(module)
        usual = None if bound.has_usual_weights() else "its weights have other names or dtypes"
        return bound.why_not() or usual or unsupported_mode()

    @classmethod
    def why_pattern(cls, module: Any) -> str | None:
        """See `Fused`."""
        return _bound_of(module).why_pattern()

    @classmethod
    def prepare(cls, module: nn.Module) -> str | None:
        """See `Fused`."""
        if installed() < SINCE:
            return f"transformer_lens {installed()} is older than 3.8"
        if class_of(module) is not TransformerBlock:
            return f"a {class_of(module).__name__} is not TransformerLens's"
        if (name := own_method(module)) is not None:
            return f"its {name} is not TransformerLens's"
        return why_replaced(_CLASSES)

    def forward(
        self,
        resid_pre: Residual,
        shortformer_pos_embed: Residual | None = None,
        past_kv_cache_entry: kv_cache.Entry | None = None,
        attention_mask: Padding | None = None,
    ) -> Residual:
        """Run the block as one function, or TransformerLens's forward if there are hooks inside."""
        given = resid_pre, shortformer_pos_embed, past_kv_cache_entry, attention_mask
        if not is_enabled() or unsupported_mode() is not None:
            return super().forward(*given)
        bound = _bound_of(self)
        if not bound.has_usual_weights():
            return super().forward(*given)
        hooked = bound.listeners.look()
        by_sdpa = "pattern" not in hooked and bound.why_pattern() is None
        if hooked <= _OUTER_POINTS and bound.why_not() is None:
            return _block(bound, hooked, by_sdpa, resid_pre, past_kv_cache_entry, attention_mask)
        if not by_sdpa:
            return super().forward(*given)
        block: Any = object.__new__(TransformerBlock)
        # TransformerLens's block calls whatever is hooked meanwhile, except in the pattern.
        seen = bound.listeners.names - {"pattern"}
        refuse_others = functools.partial(bound.listeners.refuse_others, seen)
        attend = functools.partial(_fused_attention, bound.modules["attn"], refuse_others)
        block.__dict__.update(self.__dict__, _modules={**bound.modules, "attn": attend})
        return TransformerBlock.forward(block, *given)


KINDS.append(FusedBlock)
_CLASSES = TransformerBlock, AbstractAttention, *_ATTENTIONS, *_MLPS, *_NORMS, HookPoint


class BoundBlock:
    """Cached facts about a fused block, valid until a module in it is replaced."""

    def __init__(self, block: nn.Module) -> None:
        self.modules: Modules = block._modules
        self.attributes = vars(block)
        named = [(name, module) for name, module in block.named_modules() if name]
        self.listeners = Listeners(block, [(_hook_place(name), module) for name, module in named])
        whys = {name: why for name, module in named if (why := _why_unlisted(name, module))}
        attention_whys = (why for name, why in whys.items() if name.startswith("attn"))
        self._why_pattern = next(attention_whys, None)
        # An MLP of an unlisted class, such as one with experts, is called as a module.
        self.calls_mlp = any(name.startswith("mlp") for name in whys)
        self._why_not = next((whys[name] for name in whys if not name.startswith("mlp")), None)
        listed = [module for name, module in named if name not in whys]
        self._weights = [(m._parameters, n) for m in listed for n in _PARAMETER_NAMES[type(m)]]

    def why_not(self) -> str | None:
        """Return why the block may not run as one function now; None if it may."""
        return self._why_not or _why_flags(self.attributes["cfg"])

    def why_pattern(self) -> str | None:
        """Return why attention builds a pattern even without hooks; None if it builds none."""
        return self._why_pattern or _why_pattern(self.modules["attn"])

    def has_usual_weights(self) -> bool:
        """Return True if all parameters have TransformerLens's names and the config's dtype."""
        dtype = self.attributes["cfg"].dtype
        found = [parameters.get(name) for parameters, name in self._weights]
        return all(weight is not None and weight.dtype == dtype for weight in found)


def _bound_of(block: nn.Module) -> BoundBlock:
    bound: BoundBlock | None = block.__dict__.get(BOUND)
    if bound is None or not bound.listeners.is_current():
        bound = block.__dict__[BOUND] = BoundBlock(block)
    return bound


def _hook_place(name: str) -> str:
    """Return what hooks on a module count as: "pattern", "inside" or an outer point's name."""
    if name in _PATTERN_MODULES:
        return "pattern"
    return name if name in _OUTER_POINTS else "inside"


def _why_unlisted(name: str, module: nn.Module) -> str | None:
    """Return why the functions below do not cover a module in a block; None if they do."""
    last = name.rpartition(".")[2]
    kinds = next((kinds for part, kinds in _KINDS.items() if last.startswith(part)), _NORMS)
    if type(module) not in kinds or name.startswith("mlp.ln"):  # SoLU's inner norm
        return f"its {name} is a {type(module).__name__}"
    if (method := own_method(module)) is not None:
        return f"its {name}.{method} is not TransformerLens's"
    return None


def _why_flags(cfg: HookedTransformerConfig) -> str | None:
    if cfg.use_attn_in or cfg.use_split_qkv_input:
        return "use_split_qkv_input or use_attn_in is set"
    if cfg.positional_embedding_type == "shortformer":
        return "only queries and keys have positions"
    return None


def _why_pattern(attn: Any) -> str | None:
    cfg, scale = attn.cfg, attn.attn_scale
    if cfg.attn_scores_soft_cap is not None and cfg.attn_scores_soft_cap > 0:
        return "its scores have a soft cap"
    if cfg.use_attention_sinks:
        return "it has attention sinks"
    if cfg.use_attn_result or cfg.ungroup_grouped_query_attention:
        return "use_attn_result or ungroup_grouped_query_attention is set"
    if (why := _why_flags(cfg)) is not None:  # attention's own config may differ from the block's
        return why
    if cfg.use_dynamic_ntk_rope or cfg.use_logn_attn:
        return "its positions depend on the length"
    if cfg.positional_embedding_type == "alibi":
        return "it has ALiBi"
    if cfg.positional_embedding_type == "relative_positional_bias":
        return "it has relative position biases"
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        return f"its attn_scale is {scale}"
    return None


def _block(
    bound: BoundBlock,
    hooked: frozenset[str],
    by_sdpa: bool,
    resid_pre: Residual,
    entry: kv_cache.Entry | None,
    padding: Padding | None,
) -> Residual:
    modules, cfg = bound.modules, bound.attributes["cfg"]

    def point(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in hooked:
            return x
        result: torch.Tensor = modules[name](x)
        if name != "hook_resid_post":  # the last one
            bound.listeners.refuse_others(hooked)
        return result

    is_post_norm = cfg.original_architecture in POST_NORM
    resid_pre = point("hook_resid_pre", resid_pre)  # [batch, pos, d_model]
    x = resid_pre if is_post_norm else _norm(modules["ln1"], resid_pre)
    attend = (
        functools.partial(_fused_attention, modules["attn"], None) if by_sdpa else modules["attn"]
    )
    attn_out = attend(
        query_input=x,
        key_input=x,
        value_input=x,
        past_kv_cache_entry=entry,
        attention_mask=padding,
    )
    if cfg.use_normalization_before_and_after:
        attn_out = _norm(modules["ln1_post"], attn_out)
    if is_post_norm:
        attn_out = _norm(modules["ln1"], attn_out)
    attn_out = point("hook_attn_out", attn_out)  # [batch, pos, d_model]
    resid_mid = resid_pre + attn_out
    if cfg.attn_only:
        return point("hook_resid_post", resid_mid)  # [batch, pos, d_model]
    if not cfg.parallel_attn_mlp:
        resid_mid = point("hook_resid_mid", resid_mid)  # [batch, pos, d_model]
    x = resid_pre if cfg.parallel_attn_mlp else resid_mid
    x = x if is_post_norm else _norm(modules["ln2"], x)
    mlp_out = modules["mlp"](x) if bound.calls_mlp else _mlp(modules["mlp"], x)
    if cfg.use_normalization_before_and_after:
        mlp_out = _norm(modules["ln2_post"], mlp_out)
    if is_post_norm:
        mlp_out = _norm(modules["ln2"], mlp_out)
    mlp_out = point("hook_mlp_out", mlp_out)  # [batch, pos, d_model]
    return point("hook_resid_post", resid_mid + mlp_out)  # [batch, pos, d_model]


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalise [..., d_model] by a LayerNorm or RMSNorm, folded or not."""
    kind, weights = type(norm), norm._parameters
    if kind is nn.Identity or x.dtype != norm.cfg.dtype:  # the norm's own forward converts x
        return norm(x)
    if kind is RMSNorm or kind is RMSNormPre:
        return torch.rms_norm(x, x.shape[-1:], weights.get("w"), norm.eps)
    return torch.layer_norm(x, x.shape[-1:], weights.get("w"), weights.get("b"), norm.eps)


def _mlp(mlp: Any, x: Residual) -> Residual:
    weights = mlp._parameters
    W_in, b_in, W_out = weights["W_in"], weights["b_in"], weights["W_out"]
    if x.dtype != W_out.dtype:  # F.linear needs one dtype
        return mlp(x)
    if "W_gate" in weights:
        pre, linear = F.linear(x, weights["W_gate"].T), F.linear(x, W_in.T)
        post = torch.addcmul(b_in, mlp.act_fn(pre), linear)  # [batch, pos, d_mlp]
    else:
        post = mlp.act_fn(F.linear(x, W_in.T, b_in))  # [batch, pos, d_mlp]
    return F.linear(post, W_out.T, weights["b_out"])  # [batch, pos, d_model]


def _project(
    x: Residual,
    weight: Float[torch.Tensor, "head_index d_model d_head"],
    bias: Float[torch.Tensor, "head_index d_head"],
) -> Heads:
    # [head_index * d_head, d_model], as nn.Linear has it
    return F.linear(x, weight.mT.flatten(0, 1), bias.flatten()).unflatten(-1, bias.shape)


def _fused_attention(
    attn: Any,
    refuse_others: Callable[[], None] | None,
    query_input: Residual,
    key_input: Residual,
    value_input: Residual,
    past_kv_cache_entry: kv_cache.Entry | None,
    attention_mask: Padding | None,
) -> Residual:
    """Run attention by SDPA.

    With `refuse_others`, call its hook points, its norms as modules, and this after each point.
    """
    cfg, modules, named = attn.cfg, attn._modules, attn._parameters
    entry, padding = past_kv_cache_entry, attention_mask
    is_hooked = refuse_others is not None

    def point(name: str, x: torch.Tensor) -> torch.Tensor:
        if refuse_others is None:
            return x
        result: torch.Tensor = modules[name](x)
        if name != "hook_z":  # which comes after the pattern
            refuse_others()
            if result.shape[1] != x.shape[1]:
                raise other_shape(modules[name])
        return result

    W_Q, W_K, W_V, b_Q, b_K, b_V, W_O, b_O = (named[name] for name in _ATTENTIONS[type(attn)])
    q = point("hook_q", _project(query_input, W_Q, b_Q))  # [batch, pos, head_index, d_head]
    k = point("hook_k", _project(key_input, W_K, b_K))  # [batch, pos, kv_head_index, d_head]
    v = point("hook_v", _project(value_input, W_V, b_V))
    norm = (lambda norm, x: norm(x)) if is_hooked else _norm
    if cfg.use_qk_norm:
        q = norm(attn.q_norm, q.reshape(-1, q.shape[-1])).view(q.shape)  # each head separately
        k = norm(attn.k_norm, k.reshape(-1, k.shape[-1])).view(k.shape)
    elif cfg.original_architecture in _WHOLE_VECTOR_NORMS:
        q = norm(attn.q_norm, q.flatten(2)).view(q.shape)  # all heads together
        k = norm(attn.k_norm, k.flatten(2)).view(k.shape)
    if cfg.clip_qkv is not None:
        q, k, v = (x.clamp(min=-cfg.clip_qkv, max=cfg.clip_qkv) for x in (q, k, v))
    offset = 0
    if entry is not None:
        offset = entry.past_keys.size(1)
        k, v = kv_cache.append(entry, k, v)  # [batch, key_pos, kv_head_index, d_head]
    pads = padding if _is_padded(padding) else None
    if cfg.positional_embedding_type == "rotary":

        def rotate(x: Heads, start: int) -> Heads:
            return _rotated(attn, x, start, pads)

        q = point("hook_rot_q", rotate(q, offset))  # [batch, pos, head_index, d_head]
        if entry is None:
            k = rotate(k, 0)
        else:
            tables = attn._buffers["rotary_cos"], attn._buffers["rotary_sin"]
            states = tuple(map(state_of, tables)) if pads is None else None
            k = kv_cache.rotated_keys(entry, k, states, rotate)
            k = k.clone() if is_hooked else k  # a hook may edit k, but the cache keeps it
        k = point("hook_rot_k", k)  # [batch, key_pos, kv_head_index, d_head]
    mask, is_causal = _mask(attn, q, offset, pads)
    by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, head, pos, d_head]
    z = _attend(*by_head, 1 / attn.attn_scale, mask, is_causal).transpose(1, 2)
    if is_hooked and z.requires_grad:
        z = z.clone()  # a hook may edit z in place, but SDPA's backward needs it
    z = point("hook_z", z)  # [batch, pos, head_index, d_head]
    return F.linear(z.to(W_O.dtype).flatten(2), W_O.flatten(0, 1).T, b_O)  # [batch, pos, d_model]


def _is_padded(padding: Padding | None) -> bool:
    """Return True if a mask leaves out a token.

    Reading it makes the host wait for the device, so it is read once per forward.
    """
    if padding is None or not has_values(padding):
        return False

    def read() -> bool:
        return not bool((padding == 1).all())

    return cached_for_forward((padding,), "is padded", padding.device, read)


def _mask(attn: Any, q: Heads, offset: int, pads: Padding | None) -> tuple[Mask | None, bool]:
    """Return the mask for SDPA and its `is_causal`: at most one of the two is set."""
    cfg, n = attn.cfg, q.shape[1]
    window = cfg.window_size if attn.attn_type == "local" else None
    if (attn._attention_dir_override or cfg.attention_dir) != "causal":
        return None, False
    sees_all = window is None or n + offset <= window
    if pads is None and sees_all and (n == 1 or offset == 0):  # flash kernels take no mask
        return None, n > 1

    def make() -> Mask:
        mask: Mask = attn._make_causal_mask(n, n + offset, offset, q.device)
        if pads is None:
            return mask
        mask = mask & pads[:, None, None].bool()
        # Let queries that see no key, which are padding, see all of them. A kernel may return NaN
        # for these, which spreads to other rows in later blocks: zero times NaN is NaN.
        return mask | ~mask.any(dim=-1, keepdim=True)

    return cached_for_forward((pads,), (n, offset, window), q.device, make), False


def _rotated(attn: Any, x: Heads, start: int, pads: Padding | None) -> Heads:
    """Rotate queries or keys, the first at position `start`, as `apply_rotary` does."""
    cfg, buffers, end = attn.cfg, attn._buffers, start + x.shape[1]
    cos, sin = buffers["rotary_cos"], buffers["rotary_sin"]  # [n_ctx, rotary_dim]
    if pads is not None or cfg.rotary_adjacent_pairs or end > len(cos):
        return attn.apply_rotary(x, start, pads)  # type: ignore[no-any-return]

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        first, second = sin[None, start:end, None].chunk(2, dim=-1)
        return cos[None, start:end, None], torch.cat((-first, second), dim=-1)

    cos, signed_sin = cached_for_forward((cos, sin), (start, end), x.device, make)
    dim = cfg.rotary_dim
    rotated = x if dim == x.shape[-1] else x[..., :dim]
    rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), signed_sin)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)


def _attend(
    q: Float[torch.Tensor, "batch head_index query_pos d_head"],
    k: Float[torch.Tensor, "batch kv_head_index key_pos d_head"],
    v: Float[torch.Tensor, "batch kv_head_index key_pos d_head"],
    scale: float,
    mask: Mask | None,
    is_causal: bool,
) -> Float[torch.Tensor, "batch head_index query_pos d_head"]:
    """Return the values of each head, mixed as its pattern would mix them.

    Scores are multiplied by `scale`. Without a mask, a query sees all keys, or if `is_causal`, the
    keys up to its own.
    """
    if not q.dtype == k.dtype == v.dtype:  # a hook may have changed one
        q, k = q.to(v.dtype), k.to(v.dtype)
    groups = q.shape[1] // k.shape[1]
    enable_gqa = groups > 1
    if enable_gqa:
        choose: Any = torch._fused_sdp_choice  # its stub lacks the optional arguments
        choice = choose(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=True)
        # If torch chooses the kernel that builds scores, repeat the keys: another may then run.
        if choice == SDPBackend.MATH.value:
            enable_gqa = False
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))  # [batch, head_index, ...]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )  # [batch, head_index, query_pos, d_head]
