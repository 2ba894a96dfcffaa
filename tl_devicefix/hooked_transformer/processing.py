"""HookedTransformer's weight-processing methods, correct for weights on any mixture of devices.

Each component's weights are brought to the device where the component belongs, folded there in
float32 (or wider), rounded once, and left there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformer_lens.components import LayerNormPre, RMSNormPre

from tl_devicefix.checkpoints.sources import full_name
from tl_devicefix.dispatch.forward import changing_weights, refuse_unfinished
from tl_devicefix.hooked_transformer.components import final_norm_class
from tl_devicefix.hooked_transformer.moving import settle
from tl_devicefix.hooked_transformer.units import (
    _default_value,
    by_component,
    check_shapes,
    device_of_unit,
    installed_conventions,
    load_component,
)
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.fitting import naming_full_devices
from tl_devicefix.placement.placement import Placement, is_block
from tl_devicefix.placement.remote_tensor import refuse_weights
from tl_devicefix.placement.workers import each_on_its_device
from tl_devicefix.weight_processing import (
    Steps,
    Weights,
    WorkingCopies,
    check_refactorable,
    process_component,
    working_dtype,
)
from tl_devicefix.weight_processing.steps import (
    fold_layer_norm_into_block,
    fold_layer_norm_into_unembed,
)

_log = logging.getLogger(__name__)

_FOLDS = "each component on its own device, in float32 or wider, rounded once"
NORM_SUFFIXES = (".ln1.w", ".ln2.w", "ln_final.w")


def _fold_norms(
    model: Any, unit: str, weights: Weights, fold_biases: bool = True, center_weights: bool = True
) -> None:
    keep = installed_conventions().keeps_folded_norms
    options = {"center_weights": center_weights, "keep_norms": keep}
    if is_block(unit):
        fold_layer_norm_into_block(weights, fold_biases=fold_biases, **options)
    elif unit == "unembed":
        fold_biases = fold_biases and not model.cfg.final_rms
        fold_layer_norm_into_unembed(weights, fold_biases=fold_biases, **options)


def _process(steps: Steps, model: Any, unit: str, weights: Weights) -> None:
    process_component(unit, weights, model.cfg, steps, installed_conventions())


@patches(
    "HookedTransformer",
    *("fold_layer_norm", "center_writing_weights", "center_unembed", "fold_value_biases"),
    "refactor_factored_attn_matrices",
    takes="self state_dict",
    why=_FOLDS,
)
def one_step(
    original: Any, self: Any, state_dict: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any
) -> Weights:
    """A method of HookedTransformer that processes weights, such as `fold_layer_norm`.

    The weights may lie on any devices, in any dtypes, and are not changed.

    Returns:
        A new state dict, each component on its own device.

    Raises:
        ValueError: if attention matrices cannot be refactored.
    """
    method = original.__name__
    step: Callable[..., None] = _fold_norms
    if method != "fold_layer_norm":
        step = partial(_process, Steps(**{method: True}))
    if method == "refactor_factored_attn_matrices":
        check_refactorable(self.cfg, is_grouped=self.cfg.n_key_value_heads is not None)
    result: Weights = {}
    for unit, weights in by_component(state_dict, self.cfg):
        if not weights:
            continue
        device = device_of_unit(self, unit, weights)
        copies = WorkingCopies(weights, device, working_dtype(weights, torch.float32))
        step(self, unit, copies, *args, **kwargs)
        stored_on = device_of_unit(self, unit, weights, stored=True)
        for name, value in copies.items():
            dtype = weights[name].dtype if name in weights else self.cfg.dtype
            result[full_name(unit, name)] = value.to(device=stored_on, dtype=dtype)
    return result


@patches("HookedTransformer", takes="self state_dict", why="never fill in garbage")
def fill_missing_keys(self: Any, state_dict: Mapping[str, torch.Tensor]) -> Weights:
    """Add the model's own tensors for the names that a state dict lacks.

    Returns:
        A new dict; the tensors are those given, the added ones are the model's own.

    Raises:
        ValueError: if a weight matrix is missing, and the model holds no values for it either.
    """
    filled = dict(state_dict)
    for name, own in self.state_dict().items():
        if name not in filled:
            filled[name] = _default_value(name, own)
    return filled


@patches("HookedTransformer", takes="self state_dict", why=_FOLDS)
def load_and_process_state_dict(
    self: Any,
    state_dict: Mapping[str, torch.Tensor],
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Load HookedTransformer-format weights, processed one component at a time.

    See `HookedTransformer.load_and_process_state_dict`.

    Args:
        state_dict: weights on any devices and in any dtypes; not changed.

    There is no second copy of the weights: if it is interrupted, the model has to be loaded again,
    and says so when it is used.

    Raises:
        RuntimeError: if an earlier call was interrupted, or blocks are on other hosts.
        ValueError: if a tensor is misshapen; the model is then unchanged. A matrix that is
            missing keeps the model's own value, with a warning, as in TransformerLens.
        torch.OutOfMemoryError: saying which device of a placed model had no room.
    """
    refuse_unfinished(self)
    refuse_weights(self.parameters())
    filled = self.fill_missing_keys(state_dict)
    check_shapes(self, filled)
    steps = Steps(
        fold_ln,
        center_writing_weights,
        center_unembed,
        fold_value_biases,
        refactor_factored_attn_matrices,
    ).applicable(self.cfg, installed_conventions())
    placement: Placement | None = getattr(self, "placement", None)
    with changing_weights(self):
        if steps.fold_ln and not any(name.endswith(NORM_SUFFIXES) for name in state_dict):
            _log.warning("fold_ln=True, but the weights have no norms (folded already): skipped")
        elif steps.fold_ln:
            fold_norm_modules(self)
            if placement is not None:
                # The norms are other modules now.
                settle(self, placement.reweighed(self))
        units = list(by_component(filled, self.cfg))
        devices = [device_of_unit(self, unit, weights) for unit, weights in units]
        each_on_its_device(partial(_load_unit, self, steps), units, devices)


