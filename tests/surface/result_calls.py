"""Calls of what a model returns: ActivationCache, FactoredMatrix, SVDInterpreter, HookPoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from registry import LAST, RESID, Call, Calls, Run, steer
from transformer_lens import ActivationCache, SVDInterpreter

CALLS = Calls()
call, calls = CALLS.call, CALLS.calls

# --------------------------------------------------------------------------------------------
# ActivationCache


CALLS.expressions(
    "ActivationCache",
    """
accumulated_resid: cache.accumulated_resid(incl_mid=True, apply_ln=True)
accumulated_resid layer: cache.accumulated_resid(3, mlp_input=True, pos_slice=-1)
decompose_resid: cache.decompose_resid(apply_ln=True)
decompose_resid attention: cache.decompose_resid(4, mode="attn", return_labels=True)
compute_head_results: [cache.compute_head_results(), cache["result", LAST]][1]
stack_head_results: cache.stack_head_results(apply_ln=True, incl_remainder=True)
stack_head_results part: cache.stack_head_results(3, pos_slice=-1, return_labels=True)
get_neuron_results: cache.get_neuron_results(LAST, neuron_slice=(0, 3), pos_slice=-1)
stack_neuron_results: cache.stack_neuron_results(-1, pos_slice=-1, neuron_slice=(0, 3),
    apply_ln=True, incl_remainder=True)
get_full_resid_decomposition: cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1,
    return_labels=True)
get_full_resid_decomposition heads: cache.get_full_resid_decomposition(3, expand_neurons=False)
stack_activation: cache.stack_activation("pattern")
apply_ln_to_stack: cache.apply_ln_to_stack(cache.decompose_resid(), layer=-1)
apply_ln_to_stack layer: cache.apply_ln_to_stack(cache.decompose_resid(3, pos_slice=-1), layer=3,
    pos_slice=-1)
logit_attrs: cache.logit_attrs(cache.accumulated_resid(apply_ln=False, pos_slice=-1), "w5",
    incorrect_tokens="w7", pos_slice=-1)
logit_attrs batch: cache.logit_attrs(cache.decompose_resid(pos_slice=-1), tokens_at_home[:, -1],
    pos_slice=-1)
apply_slice_to_batch_dim: cache.apply_slice_to_batch_dim(1).accumulated_resid()
__getitem__: [cache["resid_post", -1], cache["z", 3]]
items: dict(cache.items())
values: list(cache.values())
keys: list(cache.keys())
__iter__: list(cache)
__len__: len(cache)
accumulated_resid moved_to_the_CPU: cache.to("cpu").accumulated_resid(incl_mid=True, apply_ln=True)
stack_head_results moved_to_the_CPU: cache.to("cpu").stack_head_results(apply_ln=True)
stack_neuron_results moved_to_the_CPU: cache.to("cpu").stack_neuron_results(
    -1, pos_slice=-1, neuron_slice=(0, 3), apply_ln=True, incl_remainder=True)
__getitem__ moved_to_the_CPU: [cache.to("cpu")["resid_post", -1], cache.to("cpu")["z", 3]]
items moved_to_the_CPU: dict(cache.to("cpu").items())
to: dict(cache.to("cpu").items())
remove_batch_dim: without_batch_dim(model.run_with_cache(tokens[:1])[1])
accumulated_resid with_no_other_names_cached: only(run, "resid_pre", "resid_post",
    "ln_final.hook_scale").accumulated_resid(apply_ln=True)
accumulated_resid with_a_name_missing: only(run, "resid_pre").accumulated_resid()
""",
    globals(),
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

CALLS.expressions(
    "FactoredMatrix",
    """
AB: matrix.AB
BA: matrix.BA
S: matrix.S
T: results(matrix.T)
U: matrix.U.abs()
Vh: matrix.Vh.abs()
V: matrix.V.abs()
svd: matrix.svd()[1]
eigenvalues: matrix.eigenvalues.abs().sort().values
norm: matrix.norm()
__getitem__: results(matrix[2, 1])
collapse_l: matrix.collapse_l().abs()
collapse_r: matrix.collapse_r().abs()
get_corner: matrix[0, 0].get_corner()
make_even: results(matrix.make_even())[0].abs()
ndim: matrix.ndim
pair: matrix.pair
unsqueeze: results(matrix.unsqueeze(0))
__getitem__ QK: results(model.QK[2, 1])
AB QK: model.QK.AB
svd QK: model.QK.svd()[1]
__matmul__: (matrix[LAST] @ model.W_U).AB
__rmatmul__: (model.W_E @ model.QK[LAST] @ model.W_E.T).AB
__mul__: (matrix * direction.sum()).AB
__rmul__: (direction.sum() * matrix).AB
""",
    globals(),
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


CALLS.expressions(
    "HookPoint",
    """
has_hooks: model.hook_dict[RESID].has_hooks()
layer: model.hook_dict[RESID].layer()
forward: model.hook_dict["hook_embed"](direction)
""",
    globals(),
)
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
        "clear_context": at_hook_point(lambda point, run: point.clear_context()),
    },
)
