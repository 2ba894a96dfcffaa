"""Calls of what HookedTransformer and TransformerBridge have in common: "name", or "name case"."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_lens.evals as evals
import transformer_lens.head_detector as head_detector
import transformer_lens.patching as patching
from surface import LAST, Call, Run
from torch.utils.data import DataLoader
from transformer_lens import ActivationCache, FactoredMatrix, SVDInterpreter

TEXT, OTHER_TEXT = "w5 w7 w9 w5 w7 w11", "w6 w7 w8 w6 w7 w12"
RESID = f"blocks.{LAST}.hook_resid_post"
FEW: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
GREEDY: dict[str, Any] = {**FEW, "stop_at_eos": False, "verbose": False}


def attributes(of: str, *names: str) -> dict[str, Call]:
    """Calls that read attributes of what a `Run` has as `of`."""
    return {name: lambda run, name=name: getattr(getattr(run, of), name) for name in names}


def gradients_of(run: Run, loss: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """The gradients of a scalar with respect to the model's parameters, moved to the CPU."""
    model = run.changeable()
    loss(model).backward()
    return {
        name: parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name not in run.frozen
    }


# The model


def weight_gradients(name: str) -> Call:
    def weight_sum(model: Any) -> torch.Tensor:
        value = getattr(model, name)
        return (value.AB if isinstance(value, FactoredMatrix) else value).pow(2).sum()

    return lambda run: gradients_of(run, weight_sum)


def head_labels(model: Any) -> list[str]:
    labels = model.all_head_labels
    return labels if isinstance(labels, list) else labels()


def forwards(model: Any, tokens: torch.Tensor) -> Any:
    half = model(tokens, stop_at_layer=3)
    return [
        *(model(tokens), model(TEXT), model(tokens, return_type="both")),
        *(half, model(half, start_at_layer=3)),
        model(tokens, return_type="loss", loss_per_token=True),
    ]


def caches(model: Any, tokens: torch.Tensor) -> Any:
    """What `run_with_cache` caches."""
    options: list[dict[str, Any]] = [
        {"names_filter": lambda name: name.endswith("resid_post")},
        *({"return_cache_object": False}, {"device": "cpu"}),
        *({"stop_at_layer": 3}, {"pos_slice": -1}),
    ]
    _, of_one = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    return [
        model.run_with_cache(tokens),
        *(dict(model.run_with_cache(tokens, **each)[1].items()) for each in options),
        of_one.stack_head_results(apply_ln=True),
    ]


def run_with_gradients(run: Run) -> Any:
    model = run.changeable()
    return dict(model.run_with_cache(run.tokens, return_type="loss", incl_bwd=True)[1].items())


def steer(run: Run) -> Any:
    """A hook that adds a vector from home, as people have it."""
    return lambda activation, hook: activation + run.direction


CHANGES: tuple[Callable[..., torch.Tensor], ...] = (
    lambda a, direction, _: a + direction,
    lambda a, direction, _: a.add_(direction),
    lambda a, _, model: torch.einsum("bpd,de->bpe", a, model.W_E[:16] @ model.W_E.T[:, :16]),
    lambda a, direction, _: torch.stack([a, direction.expand_as(a)]).mean(0),
    lambda a, _, model: a + (a @ model.W_U) @ model.W_U.T,
    lambda a, direction, _: torch.index_put(
        a, (torch.tensor([0], device=direction.device),), direction
    ),
    lambda a, direction, _: torch.nn.functional.layer_norm(a, direction.shape, weight=direction),
)
"""What hooks make of an activation, a vector from home, and weights of the model."""


def changed_activations(run: Run) -> Any:
    return [
        run.model.run_with_hooks(
            run.tokens,
            fwd_hooks=[(RESID, lambda a, hook, change=change: change(a, run.direction, run.model))],
        )
        for change in CHANGES
    ]


def change_gradients(run: Run) -> Any:
    def loss(model: Any) -> torch.Tensor:
        model.add_hook(RESID, lambda gradient, hook: (gradient * run.direction,), dir="bwd")
        return model(run.tokens, return_type="loss")

    return gradients_of(run, loss)