def _load_unit(model: Any, steps: Steps, named: tuple[str, Weights]) -> None:
    unit, weights = named
    with naming_full_devices(model, getattr(model, "placement", None), unit):
        load_component(model, unit, weights, steps)


@patches("HookedTransformer", takes="self fold_ln", why=_FOLDS, until="3.0")
def process_weights_(
    self: Any,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Process the model's own weights in place, each component on its own device.

    A model that is folded already, wholly or in part, is left as it is in what is done. There is no
    second copy of the weights: if this is interrupted, the model has to be loaded again, and says
    so when it is used. Later than 3.0, TransformerLens's own does no more than this.

    Raises:
        RuntimeError: if an earlier call was interrupted.
    """
    refuse_unfinished(self)
    self.load_and_process_state_dict(
        self.state_dict(),
        fold_ln=fold_ln,
        center_writing_weights=center_writing_weights,
        center_unembed=center_unembed,
        refactor_factored_attn_matrices=refactor_factored_attn_matrices,
    )


def fold_norm_modules(model: Any) -> None:
    """Replace LayerNorm by LayerNormPre (or RMSNorm by RMSNormPre): what is left after folding."""
    if model.cfg.normalization_type not in ("LN", "RMS"):
        return
    pre = LayerNormPre if model.cfg.normalization_type == "LN" else RMSNormPre
    model.cfg.normalization_type += "Pre"
    for module in [model, *model.blocks, *(getattr(b, "mlp", None) for b in model.blocks)]:
        for name in ("ln1", "ln2", "ln", "ln_final"):
            if module is not None and name in module._modules:
                norm = final_norm_class(model.cfg) if name == "ln_final" else pre
                setattr(module, name, norm(model.cfg))
    model.setup()
