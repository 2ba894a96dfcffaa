"""A block of a HookedTransformer as one function of its weights.

Hook points are called if they have hooks. A norm, an MLP or an attention is called as a module if
it is of an unknown kind, or if it has a hook on a value that the function does not compute, such as
scores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from packaging.version import Version
from torch import nn
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

from tl_devicefix.fusing import kv_cache, sdpa
from tl_devicefix.fusing.fused import BOUND, KINDS, Fused, class_of, own_method, why_replaced
from tl_devicefix.fusing.kv_cache import Heads, Padding
from tl_devicefix.fusing.listening import Listeners, unsupported_mode
from tl_devicefix.fusing.one_forward import cached_for_forward, state_of
from tl_devicefix.hooked_transformer.components import POST_NORM
from tl_devicefix.hooked_transformer.moving import alibi_table
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.offload.copying import fingerprint
from tl_devicefix.placement.devices import has_values

Residual = Float[torch.Tensor, "batch pos d_model"]
Weight = Float[torch.Tensor, "d_out d_in"]
Bias = Float[torch.Tensor, " d_out"]
Modules = dict[str, Any]  # by name

SINCE = Version("3.8.dev0")  # because earlier blocks compute in other ways
_Names = dict[type, tuple[str, ...]]  # class -> its parameters, as TransformerLens makes them
_NORMS: _Names = {LayerNorm: ("w", "b"), LayerNormPre: (), RMSNorm: ("w",), RMSNormPre: ()}
_MLPS: _Names = {
    MLP: ("W_in", "b_in", "W_out", "b_out"),
    GatedMLP: ("W_gate", "W_in", "b_in", "W_out", "b_out"),
}
_ATTENTIONS: _Names = {
    Attention: ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O", "b_O"),
    GroupedQueryAttention: ("W_Q", "_W_K", "_W_V", "b_Q", "_b_K", "_b_V", "W_O", "b_O"),
}
_OF_PATTERN = frozenset(("attn", "attn.hook_attn_scores", "attn.hook_pattern"))
_WHOLE_VECTOR_NORMS = ("OlmoeForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures that normalise queries and keys before these are split into heads."""


class FusedBlock(Fused):
    """A `TransformerBlock` that is fused."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """See `Fused`."""
        return isinstance(module, TransformerBlock)

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """See `Fused`."""
        return _why_flags(module.cfg) or unsupported_mode()

    @classmethod
    def why_pattern(cls, module: Any) -> str | None:
        """See `Fused`."""
        is_known = _is_known("attn", module.attn)
        return _why_pattern(module.attn) if is_known else "its attention is not known"

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
        """Run the block as one function, or TransformerLens's forward where that has no rules."""
        cfg: Any = self.cfg
        if not is_enabled() or unsupported_mode() or _why_flags(cfg):
            return super().forward(
                resid_pre, shortformer_pos_embed, past_kv_cache_entry, attention_mask
            )
        bound: BoundBlock | None = self.__dict__.get(BOUND)
        if bound is None or not bound.is_current():
            bound = self.__dict__[BOUND] = BoundBlock(self)
        return _block(cfg, bound, resid_pre, past_kv_cache_entry, attention_mask)


KINDS.append(FusedBlock)
_CLASSES = TransformerBlock, AbstractAttention, *_ATTENTIONS, *_MLPS, *_NORMS, HookPoint


def _why_flags(cfg: HookedTransformerConfig) -> str | None:
    if cfg.use_attn_in or cfg.use_split_qkv_input:
        return "use_split_qkv_input or use_attn_in is set"
    if cfg.positional_embedding_type == "shortformer":
        return "queries and keys alone have positions"
    return None


