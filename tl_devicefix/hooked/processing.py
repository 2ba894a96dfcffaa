"""HookedTransformer's weight-processing methods, correct for weights on any mixture of devices.

Each component's weights are brought to the device where the component belongs, folded there in
float32 (or wider), rounded once, and left there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformer_lens.components import LayerNormPre, RMSNormPre

from tl_devicefix.checkpoints.units import full_name, name_in_unit, processing_unit
from tl_devicefix.folding import (
    Steps,
    Weights,
    WorkingCopies,
    process_component,
    working_dtype,
)
from tl_devicefix.folding import slices as slicing
from tl_devicefix.folding.attention_factors import refactor_attention_of_block
from tl_devicefix.folding.layer_norm import (
    fold_layer_norm_into_block,
    fold_layer_norm_into_unembed,
)
from tl_devicefix.folding.storing import write
from tl_devicefix.folding.unembed import center_unembed_weights, vocabulary_means
from tl_devicefix.folding.value_biases import fold_value_biases_of_block
from tl_devicefix.folding.writing_weights import (
    center_embedding,
    center_writing_weights_of_block,
)
from tl_devicefix.hooked.components import component_names, component_sizes, processing_units
from tl_devicefix.hooked.conventions import installed_conventions
from tl_devicefix.hooked.moving import settle
from tl_devicefix.placement.fitting import naming_full_devices
from tl_devicefix.placement.placement import Placement
from tl_devicefix.running.interruption import changing_weights, is_unfinished, refuse_unfinished

_log = logging.getLogger(__name__)

NORM_SUFFIXES = (".ln1.w", ".ln2.w", "ln_final.w")


def fold_layer_norm(
    self: Any,
    state_dict: Mapping[str, torch.Tensor],
    fold_biases: bool = True,
    center_weights: bool = True,
) -> Weights:
    """Fold the norms into the matrices that read them; see `HookedTransformer.fold_layer_norm`.

    Args:
        state_dict: HookedTransformer-format weights, on any devices, in any dtypes; not changed.
        fold_biases: fold the norms' biases; False for RMSNorm.
        center_weights: centre the reading matrices; False for RMSNorm.

    Returns:
        A new state dict, each component on its own device.
    """
    keep = installed_conventions().keeps_folded_norms

    def fold(name: str, weights: Weights) -> None:
        if name.startswith("blocks."):
            fold_layer_norm_into_block(
                weights, fold_biases=fold_biases, center_weights=center_weights, keep_norms=keep
            )
        elif name == "unembed":
            fold_layer_norm_into_unembed(
                weights,
                fold_biases=fold_biases and not self.cfg.final_rms,
                center_weights=center_weights,
                keep_norms=keep,
            )

    return _on_each_component(self, state_dict, fold)


def center_writing_weights(self: Any, state_dict: Mapping[str, torch.Tensor]) -> Weights:
    """Centre what writes to the residual stream; see `HookedTransformer.center_writing_weights`.

    Returns:
        A new state dict, each component on its own device.
    """

    def center(name: str, weights: Weights) -> None:
        if name.startswith("blocks."):
            center_writing_weights_of_block(weights)
        else:
            center_embedding(weights)

    return _on_each_component(self, state_dict, center)


def center_unembed(self: Any, state_dict: Mapping[str, torch.Tensor]) -> Weights:
    """Centre the unembedding over the vocabulary; see `HookedTransformer.center_unembed`.

    Returns:
        A new state dict, each component on its own device.
    """
    return _on_each_component(self, state_dict, lambda _, weights: center_unembed_weights(weights))


def fold_value_biases(self: Any, state_dict: Mapping[str, torch.Tensor]) -> Weights:
    """Fold the value biases into b_O; see `HookedTransformer.fold_value_biases`.

    Returns:
        A new state dict, each component on its own device.
    """

    def fold(name: str, weights: Weights) -> None:
        if name.startswith("blocks."):
            fold_value_biases_of_block(weights)

    return _on_each_component(self, state_dict, fold)


def refactor_factored_attn_matrices(self: Any, state_dict: Mapping[str, torch.Tensor]) -> Weights:
    """Even out the factors of QK and OV.

    See `HookedTransformer.refactor_factored_attn_matrices`.

    Returns:
        A new state dict, each component on its own device.

    Raises:
        ValueError: with rotary embeddings or grouped-query attention.
    """
    Steps(refactor_factored_attn_matrices=True).applicable(self.cfg, installed_conventions())

    def refactor(name: str, weights: Weights) -> None:
        if name.startswith("blocks."):
            refactor_attention_of_block(weights)

    return _on_each_component(self, state_dict, refactor)


def fill_missing_keys(self: Any, state_dict: Mapping[str, torch.Tensor]) -> Weights:
    """Add to a state dict what the model has and it has not, from the model itself.

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


