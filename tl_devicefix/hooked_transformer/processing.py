"""Process the weights of a HookedTransformer, one component at a time.

Each component's weights are completed and checked, moved to its device, folded there in float32
(or wider), rounded once, and stored.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import transformers.utils.logging as hf_logging
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.components import LayerNormPre, RMSNormPre

from tl_devicefix.checkpoints.sources import (
    Source,
    StateDictSource,
    full_name,
    name_in_unit,
    processing_unit,
)
from tl_devicefix.dispatch.forward import changing_weights, refuse_unfinished
from tl_devicefix.hooked_transformer.components import IS_2, component_names, final_norm_class
from tl_devicefix.hooked_transformer.moving import settle
from tl_devicefix.monkeypatch.applying import original
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.multihost.remote_tensor import refuse_weights
from tl_devicefix.placement.fitting import naming_full_devices
from tl_devicefix.placement.placement import Placement, names_block, placement_of
from tl_devicefix.placement.workers import each_on_its_device
from tl_devicefix.weight_processing import Conventions, Steps, process_component
from tl_devicefix.weight_processing import slices as slicing
from tl_devicefix.weight_processing.steps import (
    Weights,
    fold_layer_norm_into_block,
    fold_layer_norm_into_unembed,
    vocabulary_means,
)

_log = logging.getLogger(__name__)
_FOLDS = "each component on its own device, in float32 or wider, rounded once"
_NORM_SUFFIXES = (".ln1.w", ".ln2.w", "ln_final.w")
_MAX_CONCURRENT = 8  # more threads do not copy faster: memory is the limit


def _fold_norms(
    cfg: HookedTransformerConfig,
    unit: str,
    weights: Weights,
    fold_biases: bool = True,
    center_weights: bool = True,
) -> None:
    keep = installed_conventions().keeps_folded_norms
    options = {"center_weights": center_weights, "keep_norms": keep}
    if names_block(unit):
        fold_layer_norm_into_block(weights, fold_biases=fold_biases, **options)
    elif unit == "unembed":
        fold_biases = fold_biases and not cfg.final_rms  # an RMS norm has no bias
        fold_layer_norm_into_unembed(weights, fold_biases=fold_biases, **options)


@patches(
    "HookedTransformer",
    *("fold_layer_norm", "center_writing_weights", "center_unembed", "fold_value_biases"),
    "refactor_factored_attn_matrices",
    takes="self state_dict",
    why=_FOLDS,
)
def one_step(
    original: FunctionType,
    self: HookedTransformer,
    state_dict: Mapping[str, torch.Tensor],
    *args: object,
    **kwargs: object,
) -> Weights:
    """Wrap a method of HookedTransformer that processes weights, such as `fold_layer_norm`.

    The weights may lie on any devices, in any dtypes, and are not changed.

    Returns:
        A new state dict, each component on its own device.

    Raises:
        ValueError: if attention matrices cannot be refactored.
        KeyError: if there are no weights to centre.
    """
    method, conventions = original.__name__, installed_conventions()
    inspect.signature(original).bind(self, state_dict, *args, **kwargs)
    if (needed := _NEEDED.get(method, "")) and needed not in state_dict:
        raise KeyError(
            f"the weights have no {needed}, which {method} needs: give a state dict in "
            "HookedTransformer's format"
        )
    step: Callable[..., None] = functools.partial(_fold_norms, self.cfg)
    if method != "fold_layer_norm":
        steps = Steps(**{method: True})
        if not method.startswith("center"):  # TransformerLens's method always centres
            steps = steps.applicable(self.cfg, conventions)
        given: dict[str, Any] = {"cfg": self.cfg, "steps": steps, "conventions": conventions}
        step = functools.partial(process_component, **given)
    source, units = StateDictSource(state_dict), processing_units(self.cfg)
    # Weights of a subclass belong to no unit.
    result = {name: state_dict[name] for name in state_dict if processing_unit(name) not in units}
    for unit in dict.fromkeys(processing_unit(name) for name in state_dict if name not in result):
        weights = source.read(unit, torch.device("cpu"))
        device, stored_on = _device_and_storage(self, unit)
        dtype = slicing.working_dtype(weights, torch.float32)
        copies = slicing.WorkingCopies(weights, device, dtype)
        step(unit, copies, *args, **kwargs)
        for name, value in copies.items():
            dtype = weights[name].dtype if name in weights else self.cfg.dtype
            result[full_name(unit, name)] = value.to(device=stored_on, dtype=dtype)
    return result


_NEEDED = {"center_writing_weights": "embed.W_E", "center_unembed": "unembed.W_U"}
"""Method -> the weight without which it raises, in TransformerLens too."""


@patches("HookedTransformer", takes="self state_dict", why=_FOLDS)
def load_and_process_state_dict(
    self: HookedTransformer,
    state_dict: Mapping[str, torch.Tensor],
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Load HookedTransformer-format weights, processed one component at a time.

    See `HookedTransformer.load_and_process_state_dict`. No second copy of the weights is kept.
    After an interrupted call, the model must be loaded again; using it raises an error that says
    so.

    Args:
        state_dict: weights on any devices and in any dtypes; not changed.

    Raises:
        RuntimeError: if an earlier call was interrupted, or blocks are on other hosts.
        ValueError: if a tensor is misshapen; the model is then unchanged. A matrix that is
            missing keeps the model's own value, with a warning, as in TransformerLens.
        torch.OutOfMemoryError: saying which device of a placed model had no room.
    """
    refuse_unfinished(self)
    refuse_weights(self.parameters())
    source, own = StateDictSource(self.fill_missing_keys({**state_dict})), self.state_dict()
    units = processing_units(self.cfg)
    # These weights are in no component, such as a subclass's own parameters.
    beside = [name for name in state_dict if name in own and processing_unit(name) not in units]
    for name in beside:
        _check_shape(name, state_dict[name], own[name])
        _check_values(name, state_dict[name])
    for unit in units:
        complete_unit(self, unit, source.read(unit, torch.device("cpu")))
    steps = Steps(
        fold_ln,
        center_writing_weights,
        center_unembed,
        fold_value_biases,
        refactor_factored_attn_matrices,
    ).applicable(self.cfg, installed_conventions())
    placement = placement_of(self)
    with changing_weights(self):
        if steps.fold_ln and not any(name.endswith(_NORM_SUFFIXES) for name in state_dict):
            _log.warning("fold_ln=True, but the weights have no norms (folded already): skipped")
            steps = replace(steps, fold_ln=False)
        elif steps.fold_ln:
            fold_norm_modules(self)
            if placement is not None:
                placement = placement.reweighed(self)
                settle(self, placement)  # the norms were replaced
        fill(self, source, placement, steps)
        for name in beside:
            value = state_dict[name]
            slicing.write(self, name, value, value, own[name].device)
        for name in filter(_is_own_buffer, own.keys() & state_dict.keys()):
            buffer = self.get_buffer(name)
            value = state_dict[name].to(buffer, copy=True)
            # A rotary table grows with a text: [pos, d_rotary]. A mask is as large as `n_ctx`.
            fits = value.shape == buffer.shape or (value.dim() == 2 and "rotary" in name)
            if fits and not torch.equal(value, buffer):
                path, _, leaf = name.rpartition(".")
                # Assign a new tensor: blocks may share the old one.
                self.get_submodule(path)._buffers[leaf] = value


