"""Calls of a model: what HookedTransformer and TransformerBridge both have, under "model"."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from registry import OTHER_TEXT, RESID, TEXT, Call, Calls, Run, gradients_of, results, steer
from transformer_lens import FactoredMatrix

CALLS = Calls()
call, calls = CALLS.call, CALLS.calls

# --------------------------------------------------------------------------------------------
# The model: weights

for _name in (
    *("W_E", "W_pos", "W_E_pos", "W_U", "b_U", "QK", "OV"),
    *("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out"),
    *("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out"),
):
    call(f"model.{_name}")(lambda run, name=_name: results(getattr(run.model, name)))  # type: ignore[misc]
    call(f"model.{_name}", "gradient")(
        lambda run, name=_name: gradients_of(  # type: ignore[misc]
            run, lambda model: weight_sum(model, name)
        )
    )


def weight_sum(model: Any, name: str) -> torch.Tensor:
    value = getattr(model, name)
    return (value.AB if isinstance(value, FactoredMatrix) else value).pow(2).sum()


calls(
    "model",
    {
        "accumulated_bias": lambda run: [run.model.accumulated_bias(i) for i in range(6)],
        "accumulated_bias mlp_input": lambda run: run.model.accumulated_bias(3, mlp_input=True),
        "accumulated_bias without_mlps": lambda run: run.model.accumulated_bias(
            5, include_mlp_biases=False
        ),
        "all_composition_scores Q": lambda run: run.model.all_composition_scores("Q"),
        "all_composition_scores K": lambda run: run.model.all_composition_scores("K"),
        "all_composition_scores V": lambda run: run.model.all_composition_scores("V"),
        "all_head_labels": lambda run: list(
            run.model.all_head_labels
            if isinstance(run.model.all_head_labels, list)
            else run.model.all_head_labels()
        ),
        "n_params_total": lambda run: run.model.n_params_total,
        "tokens_to_residual_directions text": lambda run: run.model.tokens_to_residual_directions(
            "w5"
        ),
        "tokens_to_residual_directions int": lambda run: run.model.tokens_to_residual_directions(5),
        "tokens_to_residual_directions batch": lambda run: run.model.tokens_to_residual_directions(
            run.tokens_at_home
        ),
    },
)

# --------------------------------------------------------------------------------------------
# The model: running

calls(
    "model",
    {
        "forward": lambda run: run.model(run.tokens),
        "forward text": lambda run: run.model(TEXT),
        "forward both": lambda run: list(run.model(run.tokens, return_type="both")),
        "forward stop_at_layer": lambda run: run.model(run.tokens, stop_at_layer=3),
        "forward start_at_layer": lambda run: run.model(
            run.model(run.tokens, stop_at_layer=3), start_at_layer=3
        ),
        "forward loss_per_token": lambda run: run.model(
            run.tokens, return_type="loss", loss_per_token=True
        ),
        "loss_fn": lambda run: run.model.loss_fn(run.model(run.tokens), run.tokens_at_home),
        "generate": lambda run: run.model.generate(
            run.tokens_at_home, max_new_tokens=3, do_sample=False, stop_at_eos=False, verbose=False
        ),
        "generate without_kv_cache": lambda run: run.model.generate(
            run.tokens_at_home,
            max_new_tokens=3,
            do_sample=False,
            stop_at_eos=False,
            use_past_kv_cache=False,
            verbose=False,
        ),
        "generate text": lambda run: run.model.generate(
            TEXT, max_new_tokens=3, do_sample=False, verbose=False
        ),
        "generate_stream": lambda run: list(
            run.model.generate_stream(
                run.tokens_at_home,
                max_new_tokens=3,
                max_tokens_per_yield=1,
                do_sample=False,
                stop_at_eos=False,
                verbose=False,
            )
        ),
        "input_to_embed": lambda run: list(run.model.input_to_embed(run.tokens)),
        "run_with_cache": lambda run: [
            run.model.run_with_cache(run.tokens)[0],
            dict(run.model.run_with_cache(run.tokens)[1].items()),
        ],
        "run_with_cache names": lambda run: dict(
            run.model.run_with_cache(
                run.tokens, names_filter=lambda name: name.endswith("resid_post")
            )[1].items()
        ),
        "run_with_cache to_the_CPU": lambda run: {
            name: value.cpu()
            for name, value in run.model.run_with_cache(run.tokens, device="cpu")[1].items()
        },
        "run_with_cache as_a_dict": lambda run: dict(
            run.model.run_with_cache(run.tokens, return_cache_object=False)[1]
        ),
        "run_with_cache remove_batch_dim": lambda run: run.model.run_with_cache(
            run.tokens[:1], remove_batch_dim=True
        )[1].stack_head_results(apply_ln=True),
    },
)


@call("model.run_with_cache", "incl_bwd")
def run_with_gradients(run: Run) -> Any:
    model = run.changeable()
    cache = model.run_with_cache(run.tokens, return_type="loss", incl_bwd=True)[1]
    return dict(cache.items())


@call("model.run_with_cache", "one_optimiser_step")
def train_one_step(run: Run) -> Any:
    model = run.changeable()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(run.tokens, return_type="loss").backward()
    optimiser.step()
    return model(run.tokens)


# --------------------------------------------------------------------------------------------
# The model: hooks. What a hook takes from elsewhere is at home, as people have it.

HOOKS: dict[str, Callable[[Run, torch.Tensor], Any]] = {
    "add": lambda run, a: a + run.direction,
    "add_from_the_left": lambda run, a: run.direction + a,
    "add_in_place": lambda run, a: a.add_(run.direction),
    "index_fill": lambda run, a: a.index_fill(
        1, torch.tensor([1], device=run.model.cfg.device), 0.5
    ),
    "mask": lambda run, a: torch.where(run.direction > 0, a, run.direction),
    "project": lambda run, a: a - (a @ run.direction)[..., None] * run.direction,
    "einsum": lambda run, a: torch.einsum(
        "bpd,de->bpe", a, run.model.W_E[:16] @ run.model.W_E.T[:, :16]
    ),
    "stack": lambda run, a: torch.stack([a, run.direction.expand_as(a)]).mean(0),
    "matmul_with_W_U": lambda run, a: a + (a @ run.model.W_U) @ run.model.W_U.T,
    "scale_by_a_number": lambda run, a: a * run.direction.sum(),
    "replace": lambda run, a: run.direction.expand_as(a),
    "replace_at_positions": lambda run, a: torch.index_put(
        a, (torch.tensor([0], device=run.model.cfg.device),), run.direction
    ),
    "layer_norm": lambda run, a: torch.nn.functional.layer_norm(
        a, run.direction.shape, weight=run.direction
    ),
}
for _name, _hook in HOOKS.items():
    call("model.run_with_hooks", _name)(
        lambda run, hook=_hook: run.model.run_with_hooks(  # type: ignore[misc]
            run.tokens, fwd_hooks=[(RESID, functools.partial(_call_hook, run=run, change=hook))]
        )
    )


def _call_hook(activation: torch.Tensor, hook: Any, *, run: Run, change: Any) -> Any:
    return change(run, activation)


@call("model.run_with_hooks", "patch_from_a_cache")
def patch_from_cache(run: Run) -> Any:
    clean = run.model.run_with_cache(run.other_tokens)[1]
    names = [f"blocks.{layer}.hook_resid_mid" for layer in range(5)]
    if run.model.cfg.parallel_attn_mlp:
        names = [f"blocks.{layer}.hook_resid_post" for layer in range(5)]
    return [
        run.model.run_with_hooks(run.tokens, fwd_hooks=[(name, lambda a, hook: clean[hook.name])])
        for name in names
    ]


@call("model.run_with_hooks", "collect_at_home")
def collect(run: Run) -> Any:
    """A buffer at home gets something of every block."""
    norms = torch.zeros(5, *run.tokens.shape, device=run.model.cfg.device)

    def keep(activation: torch.Tensor, hook: Any) -> None:
        norms[hook.layer()] = activation.norm(dim=-1)

    def add(activation: torch.Tensor, hook: Any) -> None:
        norms[0] += activation.norm(dim=-1)

    run.model.run_with_hooks(
        run.tokens,
        fwd_hooks=[(lambda name: name.endswith("resid_post"), keep), (RESID, add)],
    )
    return norms


@call("model.run_with_hooks", "activation_of_an_earlier_block")
def use_earlier_block(run: Run) -> Any:
    seen: dict[str, torch.Tensor] = {}

    def keep(activation: torch.Tensor, hook: Any) -> None:
        seen["earlier"] = activation

    return run.model.run_with_hooks(
        run.tokens,
        fwd_hooks=[
            ("blocks.1.hook_resid_post", keep),
            (RESID, lambda a, hook: a + seen["earlier"]),
        ],
    )


@call("model.run_with_hooks", "gradient_to_a_vector_at_home")
def learn_steering_vector(run: Run) -> Any:
    vector = run.direction.clone().requires_grad_()
    loss = run.model.run_with_hooks(
        run.tokens, return_type="loss", fwd_hooks=[(RESID, lambda a, hook: a + vector)]
    )
    return torch.autograd.grad(loss, vector)[0]


@call("model.run_with_hooks", "backward_hook")
def change_gradients(run: Run) -> Any:
    def loss(model: Any) -> torch.Tensor:
        model.add_hook(RESID, lambda gradient, hook: (gradient * run.direction,), dir="bwd")
        return model(run.tokens, return_type="loss")

    return gradients_of(run, loss)


def hooked(run: Run, add: Callable[[Any], None]) -> Any:
    model = run.changeable()
    add(model)
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


@call("model.reset_hooks")
def reset(run: Run) -> Any:
    model = run.changeable()
    model.add_hook(RESID, steer(run))
    model.reset_hooks()
    return model(run.tokens)


@call("model.remove_all_hook_fns")
def remove_all(run: Run) -> Any:
    model = run.changeable()
    model.add_hook(RESID, steer(run))
    model.remove_all_hook_fns()
    return model(run.tokens)


calls(
    "model",
    {
        "add_hook": lambda run: hooked(run, lambda model: model.add_hook(RESID, steer(run))),
        "add_perma_hook": lambda run: hooked(
            run, lambda model: model.add_perma_hook(RESID, steer(run))
        ),
        "clear_contexts": lambda run: run.model.clear_contexts(),
        "hook_points": lambda run: [point.name for point in run.model.hook_points()],
        "list_hooks": lambda run: list(run.model.list_hooks()),
    },
)


def cached_by(add: str, *args: Any, **options: Any) -> Call:
    def run_cached(run: Run) -> Any:
        model = run.changeable()
        cache = getattr(model, add)(*args, **options)
        model(run.tokens)
        return dict(cache.items())

    return run_cached


call("model.add_caching_hooks")(cached_by("add_caching_hooks"))


@call("model.get_caching_hooks")
def caching_hooks(run: Run) -> Any:
    cache, forward_hooks, _ = run.model.get_caching_hooks(lambda name: "resid" in name)
    run.model.run_with_hooks(run.tokens, fwd_hooks=forward_hooks)
    return dict(cache.items())


@call("model.cache_all")
def cache_all(run: Run) -> Any:
    model = run.changeable()
    cache: dict[str, torch.Tensor] = {}
    model.cache_all(cache)
    model(run.tokens)
    return {name: value.cpu() for name, value in cache.items()}


@call("model.cache_some")
def cache_some(run: Run) -> Any:
    model = run.changeable()
    cache: dict[str, torch.Tensor] = {}
    model.cache_some(cache, lambda name: "resid" in name)
    model(run.tokens)
    return {name: value.cpu() for name, value in cache.items()}


def with_more_hooks(name: str, hook_name: str) -> Call:
    """A setting that adds hook points, with a hook on one of them."""

    def use_more_hooks(run: Run) -> Any:
        model = run.changeable()
        getattr(model, name)(True)
        logits = model.run_with_hooks(run.tokens, fwd_hooks=[(hook_name, lambda a, hook: a * 2)])
        return [logits, dict(model.run_with_cache(run.tokens)[1].items())]

    return use_more_hooks


for _name, _hook_name in {
    "set_use_attn_result": "blocks.4.attn.hook_result",
    "set_use_split_qkv_input": "blocks.4.hook_q_input",
    "set_use_hook_mlp_in": "blocks.4.hook_mlp_in",
    "set_use_attn_in": "blocks.4.hook_attn_in",
}.items():
    call(f"model.{_name}")(with_more_hooks(_name, _hook_name))

# --------------------------------------------------------------------------------------------
# The model: moving, and the tokenizer


def moved(move: Callable[[Any], Any]) -> Call:
    def run_moved(run: Run) -> Any:
        model = run.changeable()
        with contextlib.redirect_stdout(io.StringIO()):
            move(model)
        return model(run.tokens.to(model.cfg.device)).cpu()

    return run_moved


calls(
    "model",
    {
        "to device": moved(lambda model: model.to(model.cfg.device)),
        "to dtype": moved(lambda model: model.to(torch.float64)),
        "cpu": moved(lambda model: model.cpu()),
        "load_state_dict": moved(lambda model: model.load_state_dict(model.state_dict())),
        "to_tokens": lambda run: run.model.to_tokens([TEXT, OTHER_TEXT]),
        "to_string": lambda run: run.model.to_string(run.tokens_at_home),
        "to_str_tokens": lambda run: run.model.to_str_tokens(run.tokens_at_home[0]),
        "to_single_token": lambda run: run.model.to_single_token("w5"),
        "to_single_str_token": lambda run: run.model.to_single_str_token(5),
        "get_token_position": lambda run: run.model.get_token_position("w7", TEXT),
    },
)
