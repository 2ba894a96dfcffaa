"""The units a HookedTransformer is processed in: completed, checked, folded, and stored."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
import transformers.utils.logging as hf_logging
from torch import nn
from transformer_lens import HookedTransformer

from tl_devicefix.checkpoints.sources import Source, full_name, name_in_unit, processing_unit
from tl_devicefix.hooked_transformer.components import component_names
from tl_devicefix.monkeypatch.applying import original
from tl_devicefix.placement.fitting import naming_full_devices
from tl_devicefix.placement.placement import Placement
from tl_devicefix.placement.workers import each_on_its_device
from tl_devicefix.weight_processing import Conventions, Steps, process_component
from tl_devicefix.weight_processing import slices as slicing
from tl_devicefix.weight_processing.steps import vocabulary_means
from tl_devicefix.weight_processing.weights import Weights, WorkingCopies, working_dtype, write

_log = logging.getLogger(__name__)


def processing_units(cfg: Any) -> list[str]:
    """The components, less ln_final, which is processed with the unembedding."""
    return [name for name in component_names(cfg) if name != "ln_final"]


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
    """
    device = device_of_unit(model, unit, weights)
    stored_on = device_of_unit(model, unit, weights, stored=True)
    weights = {name: tensor for name, tensor in weights.items() if not _is_own_buffer(name)}
    dtype = working_dtype(weights, model.cfg.dtype)
    elements = slicing.ELEMENTS_ON_CPU if device.type == "cpu" else slicing.ELEMENTS_ON_DEVICE
    means = None
    if steps.center_unembed and unit == "unembed":
        tokens_at_once = elements // model.cfg.d_model + 1
        means = vocabulary_means(weights, dtype, device, tokens_at_once)
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
        for name in part.uncut:
            left.pop(name, None)
            if name in copies:  # a folded norm may be gone
                left[name] = copies.pop(name)
        carried = part.to_carry(left)
    for name, value in left.items():
        write(model, full_name(unit, name), value, weights[name], stored_on)


def complete_unit(model: Any, unit: str, weights: Weights) -> Weights:
    """One unit's weights with the missing ones filled in, checked against the model's."""
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


def check_shapes(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Check that each weight has the shape of the model's, and has values."""
    for name, own in model.state_dict().items():
        if name in state_dict and not _is_own_buffer(name):
            _check_weight(name, state_dict[name], own)


def _check_weight(name: str, weight: torch.Tensor, own: torch.Tensor) -> None:
    # As torch's load_state_dict: one element may fill a scalar (Apertus keeps its alphas so).
    if weight.shape != own.shape and (own.dim() > 0 or weight.numel() != 1):
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}, but this model's config asks for "
            f"{tuple(own.shape)}: the weights and the config are not of the same model"
        )
    if weight.is_meta:
        raise ValueError(
            f"{name} is on the meta device, so it has a shape but no values; load the model that "
            "it comes from with its weights"
        )


def _default_value(name: str, own: torch.Tensor) -> torch.Tensor:
    """What a missing weight is: the model's own value, or if it has none yet, the neutral one."""
    leaf = name.rsplit(".", 1)[-1]
    if not own.is_meta:
        if "W_" in name:
            _log.warning("the state dict has no %s: the model keeps its own value", name)
        return own
    if leaf == "w":
        return torch.ones(own.shape, dtype=own.dtype)
    # ALiBi models have a W_pos, but never read it.
    if leaf in ("b", "bias", "W_pos") or leaf.lstrip("_").startswith("b_"):
        return torch.zeros(own.shape, dtype=own.dtype)
    raise ValueError(
        f"the weights have no {name} {tuple(own.shape)}, and nothing can stand in for a weight "
        "matrix; check that the checkpoint is complete and of the architecture in its config"
    )


def _is_own_buffer(name: str) -> bool:
    """Whether it is a mask or rotary table: these depend on n_ctx and are the model's own."""
    return name.rsplit(".", 1)[-1] in ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def device_of_unit(
    model: Any, unit: str, weights: Mapping[str, torch.Tensor], stored: bool = False
) -> torch.device:
    """Where a component runs, or its weights live: by the placement, else where the model has it.

    Weights of an offloaded one live on the host.
    """
    placement: Placement | None = getattr(model, "placement", None)
    if placement is not None:
        return placement.stored_on(unit) if stored else placement.device_of(unit)
    modules = dict(model.named_modules())
    held = modules[unit].parameters() if unit in modules else ()
    return next(tensor.device for tensor in (*held, *weights.values()) if not tensor.is_meta)


@cache
def installed_conventions() -> Conventions:
    """The conventions of the TransformerLens that is installed."""
    is_3x = importlib.util.find_spec("transformer_lens.weight_processing") is not None
    # Folding of MoE came with 3.0, went, and came back; only this warning tells which it is.
    loader = inspect.getsource(original(HookedTransformer, "load_and_process_state_dict"))
    refuses_moe = "You are using MoE, so the layer norm weights can't be folded" in loader
    return Conventions(folds_moe=not refuses_moe, recenters_b_O=is_3x, keeps_folded_norms=is_3x)


def fill(model: Any, source: Source, placement: Placement, steps: Steps) -> None:
    """Read, process and store every component of a model, each on its planned device.

    Raises:
        ValueError: if the source has not the weights that the model's config asks for.
        torch.OutOfMemoryError: saying which device has no room.
    """
    model.placement = placement
    here = placement.here.device_map
    units = [unit for unit in processing_units(model.cfg) if unit in here]

    with hf_logging.tqdm(total=len(units), desc="Loading components") as progress:
        # An offloaded block is folded where it runs.
        devices = [placement.device_of(unit) for unit in units]
        # No closure: a traceback would hold it, and it the model.
        fill_one = functools.partial(_fill_one, model, source, placement, steps)
        if source.computes:
            devices = devices[:1] * len(units)  # one at a time
        elif {device.type for device in devices} == {"cpu"}:  # a worker a core, as if for a device
            at_once = min(torch.get_num_threads(), _MOST_AT_ONCE)
            devices = [torch.device("cpu", index % at_once) for index in range(len(units))]
        each_on_its_device(fill_one, units, devices, progress.update)


def _fill_one(model: Any, source: Source, placement: Placement, steps: Steps, unit: str) -> None:
    device = placement.device_of(unit)
    with naming_full_devices(model, placement, unit):
        weights = complete_unit(model, unit, source.read(unit, device))
        load_component(model, unit, weights, steps)


_MOST_AT_ONCE = 8
"""More do not copy faster: memory is the limit."""
