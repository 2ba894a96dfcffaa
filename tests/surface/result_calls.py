"""Calls of what a model returns: ActivationCache, FactoredMatrix, SVDInterpreter, HookPoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from registry import LAST, RESID, Call, Calls, Run, results, steer
from transformer_lens import ActivationCache, SVDInterpreter

CALLS = Calls()
call, calls, calls_of = CALLS.call, CALLS.calls, CALLS.calls_of

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
        lambda run, kind=_kind, head=_head: (  # type: ignore[misc]
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