@patches("HookedTransformer", takes="self fold_ln", why=_FOLDS, until="3.0")
def process_weights_(
    self: HookedTransformer,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Process the model's own weights in place; steps that are already done are skipped."""
    flags = fold_ln, center_writing_weights, center_unembed
    self.load_and_process_state_dict(
        self.state_dict(), *flags, refactor_factored_attn_matrices=refactor_factored_attn_matrices
    )


def fold_norm_modules(model: HookedTransformer) -> None:
    """Replace LayerNorm and RMSNorm with LayerNormPre and RMSNormPre, which have no weights."""
    if model.cfg.normalization_type not in ("LN", "RMS"):
        return
    pre = LayerNormPre if model.cfg.normalization_type == "LN" else RMSNormPre
    model.cfg.normalization_type += "Pre"
    for module in [model, *model.blocks, *(getattr(b, "mlp", None) for b in model.blocks)]:
        for name in ("ln1", "ln2", "ln", "ln_final"):  # `ln` is inside SoLU's MLP
            if module is not None and name in module._modules:
                norm = final_norm_class(model.cfg) if name == "ln_final" else pre
                setattr(module, name, norm(model.cfg))
    model.setup()


def processing_units(cfg: HookedTransformerConfig) -> list[str]:
    """Return the components without ln_final, which is processed with the unembedding."""
    return [name for name in component_names(cfg) if name != "ln_final"]


def fill(model: Any, source: Source, placement: Placement | None, steps: Steps) -> None:
    """Read, process and store every component of a model, each on its planned device.

    Without a placement, each component stays on its present device.

    Raises:
        ValueError: if the source lacks weights that the model's config asks for.
        torch.OutOfMemoryError: saying which device has no room.
    """
    units = processing_units(model.cfg)
    if placement is not None:
        model.placement = placement
        units = [unit for unit in units if unit in placement.here.device_map]  # not other hosts'
    # Process an offloaded block where it runs: the CPU would be slow.
    devices = [_device_and_storage(model, unit)[0] for unit in units]
    if source.computes:
        devices = devices[:1] * len(units)  # one at a time, to save memory
    elif {device.type for device in devices} == {"cpu"}:  # a worker for each core, at most 8
        at_once = min(torch.get_num_threads(), _MAX_CONCURRENT)
        devices = [torch.device("cpu", index % at_once) for index in range(len(units))]
    # Use no closure: an error's traceback would keep it alive, and so the model.
    one = functools.partial(fill_one, model, source, placement, steps)
    with hf_logging.tqdm(total=len(units), desc="Loading components") as progress:
        each_on_its_device(one, units, devices, progress.update)


def fill_one(
    model: HookedTransformer, source: Source, placement: Placement | None, steps: Steps, unit: str
) -> None:
    """Read, process and store one unit's weights."""
    with naming_full_devices(placement, unit):
        weights = source.read(unit, _device_and_storage(model, unit)[0])
        load_component(model, unit, complete_unit(model, unit, weights), steps)


def _device_and_storage(model: HookedTransformer, unit: str) -> tuple[torch.device, torch.device]:
    """Return the devices that run a component and store its weights."""
    placement = placement_of(model)
    if placement is not None:
        return placement.device_of(unit), placement.stored_on(unit)
    device = next(model.get_submodule(unit).parameters()).device
    return device, device


def load_component(model: HookedTransformer, unit: str, weights: Weights, steps: Steps) -> None:
    """Process one unit's weights on the device that runs it, and store them, rounded once.

    The unit is processed slice by slice. Besides the model and the source, one slice is held.
    """
    device, stored_on = _device_and_storage(model, unit)
    weights = {name: tensor for name, tensor in weights.items() if not _is_own_buffer(name)}
    dtype = slicing.working_dtype(weights, model.cfg.dtype)
    elements = slicing.ELEMENTS_ON_CPU if device.type == "cpu" else slicing.ELEMENTS_ON_DEVICE
    means = None  # means over the whole vocabulary: a slice has only some tokens
    if steps.center_unembed and unit == "unembed":
        tokens_at_once = elements // model.cfg.d_model + 1
        means = vocabulary_means(weights, dtype, device, tokens_at_once)
    left = dict(weights)  # the weights to store after all slices
    for part in slicing.slices(weights, elements):
        copies = slicing.WorkingCopies(part.of(weights, left), device, dtype)
        process_component(unit, copies, model.cfg, steps, installed_conventions(), means)
        for name, index in part.cut.items():
            if name not in copies.as_given:
                left.pop(name, None)
                value, path = copies.pop(name), full_name(unit, name)
                slicing.write(model, path, value, weights[name], stored_on, index)
        for name in part.uncut:
            left.pop(name, None)
            if name in copies:  # folding may have removed a norm
                left[name] = copies.pop(name)
    for name, value in left.items():
        slicing.write(model, full_name(unit, name), value, weights[name], stored_on)


def complete_unit(model: HookedTransformer, unit: str, weights: Weights) -> Weights:
    """Fill in one unit's missing weights, and check the shapes against the model's."""
    complete = dict(weights)
    for name, weight in weights.items():  # also norms to fold, which the model may lack
        _check_values(full_name(unit, name), weight)
    for component in ("ln_final", "unembed") if unit == "unembed" else (unit,):
        if component not in component_names(model.cfg):  # ln_final, in a model without norms
            continue
        for leaf, own in model.get_submodule(component).state_dict().items():
            name = f"{component}.{leaf}"
            if _is_own_buffer(leaf):
                continue
            if name_in_unit(name) in complete:
                _check_shape(name, complete[name_in_unit(name)], own)
            else:
                complete[name_in_unit(name)] = _default_value(name, own)
    return complete


def _check_shape(name: str, weight: torch.Tensor, own: torch.Tensor) -> None:
    # A one-element tensor fits a scalar, as in torch's load_state_dict (Apertus's alphas).
    if weight.shape != own.shape and (own.dim() > 0 or weight.numel() != 1):
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}, but this model's config asks for "
            f"{tuple(own.shape)}, as TransformerLens reads it: "
            "try TransformerBridge, or check that weights and config are of one model"
        )


