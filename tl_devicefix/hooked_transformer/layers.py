"""A block's attention (with a pattern or by SDPA), norms and MLP as functions of their weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from transformer_lens.components import (
    MLP,
    AbstractAttention,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    RMSNorm,
    RMSNormPre,
)

from tl_devicefix.attention import kv_cache, sdpa
from tl_devicefix.attention.implementation import WHY_NOT, has_hooks, is_sdpa, listens
from tl_devicefix.attention.one_forward import cached_fact, made_once, state_of
from tl_devicefix.hooked_transformer.known_blocks import (
    IS_2,
    MLPS,
    NORMS,
    call_hook_point,
    why_attention_as_installed,
)
from tl_devicefix.placement.devices import has_values

Residual = Float[torch.Tensor, "batch pos d_model"]
Heads = Float[torch.Tensor, "batch pos head_index d_head"]
Padding = Int[torch.Tensor, "batch key_pos"]

_PRECISE = (torch.float32, torch.float64)
_N_WEIGHTS = {LayerNorm: 2, RMSNorm: 1, LayerNormPre: 0, RMSNormPre: 0}
"""How many parameters each has; where there are fewer, something else is in place of one."""
_WHOLE_VECTOR_NORMS = ("OlmoeForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures that normalise queries and keys before these are split into heads."""


def run_attention(
    attn: Any,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    past_kv_cache_entry: Any = None,
    attention_mask: Padding | None = None,
    is_hooked: bool = True,
) -> Residual:
    """Compute a block's attention from what queries, keys and values are made of.

    Its `why_attention_as_installed` is None. Without `is_hooked`, nobody listens in it.
    """
    entry = past_kv_cache_entry
    cfg, modules, weights = attn.cfg, attn._modules, attn._parameters
    if type(attn) is not GroupedQueryAttention:
        W_K, W_V, b_K, b_V = weights["W_K"], weights["W_V"], weights["b_K"], weights["b_V"]
    elif cfg.ungroup_grouped_query_attention:
        W_K, W_V, b_K, b_V = attn.W_K, attn.W_V, attn.b_K, attn.b_V
    else:
        W_K, W_V, b_K, b_V = weights["_W_K"], weights["_W_V"], weights["_b_K"], weights["_b_V"]
    q = _by_head(inputs[0], weights["W_Q"], weights["b_Q"])
    if is_hooked:
        q = call_hook_point(modules, "hook_q", q)
    k = _by_head(inputs[1], W_K, b_K)
    if is_hooked:
        k = call_hook_point(modules, "hook_k", k)
    v = _by_head(inputs[2], W_V, b_V)
    if is_hooked:
        v = call_hook_point(modules, "hook_v", v)
    if cfg.use_qk_norm:
        q = run_norm(modules["q_norm"], q.reshape(-1, q.shape[-1]), is_hooked).reshape(q.shape)
        k = run_norm(modules["k_norm"], k.reshape(-1, k.shape[-1]), is_hooked).reshape(k.shape)
    elif not IS_2 and cfg.original_architecture in _WHOLE_VECTOR_NORMS:
        q = run_norm(modules["q_norm"], q.flatten(2), is_hooked).reshape(q.shape)
        k = run_norm(modules["k_norm"], k.flatten(2), is_hooked).reshape(k.shape)
    if not IS_2 and cfg.clip_qkv is not None:
        q, k, v = (tensor.clamp(min=-cfg.clip_qkv, max=cfg.clip_qkv) for tensor in (q, k, v))
    by_sdpa = is_sdpa(attn) and why_eager(attn, is_hooked) is None
    offset = 0
    if entry is not None:
        offset = entry.past_keys.size(1)
        # As TransformerLens's matmul reads keys: for a batch, from a transposed copy.
        k, v = kv_cache.append(entry, k, v, transposed=not by_sdpa and q.size(0) > 1)
    tables = _tables(attn, q, offset, attention_mask, by_sdpa)
    if cfg.positional_embedding_type == "rotary":
        q = _rotated(attn, q, offset, attention_mask, tables.of_queries)
        if is_hooked:
            q = call_hook_point(modules, "hook_rot_q", q)

        def rotate(some: Heads, start: int = 0) -> Heads:
            of_keys = tables.of_keys
            of_some = tuple(table[:, start:] for table in of_keys) if start else of_keys
            return _rotated(attn, some, start, attention_mask, of_some)

        names = tables.names
        k = rotate(k) if entry is None else kv_cache.rotated_keys(entry, k, names, rotate)
        if is_hooked:
            k = call_hook_point(modules, "hook_rot_k", k)
    if by_sdpa and is_hooked and not _takes_sdpa(attn, q, k):
        by_sdpa = False
        tables = _tables(attn, q, offset, attention_mask, by_sdpa)
    if by_sdpa:
        z = _mixed_by_sdpa(attn, q, k, v, tables.seen)
        if is_hooked and z.requires_grad:
            z = z.clone()  # a hook may edit it in place, and SDPA's backward needs its result
    else:
        z = _mixed(attn, q, k, v, tables.seen, is_hooked)
    if is_hooked:
        z = call_hook_point(modules, "hook_z", z)
    if IS_2:
        W_O = weights["W_O"].permute(2, 0, 1).flatten(1)
    else:
        W_O = weights["W_O"].flatten(0, 1).T.contiguous()
        if z.dtype != W_O.dtype:
            z = z.to(W_O.dtype)
    return F.linear(z.flatten(2), W_O, weights["b_O"])


