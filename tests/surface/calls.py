"""Calls of what HookedTransformer and TransformerBridge have in common; surface.py shows a row."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_lens.evals as evals
import transformer_lens.head_detector as head_detector
import transformer_lens.patching as patching
from surface import LAST, RESID, Run
from surface import table as table_of
from torch.utils.data import DataLoader
from transformer_lens import SVDInterpreter

table = functools.partial(table_of, [globals()])
TEXT, OTHER_TEXT = "w5 w7 w9 w5 w7 w11", "w6 w7 w8 w6 w7 w12"
FEW: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
GREEDY: dict[str, Any] = {**FEW, "stop_at_eos": False, "verbose": False}
NEURONS: dict[str, Any] = {"layer": -1, "pos_slice": -1, "neuron_slice": (0, 3)}
NEURONS |= {"apply_ln": True, "incl_remainder": True}


def twice(model: Any, tokens: torch.Tensor, *changes: Any) -> Any:
    """Return the logits of two forwards. `changes` were made as the arguments were evaluated."""
    return [model(tokens), model(tokens)]


def gradients(run: Run, loss: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """Return the gradients of a scalar by all parameters, moved to the CPU."""
    model = run.copy
    loss(model).backward()
    return {
        name: parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name not in run.frozen
    }


def cached(model: Any, tokens: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Return the activations of a `run_with_cache` with these options."""
    return dict(model.run_with_cache(tokens, **options)[1].items())


def filled(model: Any, tokens: torch.Tensor, activations: Any, *changes: Any) -> Any:
    """Return, on the CPU, the activations that hooks cache in a dict during a forward."""
    model(tokens)
    return {name: value.cpu() for name, value in activations.items()}


def with_more_hooks(model: Any, tokens: torch.Tensor, setting: str, point: str) -> Any:
    """Return results under a setting that adds hook points, with a hook on one of them."""
    getattr(model, setting)(True)
    hook = f"blocks.{LAST}.{point}", double
    return [model.run_with_hooks(tokens, fwd_hooks=[hook]), cached(model, tokens)]


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
"""Hooks' results from an activation, a vector from home, and weights of the model."""


def changed(model: Any, tokens: torch.Tensor, direction: torch.Tensor) -> Any:
    hooks = [lambda a, hook, change=change: change(a, direction, model) for change in CHANGES]
    return [model.run_with_hooks(tokens, fwd_hooks=[(RESID, hook)]) for hook in hooks]


def loss_under_backward_hook(model: Any, run: Run) -> torch.Tensor:
    model.add_hook(RESID, lambda gradient, hook: (gradient * run.direction,), dir="bwd")
    return model(run.tokens, return_type="loss")


def in_hooks(model: Any, steer: Any, call: Callable[[], Any]) -> Any:
    with model.hooks(fwd_hooks=[(RESID, steer)]):
        return call()


def caching_hooks(model: Any, tokens: torch.Tensor) -> Any:
    cache, forward_hooks, _ = model.get_caching_hooks(lambda name: "resid" in name)
    model.run_with_hooks(tokens, fwd_hooks=forward_hooks)
    return dict(cache.items())


