"""Calls of a model: what HookedTransformer and TransformerBridge both have, under "model"."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from registry import RESID, Calls, Run, gradients_of, steer
from transformer_lens import FactoredMatrix

CALLS = Calls()
call = CALLS.call

# --------------------------------------------------------------------------------------------
# The model: weights

GATHERED = (
    *("W_E", "W_pos", "W_E_pos", "W_U", "b_U", "QK", "OV"),
    *("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out"),
    *("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out"),
)
for _name in GATHERED:
    CALLS.expressions("model", f"{_name}: results(model.{_name})", globals())
for _name in ("W_E", "W_K", "W_in", "b_V", "OV"):
    CALLS.expressions("model", f"{_name} gradient: weight_gradients(run, {_name!r})", globals())


def weight_gradients(run: Run, name: str) -> dict[str, Any]:
    def weight_sum(model: Any) -> torch.Tensor:
        value = getattr(model, name)
        return (value.AB if isinstance(value, FactoredMatrix) else value).pow(2).sum()

    return gradients_of(run, weight_sum)


CALLS.expressions(
    "model",
    """
accumulated_bias: [model.accumulated_bias(i) for i in range(6)]
accumulated_bias mlp_input: model.accumulated_bias(3, mlp_input=True)
accumulated_bias without_mlps: model.accumulated_bias(5, include_mlp_biases=False)
all_composition_scores Q: model.all_composition_scores("Q")
all_composition_scores K: model.all_composition_scores("K")
all_composition_scores V: model.all_composition_scores("V")
all_head_labels: list(model.all_head_labels if isinstance(model.all_head_labels, list) else
    model.all_head_labels())
n_params_total: model.n_params_total
tokens_to_residual_directions text: model.tokens_to_residual_directions("w5")
tokens_to_residual_directions int: model.tokens_to_residual_directions(5)
tokens_to_residual_directions batch: model.tokens_to_residual_directions(tokens_at_home)
""",
    globals(),
)

# --------------------------------------------------------------------------------------------
# The model: running

CALLS.expressions(
    "model",
    """
forward: model(tokens)
forward text: model(TEXT)
forward both: list(model(tokens, return_type="both"))
forward stop_at_layer: model(tokens, stop_at_layer=3)
forward start_at_layer: model(model(tokens, stop_at_layer=3), start_at_layer=3)
forward loss_per_token: model(tokens, return_type="loss", loss_per_token=True)
loss_fn: model.loss_fn(model(tokens), tokens_at_home)
generate: model.generate(tokens_at_home, max_new_tokens=3, do_sample=False, stop_at_eos=False,
    verbose=False)
generate without_kv_cache: model.generate(tokens_at_home, max_new_tokens=3, do_sample=False,
    stop_at_eos=False, use_past_kv_cache=False, verbose=False)
generate text: model.generate(TEXT, max_new_tokens=3, do_sample=False, verbose=False)
generate_stream: list(model.generate_stream(tokens_at_home, max_new_tokens=3,
    max_tokens_per_yield=1, do_sample=False, stop_at_eos=False, verbose=False))
input_to_embed: list(model.input_to_embed(tokens))
run_with_cache: [model.run_with_cache(tokens)[0], dict(model.run_with_cache(tokens)[1].items())]
run_with_cache names: dict(model.run_with_cache(tokens, names_filter=lambda name:
    name.endswith("resid_post"))[1].items())
run_with_cache to_the_CPU: {name: value.cpu() for name, value in model.run_with_cache(tokens,
    device="cpu")[1].items()}
run_with_cache as_a_dict: dict(model.run_with_cache(tokens, return_cache_object=False)[1])
run_with_cache stop_at_layer: dict(model.run_with_cache(tokens, stop_at_layer=3)[1].items())
run_with_cache pos_slice: dict(model.run_with_cache(tokens, pos_slice=-1)[1].items())
run_with_cache remove_batch_dim: model.run_with_cache(tokens[:1],
    remove_batch_dim=True)[1].stack_head_results(apply_ln=True)