def _by_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Heads:
    """TransformerLens's `simple_attn_linear`: a view of weights that lie as a checkpoint's do."""
    made = F.linear(x, weight.mT.flatten(0, 1), bias.flatten())
    return made.view(*made.shape[:2], *bias.shape)


def _mixed(
    attn: Any, q: Heads, k: Heads, v: Heads, seen: torch.Tensor | None, is_hooked: bool
) -> Heads:
    """Values mixed by a pattern of all queries and keys."""
    cfg, modules = attn.cfg, attn._modules
    if IS_2 and cfg.dtype not in _PRECISE:
        q, k = q.to(torch.float32), k.to(torch.float32)
    grouped = type(attn) is GroupedQueryAttention and not cfg.ungroup_grouped_query_attention
    repeats = attn.repeat_kv_heads if grouped else 1
    scores = _matmul(q.permute(0, 2, 1, 3), k, (0, 2, 3, 1), repeats)
    scores = scores / attn.attn_scale
    cap = cfg.attn_scores_soft_cap
    if cap is not None and cap > 0:
        scores = cap * torch.tanh(scores / cap)
    if cfg.positional_embedding_type == "alibi":
        n_queries, n_keys = scores.shape[-2:]
        scores += alibi_bias(attn, n_keys, scores.device)[:, -n_queries:, :n_keys]
    if seen is not None:
        scores = torch.where(seen, scores, attn._buffers["IGNORE"])
    if is_hooked:
        scores = call_hook_point(modules, "hook_attn_scores", scores)
    if not IS_2 and cfg.use_attention_sinks:
        sinks = attn._parameters["sinks"].reshape(1, -1, 1, 1)
        sinks = sinks.expand(scores.shape[0], -1, scores.shape[-2], -1).to(scores.dtype)
        combined = torch.cat([scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        pattern = F.softmax(combined, dim=-1)[..., :-1]
    else:
        pattern = F.softmax(scores, dim=-1)
    if torch.is_grad_enabled():
        pattern = torch.where(torch.isnan(pattern), torch.zeros_like(pattern), pattern)
    else:
        pattern.nan_to_num_(0.0)  # the same, as no probability is infinite
    if is_hooked:
        pattern = call_hook_point(modules, "hook_pattern", pattern)
    pattern = pattern.to(v.device, cfg.dtype if IS_2 else v.dtype)
    return _matmul(pattern, v, (0, 2, 1, 3), repeats).permute(0, 2, 1, 3)


def _matmul(
    heads: Float[torch.Tensor, "batch head_index x y"],
    shared: Heads,
    order: tuple[int, int, int, int],
    repeats: int,
) -> Float[torch.Tensor, "batch head_index x z"]:
    """`heads @ shared.permute(order)`, where so many heads share keys or values.

    Those of a KV cache that has grown are read where they are: with a matmul for each head of a
    group, as one for the whole group would round otherwise. Others are repeated.
    """
    if repeats == 1:
        return heads @ shared.permute(order)
    if torch.is_grad_enabled():  # another operation would add gradients in another order
        return heads @ torch.repeat_interleave(shared, dim=2, repeats=repeats).permute(order)
    if shared.stride(0) != shared.shape[2] * shared.stride(2):  # it does not lie head by head
        repeated = torch.cat((shared,) * repeats, 3)
        return heads @ repeated.view(*shared.shape[:2], -1, shared.shape[3]).permute(order)
    shared = shared.permute(order)
    by_place = heads.unflatten(1, (-1, repeats)).unbind(2)
    return torch.stack([some @ shared for some in by_place], 2).flatten(1, 2)


def _mixed_by_sdpa(attn: Any, q: Heads, k: Heads, v: Heads, seen: sdpa.Seen | None) -> Heads:
    """Values mixed without a pattern."""
    bias = None
    if attn.cfg.positional_embedding_type == "alibi":
        n_keys = k.shape[1]
        bias = alibi_bias(attn, n_keys, q.device)[:, -q.shape[1] :, :n_keys]
    by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return sdpa.attend(*by_head, 1 / attn.attn_scale, seen, bias).transpose(1, 2)


def why_eager(attn: Any, is_hooked: bool = True) -> str | None:
    """Why a block builds a pattern now although SDPA is set for it; None if it does not."""
    for name in ("hook_attn_scores", "hook_pattern") if is_hooked else ():
        if listens(attn._modules[name]):
            return f"{name} has hooks"
    return _why_always_eager(attn) or sdpa.why_not_here()


def _takes_sdpa(attn: Any, q: Heads, k: Heads) -> bool:
    """Whether SDPA is right after hooks, which may have added others, or changed how many heads."""
    grouped = type(attn) is GroupedQueryAttention and not attn.cfg.ungroup_grouped_query_attention
    n_heads = k.shape[2] * (attn.repeat_kv_heads if grouped else 1)
    return why_eager(attn) is None and q.shape[2] == n_heads


def _why_always_eager(attn: Any) -> str | None:
    cfg, scale = attn.cfg, attn.attn_scale
    if cfg.attn_scores_soft_cap is not None and cfg.attn_scores_soft_cap > 0:
        return "its scores have a soft cap"
    if not IS_2 and cfg.use_attention_sinks:
        return "it has attention sinks"
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        return f"attn_scale is {scale}"
    ignore = attn._buffers["IGNORE"]
    if not made_once(
        (ignore,), "minus infinity", ignore.device, lambda: _is_minus_infinity(ignore)
    ):
        return "its IGNORE is not minus infinity"
    return None


def _is_minus_infinity(ignore: torch.Tensor) -> bool:
    return cached_fact(ignore, "minus infinity", lambda tensor: bool(tensor.isneginf()))


def _why_not_sdpa(model: Any, name: str, attn: Any) -> Any:
    if not isinstance(attn, AbstractAttention):
        return NotImplemented
    return why_attention_as_installed(attn) or why_eager(attn)


WHY_NOT.append(_why_not_sdpa)


class Tables(NamedTuple):
    """What a block's attention reads besides activations and weights."""

    of_queries: tuple[torch.Tensor, ...]
    """Cosines and sines of queries' positions; `of_keys` of keys'."""
    of_keys: tuple[torch.Tensor, ...]
    seen: Any
    """Which keys each query sees, [batch or 1, 1, query_pos, key_pos]; None for all."""
    names: tuple[Any, ...] | None
    """Equal for two forwards in which the same keys are known to have the same positions."""


def _tables(attn: Any, q: Heads, offset: int, padding: Padding | None, by_sdpa: bool) -> Tables:
    """The tables of a block's attention, made once in a forward for all blocks that share them."""
    batch, n, device = q.size(0), q.size(1), q.device
    cfg, buffers = attn.cfg, attn._buffers
    cos, sin = buffers.get("rotary_cos"), buffers.get("rotary_sin")
    mask = buffers["mask"] if IS_2 else None
    has_gradients = torch.is_grad_enabled()
    direction = (not IS_2 and attn._attention_dir_override) or cfg.attention_dir
    window = cfg.window_size if attn.attn_type == "local" else None
    what = batch, n, offset, direction, window, has_gradients, by_sdpa, cfg.rotary_adjacent_pairs

    def make_tables() -> Tables:
        seen, pads = None, padding
        of_queries: tuple[torch.Tensor, ...] = ()
        of_keys = of_queries
        names: tuple[Any, ...] | None = None
        grows = not has_gradients and offset >= kv_cache.GROWS_FROM
        of_all = (1, offset + n), (batch, offset + n)
        if (
            pads is not None
            and pads.shape in of_all
            and (by_sdpa or grows or _is_read_at_once(pads))
        ):
            pads = made_once((pads,), "padding", pads.device, lambda: _padding(padding))
        if direction == "causal":
            make = _seen_by_sdpa if by_sdpa else _seen
            where = ("seen", *what)
            seen = made_once(
                (pads, mask), where, device, lambda: make(attn, n, offset, pads, device)
            )
        if cos is not None and not has_gradients:
            of_queries = _positions(attn, offset, offset + n, pads)
            of_keys = _positions(attn, 0, offset + n, pads) if offset else of_queries
            if pads is None:
                names = state_of(cos), state_of(sin)
        return Tables(of_queries, of_keys, seen, names)

    return made_once((padding, cos, sin, mask), what, device, make_tables)


def _is_read_at_once(tensor: torch.Tensor) -> bool:
    """Whether to read a tensor's values waits for no device, and nothing is traced."""
    is_on_cpu = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return is_on_cpu and sdpa.why_not_here() is None


def _padding(padding: Padding | None) -> Padding | None:
    """A padding mask, unless it leaves nothing out. Asked of the device once in a forward."""
    leaves_nothing_out = padding is None or not has_values(padding) or bool((padding == 1).all())
    return None if leaves_nothing_out else padding


def _positions(
    attn: Any, start: int, end: int, padding: Padding | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions, as `apply_rotary` takes them off its tables.

    Sines have the minus that TransformerLens gives to half of what it rotates.
    """
    cos, sin = attn._buffers["rotary_cos"], attn._buffers["rotary_sin"]
    if padding is None:
        cos, sin = cos[None, start:end, None], sin[None, start:end, None]
    else:
        # As `get_offset_position_ids`: padding before the first token is at 0.
        positions = padding.cumsum(dim=1) - 1
        positions = positions.masked_fill(positions < 0, 0)[:, start:].to(cos.device)
        cos, sin = cos[positions, None, :], sin[positions, None, :]
    if attn.cfg.rotary_adjacent_pairs:
        signed = torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
    else:
        first, second = sin.chunk(2, dim=-1)
        signed = torch.cat((-first, second), dim=-1)
    return cos, signed


def _rotated(
    attn: Any, x: Heads, offset: int, padding: Padding | None, tables: tuple[torch.Tensor, ...]
) -> Heads:
    """Queries or keys with their positions: TransformerLens's `apply_rotary`."""
    if torch.is_grad_enabled():
        # Gradients of what follows would lie otherwise, and sums over them be rounded otherwise.
        rotated: Heads = attn.apply_rotary(x, offset, padding)
        return rotated
    cos, sin = tables
    dim, width = attn.cfg.rotary_dim, x.shape[-1]
    turned = x if dim == width else x[..., :dim]
    if attn.cfg.rotary_adjacent_pairs:
        flipped = torch.stack((turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        flipped = turned.roll(dim // 2, -1)
    turned = turned * cos + flipped * sin
    return turned.contiguous() if dim == width else torch.cat((turned, x[..., dim:]), dim=-1)


def _seen(
    attn: Any, n: int, offset: int, padding: Padding | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys each query sees; None if it sees all of them."""
    n_keys = n + offset
    if IS_2:
        seen = attn._buffers["mask"][None, None, -n:, -n_keys:]
        return seen if padding is None else (seen * padding[:, None, None, :]).bool()
    sees_all = attn.attn_type == "global" or n_keys <= attn.cfg.window_size
    if n == 1 and padding is None and sees_all:
        return None
    seen = attn._make_causal_mask(n, n_keys, offset, device)
    return seen if padding is None else seen & padding[:, None, None, :].bool()


def _seen_by_sdpa(
    attn: Any, n: int, offset: int, padding: Padding | None, device: torch.device
) -> sdpa.Seen:
    """Likewise for SDPA: no mask where all keys up to a query's own are seen."""
    window = attn.cfg.window_size if attn.attn_type == "local" else None
    edited = IS_2 and not cached_fact(
        attn.mask, ("causal", window), lambda m: _is_causal(m, window)
    )
    sees_all = window is None or n + offset <= window
    if not edited and padding is None and sees_all and (n == 1 or offset == 0):
        return sdpa.Seen(None, None)
    return sdpa.seen_by(_seen(attn, n, offset, padding, device), edited or padding is not None)


def _is_causal(mask: torch.Tensor, window: int | None) -> bool:
    """Whether TransformerLens 2's mask of all positions, which people edit, is as it was made."""
    causal = torch.ones_like(mask).tril_()
    return torch.equal(mask, causal if window is None else causal.triu_(1 - window))


def alibi_bias(attn: Any, n_keys: int, device: torch.device) -> torch.Tensor:
    """A block's ALiBi bias, [head_index, query_pos, key_pos], on its device, for so many keys."""
    bias = attn.alibi
    if bias is None or bias.shape[-1] < n_keys:
        bias = attn.create_alibi_bias(attn.cfg.n_heads, n_keys, device)
    attn.alibi = bias.to(device)
    return attn.alibi  # type: ignore[no-any-return]


def run_norm(norm: Any, x: torch.Tensor, is_hooked: bool = True) -> torch.Tensor:
    """Normalise [..., d_model] by a LayerNorm or RMSNorm, folded or not."""
    cls, weights = type(norm), norm._parameters
    if cls not in NORMS or (is_hooked and has_hooks(norm)) or len(weights) != _N_WEIGHTS[cls]:
        output: torch.Tensor = norm(x)
        return output
    dtype = norm.cfg.dtype
    if dtype not in _PRECISE:
        x = x.to(torch.float32)
    if cls is LayerNormPre or cls is LayerNorm:
        x = x - x.mean(-1, keepdim=True)
    scale = (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    if is_hooked:
        scale = call_hook_point(norm._modules, "hook_scale", scale)
    x = x / scale
    if IS_2 and cls is LayerNorm:
        x = x * weights["w"] + weights["b"]
    if is_hooked:
        x = call_hook_point(norm._modules, "hook_normalized", x)
    if x.dtype != dtype:
        x = x.to(dtype)
    if weights and not (IS_2 and cls is LayerNorm):
        if weights["w"].device != x.device:
            norm.to(x.device)  # as RMSNorm does where a hook has moved what it normalises
        x = x * weights["w"]
        if cls is LayerNorm:
            x = x + weights["b"]
    return x


def run_mlp(mlp: Any, x: torch.Tensor, is_hooked: bool = True) -> torch.Tensor:
    """Compute a block's MLP from its normalised input; a mixture of experts is called."""
    cls, modules, weights = type(mlp), mlp._modules, mlp._parameters
    if (
        cls not in MLPS
        or (is_hooked and has_hooks(mlp))
        or "hook_mid" in modules
        or len(weights) != (4 if cls is MLP else 5)  # a tensor in place of a parameter
        or weights["W_in"].device != x.device
    ):
        output: torch.Tensor = mlp(x)
        return output
    W_in, W_out = weights["W_in"], weights["W_out"]
    act_fn = mlp.act_fn
    if cls is MLP:
        pre = _addmm(weights["b_in"], x, W_in)
        if is_hooked:
            pre = call_hook_point(modules, "hook_pre", pre)
        post = act_fn(pre)
    else:
        W_gate = weights["W_gate"]
        pre = torch.matmul(x, W_gate) if IS_2 else F.linear(x, W_gate.T.contiguous())
        if is_hooked:
            pre = call_hook_point(modules, "hook_pre", pre)
        linear = torch.matmul(x, W_in) if IS_2 else F.linear(x, W_in.T.contiguous())
        if is_hooked:
            linear = call_hook_point(modules, "hook_pre_linear", linear)
        post = act_fn(pre) * linear + weights["b_in"]
    if is_hooked:
        post = call_hook_point(modules, "hook_post", post)
    if IS_2 or cls is MLP:
        return _addmm(weights["b_out"], post, W_out)
    return F.linear(post, W_out.T.contiguous(), weights["b_out"])


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """TransformerLens's `batch_addmm`."""
    output = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return output.view(*x.shape[:-1], weight.shape[-1])