OF_MODEL = table("""
W_E,W_pos,W_E_pos,W_U,b_U,QK,OV,W_Q,W_K,W_V,W_O,W_in,W_gate,W_out  model.NAME
b_Q,b_K,b_V,b_O,b_in,b_out,n_params_total  model.NAME
W_E,W_K,W_in,b_V gradient  gradients(run, lambda model: model.NAME.pow(2).sum())
OV gradient             gradients(run, lambda model: model.OV.AB.pow(2).sum())
accumulated_bias        list(map(model.accumulated_bias, range(6)))
                        model.accumulated_bias(3, mlp_input=True)
                        model.accumulated_bias(5, include_mlp_biases=False)
all_head_labels         getattr(model.all_head_labels, "__call__", lambda: model.all_head_labels)()
all_composition_scores  list(map(model.all_composition_scores, "QKV"))
tokens_to_residual_directions  list(map(model.tokens_to_residual_directions, ("w5", 5, at_home)))
clear_contexts          model.clear_contexts()
to_tokens               model.to_tokens([TEXT, OTHER_TEXT])
to_single_token         model.to_single_token("w5")
to_single_str_token     model.to_single_str_token(5)
to_string               model.to_string(at_home)
to_str_tokens           model.to_str_tokens(at_home[0])
get_token_position      model.get_token_position("w7", TEXT)
to device               copy.to(model.cfg.device)(at_home)
to dtype                copy.to(torch.float64)(at_home)
cpu                     copy.cpu()(tokens.cpu())
forward                 model(tokens), model(TEXT), model(tokens, return_type="both")
                        model(tokens, stop_at_layer=3)
                        model(model(tokens, stop_at_layer=3), start_at_layer=3)
                        model(tokens, return_type="loss", loss_per_token=True)
loss_fn                 model.loss_fn(model(tokens), at_home)
generate                model.generate(at_home, **GREEDY)
                        model.generate(at_home, use_past_kv_cache=False, **GREEDY)
                        model.generate(TEXT, verbose=False, **FEW)
generate under_a_hook   in_hooks(model, steer, lambda: model.generate(at_home, **GREEDY))
    in_hooks(model, steer, lambda: model.generate(at_home, use_past_kv_cache=False, **GREEDY))
generate_stream         list(model.generate_stream(at_home, max_tokens_per_yield=1, **GREEDY))
input_to_embed          model.input_to_embed(tokens)
run_with_cache          model.run_with_cache(tokens)
                        cached(model, tokens, names_filter=lambda name: name.endswith("resid_post"))
                        cached(model, tokens, return_cache_object=False)
                        cached(model, tokens, device="cpu")
                        cached(model, tokens, stop_at_layer=3)
                        cached(model, tokens, pos_slice=-1)
    model.run_with_cache(tokens[:1], remove_batch_dim=True)[1].stack_head_results(apply_ln=True)
run_with_cache incl_bwd  cached(copy, tokens, return_type="loss", incl_bwd=True)
run_with_hooks          changed(model, tokens, direction)
run_with_hooks backward_hook  gradients(run, lambda model: loss_under_backward_hook(model, run))
hooks                   in_hooks(model, steer, lambda: model(tokens)), model(tokens)
add_hook                twice(copy, tokens, copy.add_hook(RESID, steer))
add_perma_hook          twice(copy, tokens, copy.add_perma_hook(RESID, steer))
reset_hooks             twice(copy, tokens, copy.add_hook(RESID, steer), copy.reset_hooks())
remove_all_hook_fns     twice(copy, tokens, copy.add_hook(RESID, steer), copy.remove_all_hook_fns())
hook_points             [point.name for point in model.hook_points()]
list_hooks              list(model.list_hooks())
get_caching_hooks       caching_hooks(model, tokens)
add_caching_hooks       filled(copy, tokens, copy.add_caching_hooks())
cache_all               filled(copy, tokens, into := {}, copy.cache_all(into))
cache_some
    filled(copy, tokens, into := {}, copy.cache_some(into, lambda name: "resid" in name))
set_use_attn_result     with_more_hooks(copy, tokens, "set_use_attn_result", "attn.hook_result")
set_use_split_qkv_input  with_more_hooks(copy, tokens, "set_use_split_qkv_input", "hook_q_input")
set_use_hook_mlp_in     with_more_hooks(copy, tokens, "set_use_hook_mlp_in", "hook_mlp_in")
set_use_attn_in         with_more_hooks(copy, tokens, "set_use_attn_in", "hook_attn_in")
""")

# Results and parts of a model


def squeezed(cache: Any) -> Any:
    cache.remove_batch_dim()
    return [cache.accumulated_resid(), cache.stack_head_results(), cache["resid_post", 3]]


def toggle_autodiff(run: Run) -> Any:
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # which restores the mode
        run.cache.toggle_autodiff(mode=False)
        return [torch.is_grad_enabled(), run.model.W_Q.requires_grad]


def only(run: Run, *names: str) -> Any:
    return run.model.run_with_cache(run.tokens, names_filter=lambda name: name.endswith(names))[1]


def without_model(cache: Any) -> Any:
    cache.model = None
    return [cache.stack_activation("resid_post", layer=LAST), cache["blocks.3.hook_resid_post"]]