class BoundBlock:
    """Cached facts about a fused block, valid until a module in it is exchanged."""

    def __init__(self, block: nn.Module) -> None:
        self.modules: Modules = block._modules
        named = [(name, module) for name, module in block.named_modules() if name]
        self.listeners = Listeners(block, [(_part(name), module) for name, module in named])
        self.always = frozenset(_part(name) for name, module in named if _is_foreign(name, module))
        """Modules that are always called, because they may do anything."""
        parametrized = (m for m in block.modules() if type(m) is not HookPoint)
        self._all_parameters = [module._parameters for module in parametrized]
        self._names = list(map(tuple, self._all_parameters))
        unknown = (name for name, part in self.modules.items() if not _is_known(name, part))
        self.as_modules = self.always.union(unknown)
        self._ignored: tuple[object, object, bool] = None, None, False

    def is_current(self) -> bool:
        """Return True if no module was exchanged, and no parameter named anew, since then."""
        # Names, because `torch.nn.utils.prune` replaces a parameter by another name.
        names = list(map(tuple, self._all_parameters))
        return self.listeners.is_current() and names == self._names

    def ignores_wholly(self, attn: Any) -> bool:
        """Return True if masked scores are minus infinity, which users can change."""
        ignored = attn._buffers["IGNORE"]  # get_buffer takes 40 times as long, in each forward
        state = fingerprint(ignored)
        if state != self._ignored[0]:
            is_inf = not has_values(ignored) or bool(ignored.isneginf())
            # The tensor is kept, because a freed address may be reused.
            self._ignored = state, ignored.detach(), is_inf
        return self._ignored[2]


def _is_foreign(name: str, module: nn.Module) -> bool:
    is_other = ".hook_" in f".{name}" and type(module) is not HookPoint
    return is_other or own_method(module) is not None


def _part(name: str) -> str:
    """Return the name under which a module's hooks count: a hook point's own, or its part's."""
    first, _, rest = name.partition(".")
    return f"attn.{rest.partition('.')[0]}" if first == "attn" and rest else first


def _is_known(name: str, module: Any) -> bool:
    """Return True if this file has rules for a child of a block."""
    of_name: dict[str, _Names] = {"attn": _ATTENTIONS, "mlp": _MLPS}
    kinds = of_name.get(name, _NORMS)
    if name.startswith("hook_") or (type(module) is nn.Identity and kinds is _NORMS):
        return True
    weights = kinds.get(type(module))
    if weights is None or set(weights) != set(module._parameters):  # such as one of 4 bits
        return False
    if name == "mlp":
        return "hook_mid" not in module._modules
    norms = (module._modules.get(norm) for norm in ("q_norm", "k_norm"))
    return all(norm is None or _is_known("q_norm", norm) for norm in norms)


def _why_pattern(attn: Any) -> str | None:
    """Return why an attention builds a pattern; None if it uses SDPA."""
    cfg, scale = attn.cfg, attn.attn_scale
    if cfg.attn_scores_soft_cap is not None and cfg.attn_scores_soft_cap > 0:
        return "its scores have a soft cap"
    if cfg.use_attention_sinks:
        return "it has attention sinks"
    if cfg.use_attn_result or cfg.ungroup_grouped_query_attention:
        return "use_attn_result or ungroup_grouped_query_attention is set"
    if (why := _why_flags(cfg)) is not None:  # by its own config, which may not be the block's
        return why
    if cfg.use_dynamic_ntk_rope or cfg.use_logn_attn:
        return "its positions depend on the length"
    if cfg.positional_embedding_type == "relative_positional_bias":
        return "it has relative position biases"
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        return f"its attn_scale is {scale}"
    return None


class _Weights:
    """A block's weights as `F.linear` takes them."""

    def __init__(self, modules: Modules, as_modules: frozenset[str]) -> None:
        if "attn" not in as_modules:
            self._of_attention(modules["attn"])
        if "mlp" in modules and "mlp" not in as_modules:
            self._of_mlp(modules["mlp"])

    def _of_attention(self, attn: Any) -> None:
        named = attn._parameters
        W_Q, W_K, W_V, b_Q, b_K, b_V, W_O, self.b_O = (named[n] for n in _ATTENTIONS[type(attn)])
        # [head, d_model, d_head] -> [head * d_head, d_model], as nn.Linear has it
        self.q = W_Q.mT.flatten(0, 1), b_Q.flatten()
        self.k = W_K.mT.flatten(0, 1), b_K.flatten()
        self.v = W_V.mT.flatten(0, 1), b_V.flatten()
        self.o = W_O.flatten(0, 1).T  # [d_model, head * d_head]
        self.n_heads, self.n_kv_heads, self.d_head = b_Q.shape[0], b_K.shape[0], b_K.shape[1]

    def _of_mlp(self, mlp: Any) -> None:
        named = mlp._parameters
        self.inp, self.out = named["W_in"].T, named["W_out"].T  # [d_mlp, d_model] and back
        self.b_in, self.b_out = named["b_in"], named["b_out"]
        self.gate = named["W_gate"].T if "W_gate" in named else None