def hooked(run: Run, *changes: Callable[[Any], Any]) -> Any:
    """The logits of two forwards of a copy that was changed."""
    model = run.changeable()
    for change in changes:
        change(model)
    return [model(run.tokens), model(run.tokens)]


def hooks_in_a_context(run: Run) -> Any:
    with run.model.hooks(fwd_hooks=[(RESID, steer(run))]):
        inside = run.model(run.tokens)
    return [inside, run.model(run.tokens)]


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


def caching_hooks(run: Run) -> Any:
    cache, forward_hooks, _ = run.model.get_caching_hooks(lambda name: "resid" in name)
    run.model.run_with_hooks(run.tokens, fwd_hooks=forward_hooks)
    return dict(cache.items())


def with_more_hooks(setting: str, hook_name: str) -> Call:
    """A setting that adds hook points, with a hook on one of them."""

    def call(run: Run) -> Any:
        model = run.changeable()
        getattr(model, setting)(True)
        logits = model.run_with_hooks(run.tokens, fwd_hooks=[(hook_name, lambda a, hook: a * 2)])
        return [logits, dict(model.run_with_cache(run.tokens)[1].items())]

    return call


def moved(move: Callable[[Any], Any]) -> Call:
    """The logits of a copy that `move` has moved."""

    def call(run: Run) -> Any:
        model = run.changeable()
        with contextlib.redirect_stdout(io.StringIO()):
            move(model)
        return model(run.tokens.to(model.cfg.device)).cpu()

    return call


OF_MODEL: dict[str, Call] = {
    **attributes(
        "model",
        *("W_E", "W_pos", "W_E_pos", "W_U", "b_U", "QK", "OV"),
        *("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out"),
        *("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out", "n_params_total"),
    ),
    **{f"{name} gradient": weight_gradients(name) for name in ("W_E", "W_K", "W_in", "b_V", "OV")},
    "accumulated_bias": lambda model: [
        *(model.accumulated_bias(layer) for layer in range(6)),
        model.accumulated_bias(3, mlp_input=True),
        model.accumulated_bias(5, include_mlp_biases=False),
    ],
    "all_head_labels": head_labels,
    "all_composition_scores": lambda model: [model.all_composition_scores(m) for m in "QKV"],
    "tokens_to_residual_directions": lambda model, at_home: [
        model.tokens_to_residual_directions(of) for of in ("w5", 5, at_home)
    ],
    "clear_contexts": lambda model: model.clear_contexts(),
    "to_tokens": lambda model: model.to_tokens([TEXT, OTHER_TEXT]),
    "to_single_token": lambda model: model.to_single_token("w5"),
    "to_single_str_token": lambda model: model.to_single_str_token(5),
    "to_string": lambda model, at_home: model.to_string(at_home),
    "to_str_tokens": lambda model, at_home: model.to_str_tokens(at_home[0]),
    "get_token_position": lambda model: model.get_token_position("w7", TEXT),
    "to device": moved(lambda model: model.to(model.cfg.device)),
    "to dtype": moved(lambda model: model.to(torch.float64)),
    "cpu": moved(lambda model: model.cpu()),
    "forward": forwards,
    "loss_fn": lambda model, tokens, at_home: model.loss_fn(model(tokens), at_home),
    "generate": lambda model, at_home: [
        model.generate(at_home, **GREEDY),
        model.generate(at_home, use_past_kv_cache=False, **GREEDY),
        model.generate(TEXT, **{**GREEDY, "stop_at_eos": True}),
    ],
    "generate under_a_hook": generate_under_a_hook,
    "generate_stream": lambda model, at_home: list(
        model.generate_stream(at_home, max_tokens_per_yield=1, **GREEDY)
    ),
    "input_to_embed": lambda model, tokens: model.input_to_embed(tokens),
    "run_with_cache": caches,
    "run_with_cache incl_bwd": run_with_gradients,
    "run_with_hooks backward_hook": change_gradients,
    "run_with_hooks": changed_activations,
    "hooks": hooks_in_a_context,
    "add_hook": lambda run: hooked(run, lambda model: model.add_hook(RESID, steer(run))),
    "add_perma_hook": lambda run: hooked(
        run, lambda model: model.add_perma_hook(RESID, steer(run))
    ),
    "reset_hooks": lambda run: hooked(
        run, lambda model: model.add_hook(RESID, steer(run)), lambda model: model.reset_hooks()
    ),
    "remove_all_hook_fns": lambda run: hooked(
        run,
        lambda model: model.add_hook(RESID, steer(run)),
        lambda model: model.remove_all_hook_fns(),
    ),
    "hook_points": lambda model: [point.name for point in model.hook_points()],
    "list_hooks": lambda model: list(model.list_hooks()),
    "get_caching_hooks": caching_hooks,
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
}