OF_CACHE = table("""
keys,values,items       cache.NAME()
__iter__                iter(cache)
__len__                 len(cache)
__getitem__             cache["resid_post", -1], cache["z", 3]
accumulated_resid       cache.accumulated_resid(incl_mid=True, apply_ln=True)
                        cache.accumulated_resid(3, mlp_input=True, pos_slice=-1)
accumulated_resid with_no_other_names_cached
    only(run, "resid_pre", "resid_post", "hook_scale").accumulated_resid(apply_ln=True)
accumulated_resid with_a_name_missing  only(run, "resid_pre").accumulated_resid()
decompose_resid         cache.decompose_resid(apply_ln=True)
                        cache.decompose_resid(4, mode="attn", return_labels=True)
stack_head_results      cache.stack_head_results(apply_ln=True, incl_remainder=True)
                        run.cache.stack_head_results(3, pos_slice=-1, return_labels=True)
get_neuron_results      cache.get_neuron_results(LAST, neuron_slice=(0, 3), pos_slice=-1)
stack_neuron_results    cache.stack_neuron_results(**NEURONS)
get_full_resid_decomposition
    cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1, return_labels=True)
    run.cache.get_full_resid_decomposition(3, expand_neurons=False)
stack_activation        cache.stack_activation("pattern")
stack_activation model_gone  without_model(cache)
compute_head_results    cache.compute_head_results(), cache["result", LAST]
apply_ln_to_stack       cache.apply_ln_to_stack(cache.decompose_resid())
    cache.apply_ln_to_stack(cache.decompose_resid(3, pos_slice=-1), layer=3, pos_slice=-1)
logit_attrs
    cache.logit_attrs(cache.accumulated_resid(pos_slice=-1), "w5", "w7", pos_slice=-1)
    cache.logit_attrs(cache.decompose_resid(pos_slice=-1), at_home[:, -1], pos_slice=-1)
apply_slice_to_batch_dim  cache.apply_slice_to_batch_dim(1).accumulated_resid()
to                      dict(cache_on_cpu.items())
                        cache_on_cpu["resid_post", -1], cache_on_cpu["z", 3]
                        cache_on_cpu.accumulated_resid(incl_mid=True, apply_ln=True)
                        cache_on_cpu.stack_head_results(apply_ln=True)
                        cache_on_cpu.stack_neuron_results(**NEURONS)
remove_batch_dim        squeezed(model.run_with_cache(tokens[:1])[1])
toggle_autodiff         toggle_autodiff(run)
""")
OF_MATRIX = table("""
AB,BA,S,T,ndim,pair     matrix.NAME
U,V,Vh                  matrix.NAME.abs()
collapse_l,collapse_r   matrix.NAME().abs()
norm                    matrix.norm()
unsqueeze               matrix.unsqueeze(0)
svd                     matrix.svd()[1], model.QK.svd()[1], model.QK.AB
eigenvalues             matrix.eigenvalues.abs().sort().values
__getitem__             matrix[2, 1], model.QK[2, 1]
get_corner              matrix[0, 0].get_corner()
make_even               matrix.make_even().A.abs()
__matmul__              (matrix[LAST] @ model.W_U).AB
__rmatmul__             (model.W_E @ model.QK[LAST] @ model.W_E.T).AB
__mul__                 (matrix * direction.sum()).AB
__rmul__                (direction.sum() * matrix).AB
""")


def singular_vectors(model: Any, kind: str, head: int | None = None) -> torch.Tensor:
    options = {"layer_index": LAST, "num_vectors": 2, "head_index": head}
    return SVDInterpreter(model).get_singular_vectors(kind, **options).abs()


def point(model: Any) -> Any:
    return model.hook_dict[RESID]


def double(activation: torch.Tensor, hook: Any) -> torch.Tensor:
    return activation * 2


OF_HOOK_POINT = table("""
has_hooks               point(model).has_hooks()
layer                   point(model).layer()
forward                 model.hook_dict["hook_embed"](direction)
add_hook                twice(copy, tokens, point(copy).add_hook(steer))
add_hook prepend
    twice(copy, tokens, point(copy).add_hook(steer), point(copy).add_hook(double, prepend=True))
add_perma_hook          twice(copy, tokens, point(copy).add_perma_hook(steer))
remove_hooks            twice(copy, tokens, point(copy).add_hook(steer), point(copy).remove_hooks())
clear_context           twice(copy, tokens, point(copy).clear_context())
""")

# Functions of a model


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]


ALIKE = (
    *("resid_mid", "mlp_out", "attn_head_q_by_pos", "attn_head_v_by_pos"),
    *("attn_head_out_all_pos", "attn_head_k_all_pos", "attn_head_v_all_pos"),
    *("block_every", "attn_head_all_pos_every", "attn_head_by_pos_every"),
)
"""Patches that do the same with another activation, or call others: `--full` runs them."""


def patch(run: Run, name: str, n_examples: int | None = 1, n: int = 2, **options: Any) -> Any:
    """Return the result of a function of `patching`; its clean run is of `other_tokens`."""
    if "attn_head" in name or name.endswith("every"):
        n = 1  # because each head and pair of positions costs a forward
    clean = run.model.run_with_cache(run.other_tokens[:n_examples, :n])[1]
    with torch.no_grad():
        corrupted = run.at_home[:n_examples, :n]
        return getattr(patching, name)(run.model, corrupted, clean, metric, **options)


