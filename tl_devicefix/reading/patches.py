"""What is replaced for reading: of ActivationCache and SVDInterpreter, for either class."""

from __future__ import annotations

from tl_devicefix.patching.patch import Patch
from tl_devicefix.reading import activations, gathering

gathers = "weights of several devices are read at home, or on the device of `gather_on`"

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
            activations.reading_together(name),
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
            activations.read_all(name),
            ("self",),
            "activations are read at home, or on the device of `gather_on`",
            owner="ActivationCache",
            until="4",
        )
        for name in ("items", "values")
    ),
)