# What a model returns, or is made of

OF_THREE_NEURONS: dict[str, Any] = {
    "layer": -1,
    "pos_slice": -1,
    "neuron_slice": (0, 3),
    "apply_ln": True,
    "incl_remainder": True,
}


def squeezed(cache: ActivationCache) -> Any:
    cache.remove_batch_dim()
    return [cache.accumulated_resid(), cache.stack_head_results(), cache["resid_post", 3]]


def toggle_autodiff(run: Run) -> Any:
    was = torch.is_grad_enabled()
    try:
        run.cache.toggle_autodiff(mode=False)
        return [torch.is_grad_enabled(), run.model.W_Q.requires_grad]
    finally:
        torch.set_grad_enabled(was)


def only(run: Run, *names: str) -> ActivationCache:
    return run.model.run_with_cache(run.tokens, names_filter=lambda name: name.endswith(names))[1]


def model_gone(cache: ActivationCache) -> Any:
    cache.model = None
    return [cache.stack_activation("resid_post", layer=LAST), cache["blocks.3.hook_resid_post"]]


OF_CACHE: dict[str, Call] = {
    "accumulated_resid": lambda cache: [
        cache.accumulated_resid(incl_mid=True, apply_ln=True),
        cache.accumulated_resid(3, mlp_input=True, pos_slice=-1),
    ],
    "accumulated_resid with_no_other_names_cached": lambda run: only(
        run, "resid_pre", "resid_post", "hook_scale"
    ).accumulated_resid(apply_ln=True),
    "accumulated_resid with_a_name_missing": lambda run: only(run, "resid_pre").accumulated_resid(),
    "decompose_resid": lambda cache: [
        cache.decompose_resid(apply_ln=True),
        cache.decompose_resid(4, mode="attn", return_labels=True),
    ],
    "stack_head_results": lambda run: [
        run.cache.stack_head_results(apply_ln=True, incl_remainder=True),
        run.cache.stack_head_results(3, pos_slice=-1, return_labels=True),
    ],
    "get_neuron_results": lambda cache: cache.get_neuron_results(
        LAST, neuron_slice=(0, 3), pos_slice=-1
    ),
    "stack_neuron_results": lambda cache: cache.stack_neuron_results(**OF_THREE_NEURONS),
    "get_full_resid_decomposition": lambda run: [
        run.cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1, return_labels=True),
        run.cache.get_full_resid_decomposition(3, expand_neurons=False),
    ],
    "stack_activation": lambda cache: cache.stack_activation("pattern"),
    "stack_activation model_gone": model_gone,
    "items": lambda cache: cache.items(),
    "values": lambda cache: cache.values(),
    "keys": lambda cache: cache.keys(),
    "__iter__": lambda cache: iter(cache),
    "__len__": lambda cache: len(cache),
    "__getitem__": lambda cache: [cache["resid_post", -1], cache["z", 3]],
    "compute_head_results": lambda cache: [cache.compute_head_results(), cache["result", LAST]],
    "apply_ln_to_stack": lambda cache: [
        cache.apply_ln_to_stack(cache.decompose_resid()),
        cache.apply_ln_to_stack(cache.decompose_resid(3, pos_slice=-1), layer=3, pos_slice=-1),
    ],
    "logit_attrs": lambda at_home, cache: [
        cache.logit_attrs(
            cache.accumulated_resid(pos_slice=-1), "w5", incorrect_tokens="w7", pos_slice=-1
        ),
        cache.logit_attrs(cache.decompose_resid(pos_slice=-1), at_home[:, -1], pos_slice=-1),
    ],
    "apply_slice_to_batch_dim": lambda cache: cache.apply_slice_to_batch_dim(1).accumulated_resid(),
    "to": lambda cache_on_cpu: [
        *(dict(cache_on_cpu.items()), cache_on_cpu["resid_post", -1], cache_on_cpu["z", 3]),
        cache_on_cpu.accumulated_resid(incl_mid=True, apply_ln=True),
        cache_on_cpu.stack_head_results(apply_ln=True),
        cache_on_cpu.stack_neuron_results(**OF_THREE_NEURONS),
    ],
    "remove_batch_dim": lambda model, tokens: squeezed(model.run_with_cache(tokens[:1])[1]),
    "toggle_autodiff": toggle_autodiff,
}
OF_MATRIX: dict[str, Call] = {
    **attributes("matrix", "AB", "BA", "S", "T", "ndim", "pair"),
    "norm": lambda matrix: matrix.norm(),
    "unsqueeze": lambda matrix: matrix.unsqueeze(0),
    "U": lambda matrix: matrix.U.abs(),
    "Vh": lambda matrix: matrix.Vh.abs(),
    "V": lambda matrix: matrix.V.abs(),
    "svd": lambda model, matrix: [matrix.svd()[1], model.QK.svd()[1], model.QK.AB],
    "eigenvalues": lambda matrix: matrix.eigenvalues.abs().sort().values,
    "__getitem__": lambda model, matrix: [matrix[2, 1], model.QK[2, 1]],
    "collapse_l": lambda matrix: matrix.collapse_l().abs(),
    "collapse_r": lambda matrix: matrix.collapse_r().abs(),
    "get_corner": lambda matrix: matrix[0, 0].get_corner(),
    "make_even": lambda matrix: matrix.make_even().A.abs(),
    "__matmul__": lambda model, matrix: (matrix[LAST] @ model.W_U).AB,
    "__rmatmul__": lambda model: (model.W_E @ model.QK[LAST] @ model.W_E.T).AB,
    "__mul__": lambda direction, matrix: (matrix * direction.sum()).AB,
    "__rmul__": lambda direction, matrix: (direction.sum() * matrix).AB,
}