def _default_value(name: str, own: torch.Tensor) -> torch.Tensor:
    """What a missing weight is: the model's own value, or if it has none yet, the neutral one."""
    leaf = name.rsplit(".", 1)[-1]
    is_matrix = "W_" in name
    if not own.is_meta:
        if is_matrix:
            _log.warning("%s is missing from the state dict: the model's own stays.", name)
        return own
    if leaf == "w":
        return torch.ones(own.shape, dtype=own.dtype)
    if leaf == "b" or leaf.lstrip("_").startswith("b_") or leaf == "bias":
        return torch.zeros(own.shape, dtype=own.dtype)
    if leaf == "W_pos":  # ALiBi models have the module but never read it
        return torch.zeros(own.shape, dtype=own.dtype)
    raise ValueError(
        f"the weights have no {name} {tuple(own.shape)}, and nothing can stand in for a weight "
        "matrix; check that the checkpoint is complete and of the architecture in its config"
    )


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

    If it is interrupted, the model has some of the new weights only, and does not run until all
    are loaded.

    Raises:
        ValueError: if a tensor is misshapen; the model is then unchanged. A matrix that is
            missing keeps the model's own value, with a warning, as in TransformerLens.
        torch.OutOfMemoryError: saying which device of a placed model had no room.
    """
    if is_unfinished(self):
        _refuse_incomplete(self, state_dict)
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
            _log.warning("fold_ln=True, but the weights hold no norms: already folded, so skipped.")
        elif steps.fold_ln:
            fold_norm_modules(self)
            if placement is not None:
                # The norms are other modules now.
                settle(self, placement.reweighed(component_sizes(self.cfg)))
        for component, weights in by_component(filled, self.cfg):
            with naming_full_devices(self, placement, component):
                load_component(self, component, weights, steps)


def _refuse_incomplete(model: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
    own = (name for name in model.state_dict() if not _is_own_buffer(name))
    if missing := sorted(set(own) - state_dict.keys()):
        raise ValueError(
            f"the state dict lacks {missing[0]} and {len(missing) - 1} more, but this model's "
            "weights are only partly processed, so all are needed"
        )


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
    so when it is used.

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


def by_component(state_dict: Mapping[str, torch.Tensor], cfg: Any) -> Iterator[tuple[str, Weights]]:
    """Split a state dict into the units that are processed together, in the order they run.

    ln_final comes with the unembedding, into which it folds. A block's names are shortened to
    those within the block.
    """
    groups: dict[str, Weights] = {name: {} for name in processing_units(cfg)}
    for name, tensor in state_dict.items():
        unit = processing_unit(name)
        groups.setdefault(unit, {})[name_in_unit(name)] = tensor
    yield from groups.items()


def load_component(model: Any, unit: str, weights: Weights, steps: Steps) -> None:
    """Process one unit's weights where they run and store them where they live, rounded once.

    It is done slice by slice, so that what is held beyond the model and the source is one slice.

    Args:
        weights: on any devices; left unchanged and not aliased.
        steps: which steps to apply.
    """
    device, stored_on = device_of_unit(model, unit, weights), storage_of_unit(model, unit, weights)
    weights = {name: tensor for name, tensor in weights.items() if not _is_own_buffer(name)}
    dtype = working_dtype(weights, model.cfg.dtype)
    elements = slicing.ELEMENTS_ON_CPU if device.type == "cpu" else slicing.ELEMENTS_ON_DEVICE
    means = None
    if steps.center_unembed and unit == "unembed":
        means = vocabulary_means(weights, dtype, device, elements // model.cfg.d_model + 1)
    left = dict(weights)  # what is stored when all slices are done, or was never read by a step
    carried: Weights = {}
    for part in slicing.slices(weights, elements):
        copies = WorkingCopies(part.of(weights, carried), device, dtype)
        process_component(unit, copies, model.cfg, steps, installed_conventions(), means)
        for name, index in part.cut.items():
            if name not in copies.as_given:
                left.pop(name, None)
                value, path = copies.pop(name), full_name(unit, name)
                write(model, path, value, weights[name], stored_on, index)
        for name in part.whole:
            left.pop(name, None)
            if name in copies:  # a folded norm may be gone
                left[name] = copies.pop(name)
        carried = part.to_carry(left)
    for name, value in left.items():
        write(model, full_name(unit, name), value, weights[name], stored_on)


def check_shapes(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Check that each weight has the shape of the model's, and has values.

    Raises:
        ValueError: naming the weight, its shape, and the shape that the config asks for.
    """
    for name, own in model.state_dict().items():
        if name in state_dict and not _is_own_buffer(name):
            _check_weight(name, state_dict[name], own)


