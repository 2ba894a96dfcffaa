"""One call of everything public in TransformerLens that a model's devices could matter to.

A call is written as for one device. It gets a `Run` and returns what is compared: tensors, or
anything made of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformer_lens.evals as evals
import transformer_lens.head_detector as head_detector
import transformer_lens.patching as patching
from torch.utils.data import DataLoader
from transformer_lens import ActivationCache, FactoredMatrix, HookedTransformer, SVDInterpreter
from transformer_lens.train import HookedTransformerTrainConfig

TEXT, OTHER_TEXT = "w5 w7 w9 w5 w7 w11", "w6 w7 w8 w6 w7 w12"
LAST = 4
"""A block that is never at home on several devices."""


@dataclass
class Run:
    """What a call has at hand: a model of its own kind and place, and tokens."""

    model: HookedTransformer
    tokens: torch.Tensor

    @property
    def other_tokens(self) -> torch.Tensor:
        return self.tokens.flip(1)

    @property
    def tokens_at_home(self) -> torch.Tensor:
        return self.tokens.to(self.model.cfg.device)

    @property
    def cache(self) -> ActivationCache:
        """All activations of `tokens`."""
        return self.model.run_with_cache(self.tokens)[1]

    @property
    def direction(self) -> torch.Tensor:
        """A vector of the residual stream, at home: what people add in hooks."""
        return torch.linspace(-1, 1, self.model.cfg.d_model, device=self.model.cfg.device)

    @property
    def matrix(self) -> FactoredMatrix:
        """The OV circuits of all heads."""
        return self.model.OV

    def changeable(self) -> HookedTransformer:
        """A copy of the model, to be changed."""
        return copy.deepcopy(self.model)


Call = Callable[[Run], Any]
CALLS: dict[str, dict[str, Call]] = {}
"""Public name -> what is called of it, by a word that tells the calls apart."""


def call(name: str, case: str = "") -> Callable[[Call], Call]:
    """Register a call of something public."""

    def register(function: Call) -> Call:
        CALLS.setdefault(name, {})[case] = function
        return function

    return register


def calls(prefix: str, functions: dict[str, Call]) -> None:
    """Register calls of things with a common prefix; "name case" is a case of a name."""
    for key, function in functions.items():
        name, _, case = key.partition(" ")
        call(f"{prefix}.{name}", case)(function)


def calls_of(name: str, functions: dict[str, Call]) -> None:
    """Register several cases of one name."""
    for case, function in functions.items():
        call(name, case)(function)


def results(value: Any) -> Any:
    """What a call returned, made of tensors, sequences and dicts."""
    if isinstance(value, FactoredMatrix):
        return [value.A, value.B]
    if isinstance(value, HookedTransformer):
        return dict(value.named_parameters())
    return value


# --------------------------------------------------------------------------------------------
# HookedTransformer: weights

for _name in (
    *("W_E", "W_pos", "W_E_pos", "W_U", "b_U", "QK", "OV"),
    *("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out"),
    *("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out"),
):
    call(f"HookedTransformer.{_name}")(lambda run, name=_name: results(getattr(run.model, name)))
    call(f"HookedTransformer.{_name}", "gradient")(
        lambda run, name=_name: gradients_of(run, lambda model: weight_sum(model, name))
    )


def weight_sum(model: HookedTransformer, name: str) -> torch.Tensor:
    value = getattr(model, name)
    return (value.AB if isinstance(value, FactoredMatrix) else value).pow(2).sum()


def gradients_of(run: Run, loss: Callable[[HookedTransformer], torch.Tensor]) -> dict[str, Any]:
    """The gradients of a scalar with respect to the model's parameters, moved to the CPU."""
    model = run.changeable()
    loss(model).backward()
    return {
        name: parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


calls(
    "HookedTransformer",
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
# HookedTransformer: running

calls(
    "HookedTransformer",
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
        "get_residual": lambda run: list(
            run.model.get_residual(run.model.embed(run.tokens_at_home), 0)
        ),
        "get_pos_offset": lambda run: run.model.get_pos_offset(None, 2),
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


@call("HookedTransformer.run_with_cache", "incl_bwd")
def run_with_gradients(run: Run) -> Any:
    model = run.changeable()
    cache = model.run_with_cache(run.tokens, return_type="loss", incl_bwd=True)[1]
    return dict(cache.items())


@call("HookedTransformer.run_with_cache", "one_optimiser_step")
def train_one_step(run: Run) -> Any:
    model = run.changeable()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(run.tokens, return_type="loss").backward()
    optimiser.step()
    return model(run.tokens)


# --------------------------------------------------------------------------------------------
# HookedTransformer: hooks. What a hook takes from elsewhere is at home, as people have it.

RESID = f"blocks.{LAST}.hook_resid_post"


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
    call("HookedTransformer.run_with_hooks", _name)(
        lambda run, hook=_hook: run.model.run_with_hooks(
            run.tokens, fwd_hooks=[(RESID, functools.partial(_call_hook, run=run, change=hook))]
        )
    )


def _call_hook(activation: torch.Tensor, hook: Any, *, run: Run, change: Any) -> Any:
    return change(run, activation)


@call("HookedTransformer.run_with_hooks", "patch_from_a_cache")
def patch_from_cache(run: Run) -> Any:
    clean = run.model.run_with_cache(run.other_tokens)[1]
    names = [f"blocks.{layer}.hook_resid_mid" for layer in range(5)]
    if run.model.cfg.parallel_attn_mlp:
        names = [f"blocks.{layer}.hook_resid_post" for layer in range(5)]
    return [
        run.model.run_with_hooks(run.tokens, fwd_hooks=[(name, lambda a, hook: clean[hook.name])])
        for name in names
    ]


@call("HookedTransformer.run_with_hooks", "collect_at_home")
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


@call("HookedTransformer.run_with_hooks", "activation_of_an_earlier_block")
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


@call("HookedTransformer.run_with_hooks", "gradient_to_a_vector_at_home")
def learn_steering_vector(run: Run) -> Any:
    vector = run.direction.clone().requires_grad_()
    loss = run.model.run_with_hooks(
        run.tokens, return_type="loss", fwd_hooks=[(RESID, lambda a, hook: a + vector)]
    )
    return torch.autograd.grad(loss, vector)[0]


@call("HookedTransformer.run_with_hooks", "backward_hook")
def change_gradients(run: Run) -> Any:
    def loss(model: HookedTransformer) -> torch.Tensor:
        model.add_hook(RESID, lambda gradient, hook: (gradient * run.direction,), dir="bwd")
        return model(run.tokens, return_type="loss")

    return gradients_of(run, loss)


def hooked(run: Run, add: Callable[[HookedTransformer], None]) -> Any:
    model = run.changeable()
    add(model)
    return [model(run.tokens), model(run.tokens)]


def steer(run: Run) -> Any:
    return lambda activation, hook: activation + run.direction


@call("HookedTransformer.hooks")
def hooks_in_a_context(run: Run) -> Any:
    with run.model.hooks(fwd_hooks=[(RESID, steer(run))]):
        inside = run.model(run.tokens)
    return [inside, run.model(run.tokens)]


@call("HookedTransformer.reset_hooks")
def reset(run: Run) -> Any:
    model = run.changeable()
    model.add_hook(RESID, steer(run))
    model.reset_hooks()
    return model(run.tokens)


@call("HookedTransformer.remove_all_hook_fns")
def remove_all(run: Run) -> Any:
    model = run.changeable()
    model.add_hook(RESID, steer(run))
    model.remove_all_hook_fns()
    return model(run.tokens)


@call("HookedTransformer.check_and_add_hook")
def check_and_add(run: Run) -> Any:
    return hooked(
        run,
        lambda model: model.check_and_add_hook(model.hook_dict[RESID], RESID, steer(run)),
    )


calls(
    "HookedTransformer",
    {
        "add_hook": lambda run: hooked(run, lambda model: model.add_hook(RESID, steer(run))),
        "add_perma_hook": lambda run: hooked(
            run, lambda model: model.add_perma_hook(RESID, steer(run))
        ),
        "check_hooks_to_add": lambda run: run.model.check_hooks_to_add(
            run.model.hook_dict[RESID], RESID, steer(run)
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


call("HookedTransformer.add_caching_hooks")(cached_by("add_caching_hooks"))


@call("HookedTransformer.get_caching_hooks")
def caching_hooks(run: Run) -> Any:
    cache, forward_hooks, _ = run.model.get_caching_hooks(lambda name: "resid" in name)
    run.model.run_with_hooks(run.tokens, fwd_hooks=forward_hooks)
    return dict(cache.items())


@call("HookedTransformer.cache_all")
def cache_all(run: Run) -> Any:
    model, cache = run.changeable(), {}
    model.cache_all(cache)
    model(run.tokens)
    return {name: value.cpu() for name, value in cache.items()}


@call("HookedTransformer.cache_some")
def cache_some(run: Run) -> Any:
    model, cache = run.changeable(), {}
    model.cache_some(cache, lambda name: "resid" in name)
    model(run.tokens)
    return {name: value.cpu() for name, value in cache.items()}


for _name, _hook_name in {
    "set_use_attn_result": "blocks.4.attn.hook_result",
    "set_use_split_qkv_input": "blocks.4.hook_q_input",
    "set_use_hook_mlp_in": "blocks.4.hook_mlp_in",
    "set_use_attn_in": "blocks.4.hook_attn_in",
    "set_ungroup_grouped_query_attention": "blocks.4.attn.hook_v",
}.items():

    @call(f"HookedTransformer.{_name}")
    def use_more_hooks(run: Run, name: str = _name, hook_name: str = _hook_name) -> Any:
        model = run.changeable()
        getattr(model, name)(True)
        logits = model.run_with_hooks(run.tokens, fwd_hooks=[(hook_name, lambda a, hook: a * 2)])
        return [logits, dict(model.run_with_cache(run.tokens)[1].items())]


# --------------------------------------------------------------------------------------------
# HookedTransformer: moving, and the tokenizer


def moved(move: Callable[[HookedTransformer], Any]) -> Call:
    def run_moved(run: Run) -> Any:
        model = run.changeable()
        with contextlib.redirect_stdout(io.StringIO()):
            move(model)
        return model(run.tokens).cpu()

    return run_moved


calls(
    "HookedTransformer",
    {
        "to device": moved(lambda model: model.to(model.cfg.device)),
        "to dtype": moved(lambda model: model.to(torch.float64)),
        "cpu": moved(lambda model: model.cpu()),
        "move_model_modules_to_device": moved(lambda model: model.move_model_modules_to_device()),
        "load_state_dict": moved(lambda model: model.load_state_dict(model.state_dict())),
        "setup": moved(lambda model: model.setup()),
        "set_tokenizer": moved(lambda model: model.set_tokenizer(model.tokenizer)),
        "to_tokens": lambda run: run.model.to_tokens([TEXT, OTHER_TEXT]),
        "to_string": lambda run: run.model.to_string(run.tokens_at_home),
        "to_str_tokens": lambda run: run.model.to_str_tokens(run.tokens_at_home[0]),
        "to_single_token": lambda run: run.model.to_single_token("w5"),
        "to_single_str_token": lambda run: run.model.to_single_str_token(5),
        "get_token_position": lambda run: run.model.get_token_position("w7", TEXT),
    },
)

# --------------------------------------------------------------------------------------------
# ActivationCache


def cases(cached: Callable[[Run], ActivationCache], word: str) -> dict[str, Call]:
    """The same calls on a cache, and on one that was moved to the CPU."""

    def per(function: Callable[[ActivationCache, Run], Any]) -> Call:
        return lambda run: function(cached(run), run)

    return {
        f"accumulated_resid {word}": per(
            lambda cache, run: cache.accumulated_resid(incl_mid=True, apply_ln=True)
        ),
        f"accumulated_resid layer_{word}": per(
            lambda cache, run: cache.accumulated_resid(3, mlp_input=True, pos_slice=-1)
        ),
        f"decompose_resid {word}": per(lambda cache, run: cache.decompose_resid(apply_ln=True)),
        f"decompose_resid attention_{word}": per(
            lambda cache, run: cache.decompose_resid(4, mode="attn", return_labels=True)
        ),
        f"compute_head_results {word}": per(
            lambda cache, run: [cache.compute_head_results(), cache["result", LAST]][1]
        ),
        f"stack_head_results {word}": per(
            lambda cache, run: cache.stack_head_results(apply_ln=True, incl_remainder=True)
        ),
        f"stack_head_results part_{word}": per(
            lambda cache, run: cache.stack_head_results(3, pos_slice=-1, return_labels=True)
        ),
        f"get_neuron_results {word}": per(
            lambda cache, run: cache.get_neuron_results(LAST, neuron_slice=(0, 3), pos_slice=-1)
        ),
        f"stack_neuron_results {word}": per(
            lambda cache, run: cache.stack_neuron_results(
                -1, pos_slice=-1, neuron_slice=(0, 3), apply_ln=True, incl_remainder=True
            )
        ),
        f"get_full_resid_decomposition {word}": per(
            lambda cache, run: cache.get_full_resid_decomposition(
                apply_ln=True, pos_slice=-1, return_labels=True
            )
        ),
        f"get_full_resid_decomposition heads_{word}": per(
            lambda cache, run: cache.get_full_resid_decomposition(3, expand_neurons=False)
        ),
        f"stack_activation {word}": per(lambda cache, run: cache.stack_activation("pattern")),
        f"apply_ln_to_stack {word}": per(
            lambda cache, run: cache.apply_ln_to_stack(cache.decompose_resid(), layer=-1)
        ),
        f"apply_ln_to_stack layer_{word}": per(
            lambda cache, run: cache.apply_ln_to_stack(
                cache.decompose_resid(3, pos_slice=-1), layer=3, pos_slice=-1
            )
        ),
        f"logit_attrs {word}": per(
            lambda cache, run: cache.logit_attrs(
                cache.accumulated_resid(apply_ln=False, pos_slice=-1),
                "w5",
                incorrect_tokens="w7",
                pos_slice=-1,
            )
        ),
        f"logit_attrs batch_{word}": per(
            lambda cache, run: cache.logit_attrs(
                cache.decompose_resid(pos_slice=-1), run.tokens_at_home[:, -1], pos_slice=-1
            )
        ),
        f"apply_slice_to_batch_dim {word}": per(
            lambda cache, run: cache.apply_slice_to_batch_dim(1).accumulated_resid()
        ),
        f"__getitem__ {word}": per(lambda cache, run: [cache["resid_post", -1], cache["z", 3]]),
        f"items {word}": per(lambda cache, run: dict(cache.items())),
        f"values {word}": per(lambda cache, run: list(cache.values())),
        f"keys {word}": per(lambda cache, run: list(cache.keys())),
        f"__iter__ {word}": per(lambda cache, run: list(cache)),
        f"__len__ {word}": per(lambda cache, run: len(cache)),
    }


calls("ActivationCache", cases(lambda run: run.cache, ""))
calls("ActivationCache", cases(lambda run: run.cache.to("cpu"), "moved_to_the_CPU"))


@call("ActivationCache.to")
def move_cache(run: Run) -> Any:
    cache = run.cache.to("cpu")
    return dict(cache.items())


def without_batch_dim(cache: ActivationCache) -> Any:
    cache.remove_batch_dim()
    return [cache.accumulated_resid(), cache.stack_head_results(), cache["resid_post", 3]]


calls_of(
    "ActivationCache.remove_batch_dim",
    {
        "": lambda run: without_batch_dim(run.model.run_with_cache(run.tokens[:1])[1]),
        "moved_to_the_CPU": lambda run: without_batch_dim(
            run.model.run_with_cache(run.tokens[:1])[1].to("cpu")
        ),
    },
)


@call("ActivationCache.toggle_autodiff")
def toggle_autodiff(run: Run) -> Any:
    was = torch.is_grad_enabled()
    try:
        run.cache.toggle_autodiff(mode=False)
        return [torch.is_grad_enabled(), run.model.W_Q.requires_grad]
    finally:
        torch.set_grad_enabled(was)


def only(run: Run, *names: str) -> ActivationCache:
    return run.model.run_with_cache(run.tokens, names_filter=lambda name: name.endswith(names))[1]


calls_of(
    "ActivationCache.accumulated_resid",
    {
        "with_no_other_names_cached": lambda run: only(
            run, "resid_pre", "resid_post", "ln_final.hook_scale"
        ).accumulated_resid(apply_ln=True),
        "with_a_name_missing": lambda run: only(run, "resid_pre").accumulated_resid(),
    },
)


@call("ActivationCache.stack_activation", "model_gone")
def model_gone(run: Run) -> Any:
    cache = run.cache
    cache.model = None
    return [cache.stack_activation("resid_post", layer=LAST), cache["blocks.3.hook_resid_post"]]


# --------------------------------------------------------------------------------------------
# FactoredMatrix and SVDInterpreter: what the model returns

calls(
    "FactoredMatrix",
    {
        "AB": lambda run: run.matrix.AB,
        "BA": lambda run: run.matrix.BA,
        "S": lambda run: run.matrix.S,
        "T": lambda run: results(run.matrix.T),
        "U": lambda run: run.matrix.U.abs(),
        "Vh": lambda run: run.matrix.Vh.abs(),
        "V": lambda run: run.matrix.V.abs(),
        "svd": lambda run: run.matrix.svd()[1],
        "eigenvalues": lambda run: run.matrix.eigenvalues.abs().sort().values,
        "norm": lambda run: run.matrix.norm(),
        "__getitem__": lambda run: results(run.matrix[2, 1]),
        "collapse_l": lambda run: run.matrix.collapse_l().abs(),
        "collapse_r": lambda run: run.matrix.collapse_r().abs(),
        "get_corner": lambda run: run.matrix[0, 0].get_corner(),
        "make_even": lambda run: results(run.matrix.make_even())[0].abs(),
        "ndim": lambda run: run.matrix.ndim,
        "pair": lambda run: run.matrix.pair,
        "unsqueeze": lambda run: results(run.matrix.unsqueeze(0)),
        "__getitem__ QK": lambda run: results(run.model.QK[2, 1]),
        "AB QK": lambda run: run.model.QK.AB,
        "svd QK": lambda run: run.model.QK.svd()[1],
        "__matmul__": lambda run: (run.matrix[LAST] @ run.model.W_U).AB,
        "__rmatmul__": lambda run: (run.model.W_E @ run.model.QK[LAST] @ run.model.W_E.T).AB,
        "__mul__": lambda run: (run.matrix * run.direction.sum()).AB,
        "__rmul__": lambda run: (run.direction.sum() * run.matrix).AB,
    },
)

for _kind, _head in (("OV", 1), ("w_in", None), ("w_out", None)):
    call("SVDInterpreter.get_singular_vectors", _kind)(
        lambda run, kind=_kind, head=_head: (
            SVDInterpreter(run.model)
            .get_singular_vectors(kind, layer_index=LAST, num_vectors=2, head_index=head)
            .abs()
        )
    )

# --------------------------------------------------------------------------------------------
# HookPoint


def at_hook_point(use: Callable[[Any, Run], Any]) -> Call:
    def run_it(run: Run) -> Any:
        model = run.changeable()
        use(model.hook_dict[RESID], run)
        return model(run.tokens)

    return run_it


calls(
    "HookPoint",
    {
        "add_hook": at_hook_point(lambda point, run: point.add_hook(steer(run))),
        "add_hook prepend": at_hook_point(
            lambda point, run: [
                point.add_hook(steer(run)),
                point.add_hook(lambda a, hook: a * 2, prepend=True),
            ]
        ),
        "add_perma_hook": at_hook_point(lambda point, run: point.add_perma_hook(steer(run))),
        "remove_hooks": at_hook_point(
            lambda point, run: [point.add_hook(steer(run)), point.remove_hooks()]
        ),
        "has_hooks": lambda run: run.model.hook_dict[RESID].has_hooks(),
        "layer": lambda run: run.model.hook_dict[RESID].layer(),
        "clear_context": at_hook_point(lambda point, run: point.clear_context()),
        "forward": lambda run: run.model.hook_dict["hook_embed"](run.direction),
    },
)

# --------------------------------------------------------------------------------------------
# patching, head_detector, evals, train


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]


PATCHES = [name for name in vars(patching) if name.startswith("get_act_patch")]


def patch_each(run: Run, name: str) -> Any:
    length = 1 if name.endswith("every") else 2  # a forward for each head and pair of positions
    with torch.no_grad():
        return getattr(patching, name)(
            run.model,
            run.tokens_at_home[:1, :length],
            run.model.run_with_cache(run.other_tokens[:1, :length])[1],
            metric,
        )


for _name in PATCHES:
    call(f"patching.{_name}")(functools.partial(patch_each, name=_name))


@call("patching.generic_activation_patch")
def patch_generically(run: Run) -> Any:
    clean = run.model.run_with_cache(run.other_tokens[:, :3])[1]
    return patching.generic_activation_patch(
        run.model,
        run.tokens_at_home[:, :3],
        clean,
        metric,
        patching.layer_pos_patch_setter,
        "resid_post",
        index_axis_names=["layer", "pos"],
    )


def detect(pattern: Any, **options: Any) -> Call:
    return lambda run: head_detector.detect_head(
        run.model, TEXT, pattern if isinstance(pattern, str) else pattern(run), **options
    )


calls(
    "head_detector",
    {
        "detect_head induction": detect("induction_head"),
        "detect_head previous": detect("previous_token_head", error_measure="abs"),
        "detect_head duplicate": detect("duplicate_token_head", exclude_bos=True),
        "detect_head pattern": detect(
            lambda run: torch.tril(torch.ones(7, 7, device=run.model.cfg.device))
        ),
        "compute_head_attention_similarity_score": lambda run: (
            head_detector.compute_head_attention_similarity_score(
                run.cache["pattern", LAST][0, 1],
                torch.tril(torch.ones(9, 9, device=run.model.cfg.device)),
                exclude_bos=False,
                exclude_current_token=False,
                error_measure="abs",
            )
        ),
        "get_previous_token_head_detection_pattern": lambda run: (
            head_detector.get_previous_token_head_detection_pattern(run.tokens[:1]).cpu()
        ),
        "get_duplicate_token_head_detection_pattern": lambda run: (
            head_detector.get_duplicate_token_head_detection_pattern(run.tokens[:1]).cpu()
        ),
        "get_induction_head_detection_pattern": lambda run: (
            head_detector.get_induction_head_detection_pattern(run.tokens[:1]).cpu()
        ),
    },
)


@call("evals.induction_loss")
def induction_loss(run: Run) -> Any:
    def small(low: int, high: int, size: Any) -> torch.Tensor:
        """The draw is from a vocabulary larger than a toy's."""
        return torch.arange(size[0] * size[1]).reshape(size) % 30 + 5

    with mock.patch.object(torch, "randint", small):
        return evals.induction_loss(
            run.model, batch_size=2, subseq_len=6, device=run.model.cfg.device
        )


@call("evals.evaluate_on_dataset")
def evaluate_on_dataset(run: Run) -> Any:
    loader = DataLoader([{"tokens": each} for each in run.tokens], batch_size=1)
    return evals.evaluate_on_dataset(run.model, loader, device=run.model.cfg.device)


@call("evals.ioi_eval")
def ioi_eval(run: Run) -> Any:
    dataset = evals.IOIDataset(
        run.model.tokenizer,
        templates=["w8 [A] w9 [B] w10 [A] w11 [B]"],
        names=["w5", "w6", "w7"],
        nouns={"[OBJECT]": ["w12"]},
        num_samples=4,
    )
    return evals.ioi_eval(run.model, dataset=dataset, batch_size=2)


@call("train.train")
def train(run: Run) -> Any:
    from transformer_lens.train import train  # patched when tl_devicefix is

    model = run.changeable()
    dataset = [{"tokens": each} for each in run.tokens]
    config = HookedTransformerTrainConfig(
        num_epochs=2, batch_size=2, optimizer_name="SGD", lr=1e-2, device=model.cfg.device
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        return train(model, config, dataset)(run.tokens)


# --------------------------------------------------------------------------------------------

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        (
            f"HookedTransformer.{name}"
            for name in ("from_pretrained", "from_pretrained_no_processing")
        ),
        "tests/parity/test_from_pretrained.py",
    ),
    **dict.fromkeys(
        (
            f"HookedTransformer.{name}"
            for name in (
                *("load_and_process_state_dict", "process_weights_", "fill_missing_keys"),
                *("fold_layer_norm", "fold_value_biases", "center_unembed"),
                *("center_writing_weights", "refactor_factored_attn_matrices"),
            )
        ),
        "tests/parity/test_weight_processing.py",
    ),
    "HookedTransformer.init_weights": "draws anew, so there is nothing to compare with",
    "HookedTransformer.cuda": "needs CUDA devices",
    "HookedTransformer.mps": "needs Apple's devices",
    "HookedTransformer.load_sample_training_dataset": "fetches a data set",
    "HookedTransformer.sample_datapoint": "fetches a data set",
    "HookPoint.enable_reshape": "TransformerBridge's: it converts what hooks see there",
    **dict.fromkeys(
        (
            f"ActivationCache.{name}"
            for name in ("ssm_layers", "compute_ssm_state", "compute_ssm_effective_attention")
        ),
        "TransformerBridge's: HookedTransformer has no state-space layers",
    ),
    **dict.fromkeys(
        (
            f"patching.{name}"
            for name in (
                "layer_pos_patch_setter",
                "layer_pos_head_vector_patch_setter",
                "layer_head_vector_patch_setter",
                "layer_head_pattern_patch_setter",
                "layer_head_pos_pattern_patch_setter",
                "layer_head_dest_src_pos_pattern_patch_setter",
            )
        ),
        "called by the get_act_patch functions",
    ),
    "patching.make_df_from_ranges": "no tensors",
    "head_detector.get_supported_heads": "no tensors",
    **dict.fromkeys(
        (
            f"evals.{name}"
            for name in (
                *("make_wiki_data_loader", "make_owt_data_loader", "make_pile_data_loader"),
                *("make_code_data_loader", "make_mmlu_data_loader", "mmlu_eval", "evaluate"),
                "sanity_check",
            )
        ),
        "fetches a data set",
    ),
    "evals.IOIDataset": "no model; used by ioi_eval",
    "train.HookedTransformerTrainConfig": "a config; used by train",
}
"""What the sweep does not call, and why."""

WITHOUT_DEVICES = frozenset(
    {
        *(
            f"HookedTransformer.{name}"
            for name in (
                *("W_E", "W_pos", "W_E_pos", "W_U", "b_U", "tokens_to_residual_directions"),
                *("all_head_labels", "n_params_total", "get_pos_offset", "get_token_position"),
                *("hook_points", "list_hooks", "check_hooks_to_add", "clear_contexts", "cpu"),
                *("to_tokens", "to_string", "to_str_tokens", "to_single_token"),
                "to_single_str_token",
            )
        ),
        *(
            f"head_detector.get_{kind}_token_head_detection_pattern"
            for kind in ("previous", "duplicate")
        ),
        "head_detector.get_induction_head_detection_pattern",
        *(f"HookPoint.{name}" for name in ("layer", "has_hooks", "forward")),
    }
)
"""What holds without tl_devicefix too, as it reads the embeddings, or no weights at all."""

NEW_IN_3 = frozenset(
    {
        "HookedTransformer.generate_stream",
        "HookedTransformer.list_hooks",
        "HookedTransformer.n_params_total",
        "FactoredMatrix.V",
        "HookPoint.has_hooks",
    }
)
"""What is compared, and not in TransformerLens 2.18.0."""