def singular_vectors(model: Any, kind: str, head: int | None = None) -> torch.Tensor:
    options = {"layer_index": LAST, "num_vectors": 2, "head_index": head}
    return SVDInterpreter(model).get_singular_vectors(kind, **options).abs()


def at_hook_point(use: Callable[[Any, Run], Any]) -> Call:
    """The logits of a copy after a call of one of its hook points."""

    def call(run: Run) -> Any:
        model = run.changeable()
        use(model.hook_dict[RESID], run)
        return model(run.tokens)

    return call


OF_HOOK_POINT: dict[str, Call] = {
    "has_hooks": lambda model: model.hook_dict[RESID].has_hooks(),
    "layer": lambda model: model.hook_dict[RESID].layer(),
    "forward": lambda model, direction: model.hook_dict["hook_embed"](direction),
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
    "clear_context": at_hook_point(lambda point, run: point.clear_context()),
}

# Functions of a model


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]


PATCHES = (
    *("resid_pre", "attn_out", "attn_head_out_by_pos", "attn_head_k_by_pos"),
    *("attn_head_q_all_pos", "attn_head_pattern_by_pos", "attn_head_pattern_dest_src_pos"),
    "attn_head_pattern_all_pos",
)
ALIKE = (
    *("resid_mid", "mlp_out", "attn_head_q_by_pos", "attn_head_v_by_pos"),
    *("attn_head_out_all_pos", "attn_head_k_all_pos", "attn_head_v_all_pos"),
    *("block_every", "attn_head_all_pos_every", "attn_head_by_pos_every"),
)
"""Those that do the same with another activation, or call others: `--full` runs them."""


def patch_each(run: Run, name: str) -> Any:
    # A forward for each head and pair of positions.
    length = 1 if "attn_head" in name or name.endswith("every") else 2
    clean = run.model.run_with_cache(run.other_tokens[:1, :length])[1]
    with torch.no_grad():
        return getattr(patching, name)(run.model, run.at_home[:1, :length], clean, metric)