def complete_unit(model: Any, unit: str, weights: Weights) -> Weights:
    """One unit's weights with the missing ones filled in, checked against the model's.

    Raises:
        ValueError: if a weight is misshapen, or a matrix is missing.
    """
    complete = dict(weights)
    for component in ("ln_final", "unembed") if unit == "unembed" else (unit,):
        if component not in component_names(model.cfg):
            continue
        for leaf, own in model.get_submodule(component).state_dict().items():
            name = f"{component}.{leaf}"
            if _is_own_buffer(leaf):
                continue
            if name_in_unit(name) in complete:
                _check_weight(name, complete[name_in_unit(name)], own)
            else:
                complete[name_in_unit(name)] = _default_value(name, own)
    return complete


def _check_weight(name: str, given: torch.Tensor, own: torch.Tensor) -> None:
    # As torch's load_state_dict: one element may fill a scalar (Apertus keeps its alphas so).
    if given.shape != own.shape and (own.dim() > 0 or given.numel() != 1):
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}, but this model's config asks for "
            f"{tuple(own.shape)}: the weights and the config are not of the same model"
        )
    if given.is_meta:
        raise ValueError(
            f"{name} is on the meta device, so it has a shape but no values; load the model that "
            "it comes from with its weights"
        )


def _is_own_buffer(name: str) -> bool:
    """Whether it is a mask or rotary table: these depend on n_ctx and are the model's own."""
    return name.rsplit(".", 1)[-1] in ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def device_of_unit(model: Any, unit: str, weights: Mapping[str, torch.Tensor]) -> torch.device:
    """Where a component runs: by the placement, else where the model has it."""
    placement: Placement | None = getattr(model, "placement", None)
    return _held_on(model, unit, weights) if placement is None else placement.device_of(unit)


def storage_of_unit(model: Any, unit: str, weights: Mapping[str, torch.Tensor]) -> torch.device:
    """Where a component's weights live: where it runs, or on the host if it is offloaded."""
    placement: Placement | None = getattr(model, "placement", None)
    return _held_on(model, unit, weights) if placement is None else placement.stored_on(unit)


def _held_on(model: Any, unit: str, weights: Mapping[str, torch.Tensor]) -> torch.device:
    try:
        held: Iterable[torch.Tensor] = model.get_submodule(unit).parameters()
    except AttributeError:
        held = ()
    for parameter in held:
        if not parameter.is_meta:
            return parameter.device
    return next(iter(weights.values())).device


def fold_norm_modules(model: Any) -> None:
    """Replace LayerNorm by LayerNormPre (or RMSNorm by RMSNormPre): what is left after folding."""
    if model.cfg.normalization_type not in ("LN", "RMS"):
        return
    pre = LayerNormPre if model.cfg.normalization_type == "LN" else RMSNormPre
    model.cfg.normalization_type += "Pre"
    for module in [model, *model.blocks, *(getattr(b, "mlp", None) for b in model.blocks)]:
        for name in ("ln1", "ln2", "ln", "ln_final"):
            if module is not None and name in module._modules:
                is_final_rms = name == "ln_final" and model.cfg.final_rms
                setattr(module, name, (RMSNormPre if is_final_rms else pre)(model.cfg))
    model.setup()


def _on_each_component(model: Any, state_dict: Mapping[str, torch.Tensor], step: Any) -> Weights:
    """Apply one step to every component's working copies and round each result once."""
    result: Weights = {}
    for unit, weights in by_component(state_dict, model.cfg):
        if not weights:
            continue
        device = device_of_unit(model, unit, weights)
        stored_on = storage_of_unit(model, unit, weights)
        copies = WorkingCopies(weights, device, working_dtype(weights, torch.float32))
        step(unit, copies)
        for name, value in copies.items():
            dtype = weights[name].dtype if name in weights else model.cfg.dtype
            result[full_name(unit, name)] = value.to(device=stored_on, dtype=dtype)
    return result
