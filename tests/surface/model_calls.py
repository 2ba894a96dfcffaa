"""Calls of a model: what HookedTransformer and TransformerBridge both have, under "model"."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from registry import GREEDY, OTHER_TEXT, RESID, TEXT, Calls, Run, arguments, gradients_of, steer
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
CALLS.attributes("model", "model", *GATHERED, "n_params_total")
for _name in ("W_E", "W_K", "W_in", "b_V", "OV"):
    CALLS.calls("model", {f"{_name} gradient": lambda run, name=_name: weight_gradients(run, name)})


def weight_gradients(run: Run, name: str) -> dict[str, Any]:
    def weight_sum(model: Any) -> torch.Tensor:
        value = getattr(model, name)
        return (value.AB if isinstance(value, FactoredMatrix) else value).pow(2).sum()

    return gradients_of(run, weight_sum)


def head_labels(model: Any) -> list[str]:
    labels = model.all_head_labels
    return labels if isinstance(labels, list) else labels()


CALLS.calls(
    "model",
    {
        "accumulated_bias": lambda model: [model.accumulated_bias(i) for i in range(6)],
        "all_head_labels": head_labels,
        **{
            f"tokens_to_residual_directions {kind}": lambda run, of=of: (
                run.model.tokens_to_residual_directions(of or run.at_home)
            )
            for kind, of in (("text", "w5"), ("int", 5), ("batch", None))
        },
    },
)
CALLS.methods(
    "model",
    "model",
    {
        "accumulated_bias mlp_input": arguments(3, mlp_input=True),
        "accumulated_bias without_mlps": arguments(5, include_mlp_biases=False),
        "all_composition_scores Q": arguments("Q"),
        "all_composition_scores K": arguments("K"),
        "all_composition_scores V": arguments("V"),
        "clear_contexts": arguments(),
        "to_tokens": arguments([TEXT, OTHER_TEXT]),
        "to_single_token": arguments("w5"),
        "to_single_str_token": arguments(5),
        "get_token_position": arguments("w7", TEXT),
    },
)

# --------------------------------------------------------------------------------------------
# The model: running


def cached_by(run: Run, **options: Any) -> Any:
    """What `run_with_cache` caches."""
    return dict(run.model.run_with_cache(run.tokens, **options)[1].items())


def without_batch_dim(run: Run) -> Any:
    _, cache = run.model.run_with_cache(run.tokens[:1], remove_batch_dim=True)
    return cache.stack_head_results(apply_ln=True)


CALLS.calls(
    "model",
    {
        "forward": lambda model, tokens: model(tokens),
        "forward text": lambda model: model(TEXT),
        "forward both": lambda model, tokens: model(tokens, return_type="both"),
        "forward stop_at_layer": lambda model, tokens: model(tokens, stop_at_layer=3),
        "forward start_at_layer": lambda model, tokens: model(
            model(tokens, stop_at_layer=3), start_at_layer=3
        ),
        "forward loss_per_token": lambda model, tokens: model(
            tokens, return_type="loss", loss_per_token=True
        ),
        "loss_fn": lambda model, tokens, at_home: model.loss_fn(model(tokens), at_home),
        "generate": lambda model, at_home: model.generate(at_home, **GREEDY),
        "generate without_kv_cache": lambda model, at_home: model.generate(
            at_home, use_past_kv_cache=False, **GREEDY
        ),
        "generate text": lambda model: model.generate(TEXT, **{**GREEDY, "stop_at_eos": True}),
        "generate_stream": lambda model, at_home: list(
            model.generate_stream(at_home, max_tokens_per_yield=1, **GREEDY)
        ),
        "input_to_embed": lambda model, tokens: model.input_to_embed(tokens),
        "run_with_cache": lambda model, tokens: model.run_with_cache(tokens),
        "run_with_cache names": lambda run: cached_by(
            run, names_filter=lambda name: name.endswith("resid_post")
        ),
        "run_with_cache to_the_CPU": lambda run: {
            name: value.cpu() for name, value in cached_by(run, device="cpu").items()
        },
        "run_with_cache as_a_dict": lambda run: cached_by(run, return_cache_object=False),
        "run_with_cache stop_at_layer": lambda run: cached_by(run, stop_at_layer=3),
        "run_with_cache pos_slice": lambda run: cached_by(run, pos_slice=-1),
        "run_with_cache remove_batch_dim": without_batch_dim,
    },
)


@call("model.run_with_cache", "incl_bwd")
def run_with_gradients(run: Run) -> Any:
    model = run.changeable()
    return dict(model.run_with_cache(run.tokens, return_type="loss", incl_bwd=True)[1].items())


# --------------------------------------------------------------------------------------------
# The model: hooks. What a hook takes from elsewhere is at home, as people have it.


def hooked_with(
    change: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor],
) -> Callable[[Run], Any]:
    """A forward in which an activation is what `change(activation, direction, model)` gives."""

    def call(run: Run) -> Any:
        hooks = [(RESID, lambda activation, hook: change(activation, run.direction, run.model))]
        return run.model.run_with_hooks(run.tokens, fwd_hooks=hooks)

    return call


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
    with run.model.hooks(fwd_hooks=[(RESID, steer(run))]):
        return [
            run.model.generate(run.at_home, use_past_kv_cache=use, **GREEDY)
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


def with_more_hooks(setting: str, hook_name: str) -> Callable[[Run], Any]:
    """A setting that adds hook points, with a hook on one of them."""

    def call(run: Run) -> Any:
        model = run.changeable()
        getattr(model, setting)(True)
        logits = model.run_with_hooks(run.tokens, fwd_hooks=[(hook_name, lambda a, hook: a * 2)])
        return [logits, dict(model.run_with_cache(run.tokens)[1].items())]

    return call


CALLS.calls(
    "model",
    {
        "run_with_hooks add": hooked_with(lambda a, direction, _: a + direction),
        "run_with_hooks add_in_place": hooked_with(lambda a, direction, _: a.add_(direction)),
        "run_with_hooks einsum": hooked_with(
            lambda a, _, model: torch.einsum("bpd,de->bpe", a, model.W_E[:16] @ model.W_E.T[:, :16])
        ),
        "run_with_hooks stack": hooked_with(
            lambda a, direction, _: torch.stack([a, direction.expand_as(a)]).mean(0)
        ),
        "run_with_hooks matmul_with_W_U": hooked_with(
            lambda a, _, model: a + (a @ model.W_U) @ model.W_U.T
        ),
        "run_with_hooks replace_at_positions": hooked_with(
            lambda a, direction, _: torch.index_put(
                a, (torch.tensor([0], device=direction.device),), direction
            )
        ),
        "run_with_hooks layer_norm": hooked_with(
            lambda a, direction, _: torch.nn.functional.layer_norm(
                a, direction.shape, weight=direction
            )
        ),
        "add_hook": lambda run: hooked(run, lambda model: model.add_hook(RESID, steer(run))),
        "add_perma_hook": lambda run: hooked(
            run, lambda model: model.add_perma_hook(RESID, steer(run))
        ),
        "reset_hooks": lambda run: hooked(
            run,
            lambda model: model.add_hook(RESID, steer(run)),
            lambda model: model.reset_hooks(),
        ),
        "remove_all_hook_fns": lambda run: hooked(
            run,
            lambda model: model.add_hook(RESID, steer(run)),
            lambda model: model.remove_all_hook_fns(),
        ),
        "hook_points": lambda model: [point.name for point in model.hook_points()],
        "list_hooks": lambda model: list(model.list_hooks()),
        "add_caching_hooks": lambda run: cached(run, lambda model, _: model.add_caching_hooks()),
        "cache_all": lambda run: cached(run, lambda model, cache: model.cache_all(cache)),
        "cache_some": lambda run: cached(
            run, lambda model, cache: model.cache_some(cache, lambda name: "resid" in name)
        ),
        **{
            setting: with_more_hooks(setting, f"blocks.4.{point}")
            for setting, point in (
                ("set_use_attn_result", "attn.hook_result"),
                ("set_use_split_qkv_input", "hook_q_input"),
                ("set_use_hook_mlp_in", "hook_mlp_in"),
                ("set_use_attn_in", "hook_attn_in"),
            )
        },
    },
)

# --------------------------------------------------------------------------------------------
# The model: moving, and the tokenizer


def moved(move: Callable[[Any], Any]) -> Callable[[Run], Any]:
    """The logits of a copy that `move` has moved."""

    def call(run: Run) -> Any:
        model = run.changeable()
        with contextlib.redirect_stdout(io.StringIO()):
            move(model)
        return model(run.tokens.to(model.cfg.device)).cpu()

    return call


CALLS.calls(
    "model",
    {
        "to device": moved(lambda model: model.to(model.cfg.device)),
        "to dtype": moved(lambda model: model.to(torch.float64)),
        "cpu": moved(lambda model: model.cpu()),
        "to_string": lambda model, at_home: model.to_string(at_home),
        "to_str_tokens": lambda model, at_home: model.to_str_tokens(at_home[0]),
    },
)

ARE_FROZEN = "where weights are frozen: they cannot be changed and get no gradients"
STAY = "where weights keep their device and dtype"
REFUSED_OVER_HOSTS = {"to dtype": STAY}
"""Why calls of a model are refused if blocks are on other hosts."""