def _block(
    cfg: HookedTransformerConfig,
    bound: BoundBlock,
    resid_pre: Residual,
    entry: kv_cache.Entry | None,
    padding: Padding | None,
) -> Residual:
    modules, hooked = bound.modules, bound.listeners.look() | bound.always
    called = bound.as_modules | hooked
    weights = _Weights(modules, bound.as_modules)

    def point(name: str, x: torch.Tensor) -> torch.Tensor:
        return modules[name](x) if name in hooked else x

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return modules[name](x) if name in called else _norm(modules[name], x)

    is_post_norm = cfg.original_architecture in POST_NORM
    resid_pre = point("hook_resid_pre", resid_pre)  # [batch, pos, d_model]
    if is_post_norm:
        q_in = k_in = v_in = resid_pre
    elif "ln1" in hooked:  # three times, because TransformerLens does so, and hooks count
        q_in, k_in, v_in = (norm("ln1", resid_pre) for _ in range(3))
    else:
        q_in = k_in = v_in = norm("ln1", resid_pre)
    attn = modules["attn"]
    if (
        "attn" in called
        or not _OF_PATTERN.isdisjoint(hooked)
        or _why_pattern(attn) is not None
        or not bound.ignores_wholly(attn)
    ):
        if k_in is q_in and not is_post_norm:
            # Apart, because a hook may edit one in place, and TransformerLens keeps them apart.
            q_in, k_in = q_in + 0.0, k_in + 0.0
        attn_out = attn(
            query_input=q_in,
            key_input=k_in,
            value_input=v_in,
            past_kv_cache_entry=entry,
            attention_mask=padding,
        )
    else:
        inputs = q_in, k_in, v_in
        attn_out = _attention(attn, weights, called, hooked, inputs, entry, padding)
    if cfg.use_normalization_before_and_after:
        attn_out = norm("ln1_post", attn_out)
    if is_post_norm:
        attn_out = norm("ln1", attn_out)
    attn_out = point("hook_attn_out", attn_out)  # [batch, pos, d_model]
    if attn_out.device != resid_pre.device:  # because a user's module may live elsewhere
        resid_pre = resid_pre.to(attn_out.device)
    if cfg.attn_only:
        return point("hook_resid_post", resid_pre + attn_out)  # [batch, pos, d_model]
    if cfg.parallel_attn_mlp:
        mlp_in = resid_pre
    else:
        mlp_in = resid_mid = point("hook_resid_mid", resid_pre + attn_out)  # [batch, pos, d_model]
    if cfg.use_hook_mlp_in:  # a clone, because the hook may edit it in place
        mlp_in = point("hook_mlp_in", mlp_in.clone())
    if not is_post_norm:
        mlp_in = norm("ln2", mlp_in)
    mlp = modules["mlp"]
    mlp_out = mlp(mlp_in) if "mlp" in called else _mlp(mlp, weights, mlp_in)
    if cfg.use_normalization_before_and_after:
        mlp_out = norm("ln2_post", mlp_out)
    if is_post_norm:
        mlp_out = norm("ln2", mlp_out)
    mlp_out = point("hook_mlp_out", mlp_out)  # [batch, pos, d_model]
    if cfg.parallel_attn_mlp:  # only now, because a hook on the MLP may edit resid_pre in place
        resid_mid = resid_pre + attn_out
    return point("hook_resid_post", resid_mid + mlp_out)  # [batch, pos, d_model]


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalise [..., d_model] by a LayerNorm or RMSNorm, folded or not."""
    kind, weights = type(norm), norm._parameters
    if kind is nn.Identity:
        return x
    dtype, w, b = norm.cfg.dtype, weights.get("w"), weights.get("b")
    if x.dtype != dtype or (w is not None and (w.dtype != dtype or w.device != x.device)):
        return norm(x)  # because TransformerLens converts, but torch's kernels take one dtype
    if b is not None and b.dtype != dtype:
        return norm(x)
    if kind is RMSNorm or kind is RMSNormPre:
        return torch.rms_norm(x, x.shape[-1:], w, norm.eps)
    return torch.layer_norm(x, x.shape[-1:], w, b, norm.eps)


def _mlp(mlp: Any, weights: _Weights, x: Residual) -> Residual:
    if x.device != weights.out.device or x.dtype != weights.out.dtype:
        return mlp(x)  # because F.linear takes one device and one dtype
    if weights.gate is None:
        post = mlp.act_fn(F.linear(x, weights.inp, weights.b_in))  # [batch, pos, d_mlp]
    else:
        pre, linear = F.linear(x, weights.gate), F.linear(x, weights.inp)
        post = torch.addcmul(weights.b_in, mlp.act_fn(pre), linear)  # [batch, pos, d_mlp]
    return F.linear(post, weights.out, weights.b_out)  # [batch, pos, d_model]


def _attention(
    attn: Any,
    weights: _Weights,
    called: frozenset[str],
    hooked: frozenset[str],
    inputs: tuple[Residual, Residual, Residual],
    entry: kv_cache.Entry | None,
    padding: Padding | None,
) -> Residual:
    """Attention by SDPA, from the normalised inputs of queries, keys and values."""
    cfg, modules = attn.cfg, attn._modules

    def point(name: str, x: torch.Tensor) -> torch.Tensor:
        return modules[name](x) if f"attn.{name}" in hooked else x

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return modules[name](x) if f"attn.{name}" in called else _norm(modules[name], x)

    n_heads, n_kv_heads, d_head = weights.n_heads, weights.n_kv_heads, weights.d_head
    batch, n = inputs[0].shape[:2]
    q = point("hook_q", F.linear(inputs[0], *weights.q).view(batch, n, n_heads, d_head))
    k = point("hook_k", F.linear(inputs[1], *weights.k).view(batch, n, n_kv_heads, d_head))
    v = point("hook_v", F.linear(inputs[2], *weights.v).view(batch, n, n_kv_heads, d_head))
    if cfg.use_qk_norm:
        q = norm("q_norm", q.reshape(-1, d_head)).view(q.shape)  # each head by itself
        k = norm("k_norm", k.reshape(-1, d_head)).view(k.shape)
    elif cfg.original_architecture in _WHOLE_VECTOR_NORMS:
        q = norm("q_norm", q.flatten(2)).view(q.shape)  # all heads together
        k = norm("k_norm", k.flatten(2)).view(k.shape)
    if cfg.clip_qkv is not None:
        q, k, v = (x.clamp(min=-cfg.clip_qkv, max=cfg.clip_qkv) for x in (q, k, v))
    offset = 0
    if entry is not None:
        offset = entry.past_keys.size(1)
        k, v = kv_cache.append(entry, k, v)  # [batch, key_pos, kv_head, d_head]
    tables = _tables(attn, q, offset, padding, entry)
    if cfg.positional_embedding_type == "rotary":

        def rotate(keys: Heads, start: int = 0) -> Heads:
            of_keys = tables.of_keys
            return _rotated(attn, keys, *(table[:, start:] for table in of_keys))

        q = point("hook_rot_q", _rotated(attn, q, *tables.of_queries))  # [batch, pos, head, d_head]
        k = rotate(k) if entry is None else kv_cache.rotated_keys(entry, k, tables.names, rotate)
        if entry is not None and "attn.hook_rot_k" in hooked:
            k = k.clone()  # because a hook may write to it, and the cache keeps rotated keys
        k = point("hook_rot_k", k)  # [batch, key_pos, kv_head, d_head]
    bias = None
    if cfg.positional_embedding_type == "alibi":
        bias = alibi_table(attn, k.shape[1], q.device)[:, -q.shape[1] :, : k.shape[1]]
    by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, head, pos, d_head]
    z = sdpa.attend(*by_head, 1 / attn.attn_scale, tables.mask, tables.is_causal, bias)
    z = z.transpose(1, 2)  # [batch, pos, head, d_head]
    if "attn.hook_z" in hooked:
        # A hook may edit it in place, and SDPA's backward needs its result.
        z = modules["hook_z"](z.clone() if z.requires_grad else z)
    return F.linear(z.to(weights.o.dtype).flatten(2), weights.o, weights.b_O)  # [..., d_model]


class _Tables(NamedTuple):
    """The tables that a block's attention reads: positions and mask."""

    of_queries: tuple[torch.Tensor, ...] = ()
    """Cosines and sines of the queries' positions."""
    of_keys: tuple[torch.Tensor, ...] = ()
    mask: sdpa.Mask | None = None
    is_causal: bool = False
    names: tuple[object, ...] | None = None
    """Equal for two forwards if the same keys are known to have the same positions in both."""


