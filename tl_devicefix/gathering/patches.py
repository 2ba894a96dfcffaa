"""What is replaced for reading: of ActivationCache and SVDInterpreter, for either class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tl_devicefix.gathering import activations, gathering
from tl_devicefix.monkeypatch.patch import Patch

gathers = "weights of several devices are read at home, or on the device of `gather_on`"
at_home = "cached activations are read at home"
hook_names = ("self", "names_filter", "incl_bwd", "device")

Row = tuple[Callable[..., Any], tuple[str, ...], str]
"""What replaces something, its parameters, and why."""

GATHERED: dict[str, Row] = {
    "W_E_pos": (gathering.get_W_E_pos, (), gathers),
    "accumulated_bias": (gathering.gathered, ("self",), gathers),
    "all_composition_scores": (
        gathering.gathered,
        ("self", "mode"),
        gathers,
    ),
    "tokens_to_residual_directions": (
        gathering.tokens_to_residual_directions,
        ("self", "tokens"),
        gathers,
    ),
}
"""What reads weights together, in both classes."""

CACHING: dict[str, Row] = {
    "get_caching_hooks": (activations.with_cache_at_home, hook_names, at_home),
    "add_caching_hooks": (activations.with_cache_at_home, hook_names, at_home),
}
"""What makes hooks that fill a cache, in both classes."""

PATCHES = (
    Patch(
        "__init__",
        gathering.init_svd_interpreter,
        ("self", "model"),
        gathers,
        owner="SVDInterpreter",
        until="4",
    ),
    *(
        Patch(
            name,
            activations.reading_together,
            ("self",),
            "cached activations meet weights on one device",
            owner="ActivationCache",
            until="4",
        )
        for name in (
            "accumulated_resid",
            "apply_ln_to_stack",
            "decompose_resid",
            "get_full_resid_decomposition",
            "get_neuron_results",
            "logit_attrs",
            "stack_activation",
            "stack_head_results",
            "stack_neuron_results",
        )
    ),
    Patch(
        "compute_head_results",
        activations.compute_head_results,
        ("self",),
        "each block's head results on its own device",
        owner="ActivationCache",
        until="4",
    ),
    Patch(
        "remove_batch_dim",
        activations.remove_batch_dim,
        ("self",),
        "activations stay where they are",
        owner="ActivationCache",
        until="4",
    ),
    Patch(
        "apply_slice_to_batch_dim",
        activations.apply_slice_to_batch_dim,
        ("self", "batch_slice"),
        "activations stay where they are",
        owner="ActivationCache",
        until="4",
    ),
    Patch(
        "to",
        activations.to,
        ("self", "device"),
        "activations go there from where they are, not by way of home",
        owner="ActivationCache",
        until="4",
    ),
    Patch(
        "__getitem__",
        activations.read_one,
        ("self", "key"),
        "activations are read at home, or on the device of `gather_on`",
        owner="ActivationCache",
        until="4",
    ),
    *(
        Patch(
            name,
            activations.read_all,
            ("self",),
            "activations are read at home, or on the device of `gather_on`",
            owner="ActivationCache",
            until="4",
        )
        for name in ("items", "values")
    ),
)