GENERIC: dict[str, Any] = {"n_examples": None, "n": 3, "activation_name": "resid_post"}
GENERIC |= {"index_axis_names": ["layer", "pos"], "patch_setter": patching.layer_pos_patch_setter}


def lower(n: int, model: Any) -> torch.Tensor:
    """Return a pattern in which each token attends to itself and those before it."""
    return torch.tril(torch.ones(n, n, device=model.cfg.device))


def induction_loss(model: Any) -> Any:
    def small(low: int, high: int, size: Any) -> torch.Tensor:
        """Return tokens of the tiny vocabulary, because the draw is from a larger one."""
        return torch.arange(size[0] * size[1]).reshape(size) % 30 + 5

    with mock.patch.object(torch, "randint", small):
        return evals.induction_loss(model, batch_size=2, subseq_len=6, device=model.cfg.device)


detect = head_detector.detect_head


def batches(tokens: torch.Tensor) -> Any:
    return [{"tokens": row} for row in tokens]


def evaluate_on_dataset(model: Any, tokens: torch.Tensor) -> Any:
    loader: Any = DataLoader(batches(tokens), batch_size=1)
    return evals.evaluate_on_dataset(model, loader, device=model.cfg.device)


def ioi_eval(model: Any) -> Any:
    templates, names = ["w8 [A] w9 [B] w10 [A] w11 [B]"], ["w5", "w6", "w7"]
    nouns = {"[OBJECT]": ["w12"]}
    dataset = evals.IOIDataset(model.tokenizer, templates, names, nouns, num_samples=4)
    return evals.ioi_eval(model, dataset=dataset, batch_size=2)


def trained(run: Run, train: Any, config: Any) -> Any:
    """Return the logits after two epochs."""
    model = run.copy
    options = {"num_epochs": 2, "batch_size": 2, "optimizer_name": "SGD", "lr": 1e-2}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        config = config(**options, device=model.cfg.device)
        return train(model, config, batches(run.tokens))(run.tokens)


OF_PATCHING = table("""
resid_pre,attn_out,attn_head_out_by_pos,attn_head_k_by_pos  patch(run, "get_act_patch_NAME")
attn_head_q_all_pos,attn_head_pattern_by_pos                patch(run, "get_act_patch_NAME")
attn_head_pattern_dest_src_pos,attn_head_pattern_all_pos    patch(run, "get_act_patch_NAME")
resid_mid,mlp_out,attn_head_q_by_pos,attn_head_v_by_pos     patch(run, "get_act_patch_NAME")
attn_head_out_all_pos,attn_head_k_all_pos                   patch(run, "get_act_patch_NAME")
attn_head_v_all_pos,attn_head_all_pos_every                 patch(run, "get_act_patch_NAME")
block_every,attn_head_by_pos_every                          patch(run, "get_act_patch_NAME")
""")
OF_FUNCTIONS = table("""
patching.generic_activation_patch  patch(run, "generic_activation_patch", **GENERIC)
SVDInterpreter.get_singular_vectors
    singular_vectors(model, "OV", head=1)
    singular_vectors(model, "w_in"), singular_vectors(model, "w_out")
head_detector.detect_head  detect(model, TEXT, "induction_head")
    detect(model, TEXT, "previous_token_head", error_measure="abs")
    detect(model, TEXT, "duplicate_token_head", exclude_bos=True)
    detect(model, TEXT, lower(7, model))
evals.induction_loss       induction_loss(model)
evals.ioi_eval             ioi_eval(model)
evals.evaluate_on_dataset  evaluate_on_dataset(model, tokens)
""")
IN_COMMON = {f"ActivationCache.{name}": call for name, call in OF_CACHE.items()}
IN_COMMON |= {f"FactoredMatrix.{name}": call for name, call in OF_MATRIX.items()}
IN_COMMON |= {f"HookPoint.{name}": call for name, call in OF_HOOK_POINT.items()}
IN_COMMON |= {f"patching.get_act_patch_{name}": call for name, call in OF_PATCHING.items()}
IN_COMMON |= OF_FUNCTIONS


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
            rows.append(pytest.param(call, *place, marks=() if is_quick else pytest.mark.full))
    return rows


FETCH_DATA = {f"evals.{name}" for name in ("evaluate", "mmlu_eval", "sanity_check")}
ARE_FROZEN = "where weights are frozen: they cannot be changed and get no gradients"
STAY = "where weights keep their device and dtype"
