"""`HookedTransformer.forward`, and the forward of its blocks as one function of their weights.

The operations of `run_block` are those of the installed TransformerLens, in its order, so that
every activation and every gradient is the installed one, bit for bit. What is left out is Python's
time: a hook point is called only where somebody listens on it, no einops string is parsed, and what
all blocks of a forward share (masks, positions) is made once. A component that is not as
TransformerLens makes it, or has hooks of torch's, is called as the module that it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformer_lens.components import AbstractAttention, TransformerBlock

from tl_devicefix.attention.implementation import has_hooks
from tl_devicefix.attention.one_forward import one_forward
from tl_devicefix.dispatch import forward as running
from tl_devicefix.dispatch.scheduler import current_run, take_own_tokenizer
from tl_devicefix.dispatch.stand_ins import hooks_of, look_again
from tl_devicefix.hooked_transformer.known_blocks import (
    IS_2,
    POST_NORM,
    call_hook_point,
    fits,
    is_observed,
    look_at,
    why_as_installed,
    why_attention_as_installed,
)
from tl_devicefix.hooked_transformer.layers import (
    Padding,
    Residual,
    alibi_bias,
    run_attention,
    run_mlp,
    run_norm,
)
from tl_devicefix.hooked_transformer.moving import placements
from tl_devicefix.monkeypatch.applying import original as installed
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.multihost.remote_block import together


@patches(
    "HookedTransformer",
    takes="self input return_type start_at_layer stop_at_layer",
    why="what leaves the model is at home",
)
def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`HookedTransformer.forward`, whose results are at home; blocks share masks and positions.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    with one_forward(), together():
        return running.forward(original, self, *args, **kwargs)


@patches(
    "LocallyOverridenDefaults",
    "__enter__",
    takes="self",
    why="runs in flight do not change what others read",
    until="3",
)
def override_defaults(original: Any, self: Any) -> Any:
    """`LocallyOverridenDefaults.__enter__`, which changes the config and the tokenizer of a model.

    A run in flight changes copies of its own, as other runs read these meanwhile.
    """
    model, overrides = self.model, self.overrides
    if current_run() is not None:
        if _differs(overrides.get("padding_side"), getattr(model.tokenizer, "padding_side", None)):
            take_own_tokenizer(model)
        if _differs(overrides.get("prepend_bos"), model.cfg.default_prepend_bos):
            placement = placements.get(model.cfg)
            model.cfg = copy.copy(model.cfg)
            if placement is not None:
                placements[model.cfg] = placement
    return original(self)


def _differs(value: Any, default: Any) -> bool:
    # Without an argument it is None, or in TransformerLens 2 a string that says so.
    return value in (True, False, "left", "right") and value != default


@patches(
    "HookedTransformer",
    takes="self direction including_permanent level",
    why="hook points without hooks are left alone, which takes a third of a forward's time",
)
def remove_all_hook_fns(
    self: Any, direction: str = "both", including_permanent: bool = False, level: int | None = None
) -> None:
    """`HookedRootModule.remove_all_hook_fns`, which leaves hook points without hooks alone.

    TransformerLens goes through all of them after each `run_with_hooks` and `run_with_cache`, which
    takes as long as a third of a forward of a small model.
    """
    for point in self.hook_points():
        for one_way, handles in (("fwd", point.fwd_hooks), ("bwd", point.bwd_hooks)):
            if handles and direction in (one_way, "both"):
                point.remove_hooks(one_way, including_permanent=including_permanent, level=level)


_PLAIN = "one function of the weights; hook points are called where somebody listens"


@patches(
    "TransformerBlock",
    "forward",
    takes="self resid_pre shortformer_pos_embed past_kv_cache_entry",
    why=_PLAIN,
    until="3",
)
def block_forward(
    original: Any,
    self: Any,
    resid_pre: Residual,
    shortformer_pos_embed: Residual | None = None,
    past_kv_cache_entry: Any = None,
    attention_mask: Padding | None = None,
) -> Residual:
    """`TransformerBlock.forward` as `run_block`, or as installed where it has to be."""
    inputs = resid_pre, shortformer_pos_embed, past_kv_cache_entry, attention_mask
    if any(hooks_of(self.__dict__)):
        look_again()  # a hook of torch's may have run before it
    # A tool such as nnsight puts a copy of its own in the place of what is installed.
    as_known = original is installed(TransformerBlock, "forward")
    if not as_known or why_as_installed(self) is not None:
        look_again()
        return original(self, *inputs)  # type: ignore[no-any-return]
    look = look_at(self)
    is_hooked, runs_others = look.has_hooks(), look.may_run_others()
    output = run_block(self, *inputs, is_hooked)
    if runs_others:
        look_again()
    return output


@patches(
    "AbstractAttention",
    "forward",
    takes="self query_input key_input value_input past_kv_cache_entry",
    why=_PLAIN,
    until="3",
)
def attention_forward(
    original: Any,
    self: Any,
    query_input: torch.Tensor,
    key_input: torch.Tensor,
    value_input: torch.Tensor,
    past_kv_cache_entry: Any = None,
    additive_attention_mask: torch.Tensor | None = None,
    attention_mask: Padding | None = None,
    position_bias: torch.Tensor | None = None,
) -> Residual:
    """`AbstractAttention.forward` likewise, where attention is called as a module."""
    inputs = query_input, key_input, value_input
    if (
        additive_attention_mask is None
        and position_bias is None
        and original is installed(AbstractAttention, "forward")
        and why_attention_as_installed(self) is None
        and fits(self, inputs, past_kv_cache_entry)
    ):
        return run_attention(self, inputs, past_kv_cache_entry, attention_mask)
    if self.cfg.positional_embedding_type == "alibi":
        # The installed forward would make it on the model's first device.
        past = 0 if past_kv_cache_entry is None else past_kv_cache_entry.past_keys.shape[1]
        alibi_bias(self, past + key_input.shape[1], query_input.device)
    others = past_kv_cache_entry, additive_attention_mask, attention_mask, position_bias
    return original(self, *inputs, *others)  # type: ignore[no-any-return]


def run_block(
    block: Any,
    resid_pre: Residual,
    shortformer_pos_embed: Residual | None = None,
    past_kv_cache_entry: Any = None,
    attention_mask: Padding | None = None,
    is_hooked: bool = True,
) -> Residual:
    """What a block makes of the residual stream; without `is_hooked`, nobody listens in it."""
    modules, cfg = block._modules, block.cfg
    post_norm = not IS_2 and cfg.original_architecture in POST_NORM
    if is_hooked:
        resid_pre = call_hook_point(modules, "hook_resid_pre", resid_pre)
    ln1, attn = modules["ln1"], modules["attn"]
    if post_norm:
        q_input = k_input = v_input = resid_pre
    elif torch.is_grad_enabled() or (is_hooked and is_observed(ln1)):
        # The installed forward normalises three times. Each calls the hooks, and has a gradient of
        # its own, whose sum would be rounded otherwise.
        q_input, k_input, v_input = (run_norm(ln1, resid_pre, is_hooked) for _ in range(3))
    else:
        q_input = k_input = v_input = run_norm(ln1, resid_pre, is_hooked)
    if shortformer_pos_embed is not None:
        q_input, k_input = q_input + shortformer_pos_embed, k_input + shortformer_pos_embed
    elif type(ln1) is nn.Identity and not post_norm:  # as the installed forward makes them, and
        q_input, k_input = q_input + 0.0, k_input + 0.0  # their layout decides how is rounded
    inputs = q_input, k_input, v_input
    if (
        (is_hooked and has_hooks(attn))
        or why_attention_as_installed(attn) is not None
        or not fits(attn, inputs, past_kv_cache_entry)
    ):
        if shortformer_pos_embed is None and not post_norm and is_observed(attn):
            # A tensor of its own, as the installed forward has it: hooks may edit it in place.
            q_input, k_input = q_input + 0.0, k_input + 0.0
        attn_out = attn(
            query_input=q_input,
            key_input=k_input,
            value_input=v_input,
            past_kv_cache_entry=past_kv_cache_entry,
            attention_mask=attention_mask,
        )
    else:
        attn_out = run_attention(attn, inputs, past_kv_cache_entry, attention_mask, is_hooked)
    if cfg.use_normalization_before_and_after:
        attn_out = run_norm(modules["ln1_post"], attn_out, is_hooked)
    if post_norm:
        attn_out = run_norm(ln1, attn_out, is_hooked)
    if is_hooked:
        attn_out = call_hook_point(modules, "hook_attn_out", attn_out)
        resid_pre = resid_pre.to(attn_out.device)
    if cfg.parallel_attn_mlp:
        resid_mid = resid_pre
    else:
        resid_mid = resid_pre + attn_out
        if is_hooked and not cfg.attn_only:
            resid_mid = call_hook_point(modules, "hook_resid_mid", resid_mid)
    if cfg.attn_only and not cfg.parallel_attn_mlp:
        resid_post = resid_mid
    else:
        mlp_in = resid_mid
        if cfg.use_hook_mlp_in:
            mlp_in = call_hook_point(modules, "hook_mlp_in", resid_mid.clone())
        if not post_norm or cfg.parallel_attn_mlp:
            mlp_in = run_norm(modules["ln2"], mlp_in, is_hooked)
        mlp_out = run_mlp(modules["mlp"], mlp_in, is_hooked)
        if cfg.use_normalization_before_and_after:
            mlp_out = run_norm(modules["ln2_post"], mlp_out, is_hooked)
        if post_norm:
            mlp_out = run_norm(modules["ln2"], mlp_out, is_hooked)
        if is_hooked:
            mlp_out = call_hook_point(modules, "hook_mlp_out", mlp_out)
        if cfg.parallel_attn_mlp:
            resid_mid = resid_pre + attn_out
        resid_post = resid_mid + mlp_out
    return call_hook_point(modules, "hook_resid_post", resid_post) if is_hooked else resid_post