def patch_generically(run: Run) -> Any:
    clean = run.model.run_with_cache(run.other_tokens[:, :3])[1]
    return patching.generic_activation_patch(
        run.model,
        run.at_home[:, :3],
        clean,
        metric,
        patching.layer_pos_patch_setter,
        "resid_post",
        index_axis_names=["layer", "pos"],
    )


def detect(model: Any, pattern: Any, **options: Any) -> Any:
    return head_detector.detect_head(model, TEXT, pattern, **options)


def lower(n: int, model: Any) -> torch.Tensor:
    """A pattern in which each token attends to those before it and itself."""
    return torch.tril(torch.ones(n, n, device=model.cfg.device))


def induction_loss(model: Any) -> Any:
    def small(low: int, high: int, size: Any) -> torch.Tensor:
        """The draw is from a vocabulary larger than a toy's."""
        return torch.arange(size[0] * size[1]).reshape(size) % 30 + 5

    with mock.patch.object(torch, "randint", small):
        return evals.induction_loss(model, batch_size=2, subseq_len=6, device=model.cfg.device)


def evaluate_on_dataset(run: Run) -> Any:
    loader: Any = DataLoader([{"tokens": row} for row in run.tokens], batch_size=1)  # type: ignore[arg-type]
    return evals.evaluate_on_dataset(run.model, loader, device=run.model.cfg.device)


def ioi_eval(model: Any) -> Any:
    dataset = evals.IOIDataset(
        model.tokenizer,
        templates=["w8 [A] w9 [B] w10 [A] w11 [B]"],
        names=["w5", "w6", "w7"],
        nouns={"[OBJECT]": ["w12"]},
        num_samples=4,
    )
    return evals.ioi_eval(model, dataset=dataset, batch_size=2)


def trained(run: Run, train: Any, config: Any) -> Any:
    """The logits after two epochs."""
    model, batches = run.changeable(), [{"tokens": row} for row in run.tokens]
    options = {"num_epochs": 2, "batch_size": 2, "optimizer_name": "SGD", "lr": 1e-2}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        return train(model, config(**options, device=model.cfg.device), batches)(run.tokens)


IN_COMMON: dict[str, Call] = {
    **{f"ActivationCache.{name}": call for name, call in OF_CACHE.items()},
    **{f"FactoredMatrix.{name}": call for name, call in OF_MATRIX.items()},
    **{f"HookPoint.{name}": call for name, call in OF_HOOK_POINT.items()},
    "SVDInterpreter.get_singular_vectors": lambda model: [
        singular_vectors(model, "OV", head=1),
        *(singular_vectors(model, kind) for kind in ("w_in", "w_out")),
    ],
    **{
        f"patching.get_act_patch_{name}": lambda run, name=name: patch_each(
            run, f"get_act_patch_{name}"
        )
        for name in (*PATCHES, *ALIKE)
    },
    "patching.generic_activation_patch": patch_generically,
    "head_detector.detect_head": lambda model: [
        detect(model, "induction_head"),
        detect(model, "previous_token_head", error_measure="abs"),
        detect(model, "duplicate_token_head", exclude_bos=True),
        detect(model, lower(7, model)),
    ],
    "evals.induction_loss": induction_loss,
    "evals.evaluate_on_dataset": evaluate_on_dataset,
    "evals.ioi_eval": ioi_eval,
}


def each_somewhere(
    calls: Collection[str], public: set[str], places_of: Callable[[str], list[tuple[str, int]]]
) -> list[Any]:
    """Return rows of a call, a kind of model and a number of devices: each call at one place.

    With `--full`, each call is at all of its places.
    """
    rows = []
    for i, call in enumerate(call for call in calls if call.split()[0] in public):
        places = places_of(call)
        for place in places:
            is_quick = place == places[i % len(places)] and not call.endswith(ALIKE)
            marks = () if is_quick else pytest.mark.full
            rows.append(pytest.param(call, *place, marks=marks))
    return rows


FETCH_DATA = {f"evals.{name}" for name in ("evaluate", "mmlu_eval", "sanity_check")}
ARE_FROZEN = "where weights are frozen: they cannot be changed and get no gradients"
STAY = "where weights keep their device and dtype"