""",
    globals(),
)


@call("model.run_with_cache", "incl_bwd")
def run_with_gradients(run: Run) -> Any:
    model = run.changeable()
    return dict(model.run_with_cache(run.tokens, return_type="loss", incl_bwd=True)[1].items())


# --------------------------------------------------------------------------------------------
# The model: hooks. What a hook takes from elsewhere is at home, as people have it.


def changed(run: Run, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    hooks = [(RESID, lambda activation, hook: change(activation))]
    return run.model.run_with_hooks(run.tokens, fwd_hooks=hooks)


@call("model.run_with_hooks", "backward_hook")
def change_gradients(run: Run) -> Any:
    def loss(model: Any) -> torch.Tensor:
        model.add_hook(RESID, lambda gradient, hook: (gradient * run.direction,), dir="bwd")
        return model(run.tokens, return_type="loss")

    return gradients_of(run, loss)


def hooked(run: Run, *changes: Callable[[Any], Any]) -> Any:
    model = run.changeable()
    for change in changes:
        change(model)
    return [model(run.tokens), model(run.tokens)]


@call("model.hooks")
def hooks_in_a_context(run: Run) -> Any:
    with run.model.hooks(fwd_hooks=[(RESID, steer(run))]):
        inside = run.model(run.tokens)
    return [inside, run.model(run.tokens)]


@call("model.generate", "under_a_hook")
def generate_under_a_hook(run: Run) -> Any:
    options = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False, "verbose": False}
    with run.model.hooks(fwd_hooks=[(RESID, steer(run))]):
        return [
            run.model.generate(run.tokens_at_home, use_past_kv_cache=use, **options)
            for use in (True, False)
        ]


def cached(run: Run, add: Callable[[Any, dict[str, torch.Tensor]], Any]) -> Any:
    """What hooks that fill a dict, or a cache of their own, have cached after a forward."""
    model = run.changeable()
    activations: dict[str, torch.Tensor] = {}
    activations = add(model, activations) or activations
    model(run.tokens)
    return {name: value.cpu() for name, value in activations.items()}


@call("model.get_caching_hooks")
def caching_hooks(run: Run) -> Any:
    cache, forward_hooks, _ = run.model.get_caching_hooks(lambda name: "resid" in name)
    run.model.run_with_hooks(run.tokens, fwd_hooks=forward_hooks)
    return dict(cache.items())


def with_more_hooks(run: Run, setting: str, hook_name: str) -> Any:
    """A setting that adds hook points, with a hook on one of them."""
    model = run.changeable()
    getattr(model, setting)(True)
    logits = model.run_with_hooks(run.tokens, fwd_hooks=[(hook_name, lambda a, hook: a * 2)])
    return [logits, dict(model.run_with_cache(run.tokens)[1].items())]


CALLS.expressions(
    "model",
    """
run_with_hooks add: model.run_with_hooks(tokens, fwd_hooks=[(RESID, steer(run))])
run_with_hooks add_in_place: changed(run, lambda a: a.add_(direction))
run_with_hooks einsum: changed(run, lambda a: torch.einsum("bpd,de->bpe", a,
    model.W_E[:16] @ model.W_E.T[:, :16]))
run_with_hooks stack: changed(run, lambda a: torch.stack([a, direction.expand_as(a)]).mean(0))
run_with_hooks matmul_with_W_U: changed(run, lambda a: a + (a @ model.W_U) @ model.W_U.T)
run_with_hooks replace_at_positions: changed(run, lambda a: torch.index_put(a,
    (torch.tensor([0], device=model.cfg.device),), direction))
run_with_hooks layer_norm: changed(run, lambda a: torch.nn.functional.layer_norm(a,
    direction.shape, weight=direction))
add_hook: hooked(run, lambda model: model.add_hook(RESID, steer(run)))
add_perma_hook: hooked(run, lambda model: model.add_perma_hook(RESID, steer(run)))
reset_hooks: hooked(run, lambda model: model.add_hook(RESID, steer(run)),
    lambda model: model.reset_hooks())
remove_all_hook_fns: hooked(run, lambda model: model.add_hook(RESID, steer(run)),
    lambda model: model.remove_all_hook_fns())
clear_contexts: model.clear_contexts()
hook_points: [point.name for point in model.hook_points()]
list_hooks: list(model.list_hooks())
add_caching_hooks: cached(run, lambda model, _: model.add_caching_hooks())
cache_all: cached(run, lambda model, cache: model.cache_all(cache))
cache_some: cached(run, lambda model, cache: model.cache_some(cache, lambda name: "resid" in name))
set_use_attn_result: with_more_hooks(run, "set_use_attn_result", "blocks.4.attn.hook_result")
set_use_split_qkv_input: with_more_hooks(run, "set_use_split_qkv_input", "blocks.4.hook_q_input")
set_use_hook_mlp_in: with_more_hooks(run, "set_use_hook_mlp_in", "blocks.4.hook_mlp_in")
set_use_attn_in: with_more_hooks(run, "set_use_attn_in", "blocks.4.hook_attn_in")
""",
    globals(),
)

# --------------------------------------------------------------------------------------------
# The model: moving, and the tokenizer


def moved(run: Run, move: Callable[[Any], Any]) -> Any:
    model = run.changeable()
    with contextlib.redirect_stdout(io.StringIO()):
        move(model)
    return model(run.tokens.to(model.cfg.device)).cpu()


CALLS.expressions(
    "model",
    """
to device: moved(run, lambda model: model.to(model.cfg.device))
to dtype: moved(run, lambda model: model.to(torch.float64))
cpu: moved(run, lambda model: model.cpu())
to_tokens: model.to_tokens([TEXT, OTHER_TEXT])
to_string: model.to_string(tokens_at_home)
to_str_tokens: model.to_str_tokens(tokens_at_home[0])
to_single_token: model.to_single_token("w5")
to_single_str_token: model.to_single_str_token(5)
get_token_position: model.get_token_position("w7", TEXT)
""",
    globals(),
)

ARE_FROZEN = "where weights are frozen: they cannot be changed and get no gradients"
STAY = "where weights keep their device and dtype"
REFUSED_OVER_HOSTS = {"to dtype": STAY}
"""Why calls of a model are refused if blocks are on other hosts."""
