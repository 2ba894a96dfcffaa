"""Calls of what a model returns: ActivationCache, FactoredMatrix, SVDInterpreter, HookPoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from registry import LAST, RESID, Call, Calls, Run, arguments, steer
from transformer_lens import ActivationCache, SVDInterpreter

CALLS = Calls()
call = CALLS.call

# --------------------------------------------------------------------------------------------
# ActivationCache

OF_THREE_NEURONS: dict[str, Any] = {
    "layer": -1,
    "pos_slice": -1,
    "neuron_slice": (0, 3),
    "apply_ln": True,
    "incl_remainder": True,
}

CALLS.methods(
    "ActivationCache",
    "cache",
    {
        "accumulated_resid": arguments(incl_mid=True, apply_ln=True),
        "accumulated_resid layer": arguments(3, mlp_input=True, pos_slice=-1),
        "decompose_resid": arguments(apply_ln=True),
        "decompose_resid attention": arguments(4, mode="attn", return_labels=True),
        "stack_head_results": arguments(apply_ln=True, incl_remainder=True),
        "stack_head_results part": arguments(3, pos_slice=-1, return_labels=True),
        "get_neuron_results": arguments(LAST, neuron_slice=(0, 3), pos_slice=-1),
        "stack_neuron_results": arguments(**OF_THREE_NEURONS),
        "get_full_resid_decomposition": arguments(apply_ln=True, pos_slice=-1, return_labels=True),
        "get_full_resid_decomposition heads": arguments(3, expand_neurons=False),
        "stack_activation": arguments("pattern"),
        **dict.fromkeys(("items", "values", "keys", "__iter__", "__len__"), arguments()),
    },
)
CALLS.methods(
    "ActivationCache",
    "cache_on_cpu",
    {
        "accumulated_resid moved_to_the_CPU": arguments(incl_mid=True, apply_ln=True),
        "stack_head_results moved_to_the_CPU": arguments(apply_ln=True),
        "stack_neuron_results moved_to_the_CPU": arguments(**OF_THREE_NEURONS),
        "items moved_to_the_CPU": arguments(),
    },
)
CALLS.calls(
    "ActivationCache",
    {
        "compute_head_results": lambda cache: [
            cache.compute_head_results(),
            cache["result", LAST],
        ],
        "apply_ln_to_stack": lambda cache: cache.apply_ln_to_stack(cache.decompose_resid()),
        "apply_ln_to_stack layer": lambda cache: cache.apply_ln_to_stack(
            cache.decompose_resid(3, pos_slice=-1), layer=3, pos_slice=-1
        ),
        "logit_attrs": lambda cache: cache.logit_attrs(
            cache.accumulated_resid(pos_slice=-1), "w5", incorrect_tokens="w7", pos_slice=-1
        ),
        "logit_attrs batch": lambda at_home, cache: cache.logit_attrs(
            cache.decompose_resid(pos_slice=-1), at_home[:, -1], pos_slice=-1
        ),
        "apply_slice_to_batch_dim": lambda cache: cache.apply_slice_to_batch_dim(
            1
        ).accumulated_resid(),
        "__getitem__": lambda cache: [cache["resid_post", -1], cache["z", 3]],
        "__getitem__ moved_to_the_CPU": lambda cache_on_cpu: [
            cache_on_cpu["resid_post", -1],
            cache_on_cpu["z", 3],
        ],
        "to": lambda cache: dict(cache.to("cpu").items()),
        "remove_batch_dim": lambda model, tokens: without_batch_dim(
            model.run_with_cache(tokens[:1])[1]
        ),
        "accumulated_resid with_no_other_names_cached": lambda run: only(
            run, "resid_pre", "resid_post", "hook_scale"
        ).accumulated_resid(apply_ln=True),
        "accumulated_resid with_a_name_missing": lambda run: only(
            run, "resid_pre"
        ).accumulated_resid(),
    },
)


def without_batch_dim(cache: ActivationCache) -> Any:
    cache.remove_batch_dim()
    return [cache.accumulated_resid(), cache.stack_head_results(), cache["resid_post", 3]]


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


@call("ActivationCache.stack_activation", "model_gone")
def model_gone(run: Run) -> Any:
    cache = run.cache
    cache.model = None
    return [cache.stack_activation("resid_post", layer=LAST), cache["blocks.3.hook_resid_post"]]


# --------------------------------------------------------------------------------------------
# FactoredMatrix and SVDInterpreter: what the model returns

CALLS.attributes("FactoredMatrix", "matrix", "AB", "BA", "S", "T", "ndim", "pair")
CALLS.methods("FactoredMatrix", "matrix", {"norm": arguments(), "unsqueeze": arguments(0)})
CALLS.calls(
    "FactoredMatrix",
    {
        "U": lambda matrix: matrix.U.abs(),
        "Vh": lambda matrix: matrix.Vh.abs(),
        "V": lambda matrix: matrix.V.abs(),
        "svd": lambda matrix: matrix.svd()[1],
        "eigenvalues": lambda matrix: matrix.eigenvalues.abs().sort().values,
        "__getitem__": lambda matrix: matrix[2, 1],
        "collapse_l": lambda matrix: matrix.collapse_l().abs(),
        "collapse_r": lambda matrix: matrix.collapse_r().abs(),
        "get_corner": lambda matrix: matrix[0, 0].get_corner(),
        "make_even": lambda matrix: matrix.make_even().A.abs(),
        "__getitem__ QK": lambda model: model.QK[2, 1],
        "AB QK": lambda model: model.QK.AB,
        "svd QK": lambda model: model.QK.svd()[1],
        "__matmul__": lambda model, matrix: (matrix[LAST] @ model.W_U).AB,
        "__rmatmul__": lambda model: (model.W_E @ model.QK[LAST] @ model.W_E.T).AB,
        "__mul__": lambda direction, matrix: (matrix * direction.sum()).AB,
        "__rmul__": lambda direction, matrix: (direction.sum() * matrix).AB,
    },
)


def singular_vectors(run: Run, kind: str, head: int | None = None) -> torch.Tensor:
    interpreter = SVDInterpreter(run.model)
    options = {"layer_index": LAST, "num_vectors": 2, "head_index": head}
    return interpreter.get_singular_vectors(kind, **options).abs()


CALLS.calls(
    "SVDInterpreter",
    {
        "get_singular_vectors OV": lambda run: singular_vectors(run, "OV", head=1),
        "get_singular_vectors w_in": lambda run: singular_vectors(run, "w_in"),
        "get_singular_vectors w_out": lambda run: singular_vectors(run, "w_out"),
    },
)

# --------------------------------------------------------------------------------------------
# HookPoint


def at_hook_point(use: Callable[[Any, Run], Any]) -> Call:
    def run_it(run: Run) -> Any:
        model = run.changeable()
        use(model.hook_dict[RESID], run)
        return model(run.tokens)

    return run_it


CALLS.calls(
    "HookPoint",
    {
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
    },
)