def _check_values(name: str, weight: torch.Tensor) -> None:
    if weight.is_meta:
        raise ValueError(
            f"{name} is on the meta device, so it has a shape but no values: load the model "
            "with its weights (for hf_model, device_map=None)"
        )


def _default_value(name: str, own: torch.Tensor) -> torch.Tensor:
    """Return a missing weight: the model's own value, or a neutral one if it has none yet."""
    leaf = name.rsplit(".", 1)[-1]
    if not own.is_meta:
        return own
    if leaf == "w":
        return torch.ones(own.shape, dtype=own.dtype)
    # TransformerLens gives ALiBi models a W_pos, but never reads it.
    if leaf in ("b", "bias", "W_pos") or leaf.lstrip("_").startswith("b_"):
        return torch.zeros(own.shape, dtype=own.dtype)
    raise ValueError(
        f"the weights have no {name} {tuple(own.shape)}, and nothing can stand in for a weight "
        "matrix: check that the checkpoint is complete and of the architecture in its config"
    )


def _is_own_buffer(name: str) -> bool:
    """Return True for masks and rotary tables, which a model makes itself for its n_ctx."""
    return name.rsplit(".", 1)[-1] in ("mask", "IGNORE", "rotary_sin", "rotary_cos")


@functools.cache
def installed_conventions() -> Conventions:
    """Return the conventions of the installed TransformerLens."""
    # 3.0 added MoE folding, and later versions removed it and added it again: look for the warning.
    loader = inspect.getsource(original(HookedTransformer, "load_and_process_state_dict"))
    refuses_moe = "You are using MoE, so the layer norm weights can't be folded" in loader
    return Conventions(
        folds_moe=not refuses_moe, recenters_b_O=not IS_2, keeps_folded_norms=not IS_2
    )