def _tables(
    attn: Any, q: Heads, offset: int, padding: Padding | None, entry: kv_cache.Entry | None
) -> _Tables:
    """Return the tables of a block's attention, made once in a forward for all like it."""
    cfg, n = attn.cfg, q.shape[1]
    cos, sin = _rotary_tables(attn, offset + n) if "rotary_cos" in attn._buffers else (None, None)
    direction = attn._attention_dir_override or cfg.attention_dir
    window = cfg.window_size if attn.attn_type == "local" else None
    what = n, offset, direction, window, cfg.rotary_adjacent_pairs

    def make() -> _Tables:
        pads = padding if kv_cache.is_padded(padding, entry) else None
        of_queries: tuple[torch.Tensor, ...] = ()
        of_keys, names = of_queries, None
        if cos is not None and sin is not None:
            of_keys = _positions(cos, sin, offset + n, pads, cfg.rotary_adjacent_pairs)
            of_queries = tuple(table[:, offset:] for table in of_keys)  # [..., pos, 1, rotary_dim]
            names = None if pads is not None else (state_of(cos), state_of(sin))
        if direction != "causal":
            return _Tables(of_queries, of_keys, names=names)
        sees_all = window is None or n + offset <= window
        if pads is None and sees_all and (n == 1 or offset == 0):  # flash takes no mask
            return _Tables(of_queries, of_keys, None, n > 1, names)
        mask = attn._make_causal_mask(n, n + offset, offset, q.device)  # [1, 1, pos, key_pos]
        if pads is not None:
            mask = sdpa.unmask_empty_rows(mask & pads[:, None, None, :].bool())
        return _Tables(of_queries, of_keys, mask, False, names)

    return cached_for_forward((padding, cos, sin), what, q.device, make)


def _rotary_tables(attn: Any, n_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines; extended first if they are short, as TransformerLens does."""
    buffers = attn._buffers
    cos = buffers["rotary_cos"]
    if cos.shape[0] < n_keys <= attn.cfg.n_ctx:
        n_positions = min(attn.cfg.n_ctx, max(n_keys, 2 * len(cos)))

        def extended() -> tuple[torch.Tensor, torch.Tensor]:
            attn._extend_rotary_embeddings(n_positions)
            return attn.rotary_sin, attn.rotary_cos

        # Once for all blocks that share them.
        attn.rotary_sin, attn.rotary_cos = cached_for_forward((cos,), n_positions, cos.device, extended)
    return buffers["rotary_cos"], buffers["rotary_sin"]


def _positions(
    cos: torch.Tensor, sin: torch.Tensor, n_keys: int, padding: Padding | None, in_pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of all keys, [batch or 1, key_pos, 1, rotary_dim].

    Sines have the minus that TransformerLens gives to half of what it rotates.
    """
    if padding is None:
        cos, sin = cos[None, :n_keys, None], sin[None, :n_keys, None]
    else:
        # As `get_offset_position_ids`: padding before the first token is at 0.
        positions = (padding.cumsum(dim=1) - 1).clamp(min=0).to(cos.device)  # [batch, key_pos]
        cos, sin = cos[positions, None, :], sin[positions, None, :]
    if in_pairs:
        signed = torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
    else:
        first, second = sin.chunk(2, dim=-1)
        signed = torch.cat((-first, second), dim=-1)
    return cos, signed


def _rotated(attn: Any, x: Heads, cos: torch.Tensor, sin: torch.Tensor) -> Heads:
    """Return queries or keys, rotated as by TransformerLens's `apply_rotary`."""
    dim = attn.cfg.rotary_dim
    turned = x if dim == x.shape[-1] else x[..., :dim]
    if attn.cfg.rotary_adjacent_pairs:
        flipped = torch.stack((turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        flipped = turned.roll(dim // 2, -1)
    turned = torch.addcmul(turned * cos, flipped, sin)  # [batch, pos, head, rotary_dim]
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)
