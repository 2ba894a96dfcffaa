"""`TransformerBridge.process_weights` and compatibility mode, one component of a device at a time.

Each component's weights are processed where they lie, in float32 (or wider), rounded once, and
take the place of the old ones. If that fails on the way, the Bridge is refused from then on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import transformers.utils.logging as hf_logging
from packaging.version import Version
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.moe import MoEBridge, has_batched_experts
from transformer_lens.utilities.bridge_components import apply_fn_to_all_components
from transformer_lens.utilities.quantization import require_readable_weight

from tl_devicefix.dispatch.forward import changing_weights, refuse_unfinished
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.offload.visiting import pin
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.placement import Placement, in_short
from tl_devicefix.placement.workers import each_on_its_device
from tl_devicefix.transformer_bridge.alignment import register_hooks
from tl_devicefix.transformer_bridge.block import forget
from tl_devicefix.transformer_bridge.steps import BLOCK, Processing, private_copies
from tl_devicefix.transformer_bridge.units import Unit, device_of, units
from tl_devicefix.weight_processing import Steps, Weights, WorkingCopies

_log = logging.getLogger(__name__)


def enable_compatibility_mode(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """See TransformerLens's. If it fails, the Bridge is not in compatibility mode.

    Raises:
        ValueError: if the attention matrices cannot be refactored.
        NotImplementedError: if weights are packed (quantised), or have no values.
        RuntimeError: if weights are only partly processed, as an earlier call failed.
    """
    modes = [(each, each.compatibility_mode, each.disable_warnings) for each in _hookables(self)]
    names = [(each, each.name) for each in self.modules() if isinstance(each, HookPoint)]
    was_on = self.compatibility_mode
    try:
        original(self, *args, **kwargs)
    except BaseException:
        for component, mode, silent in modes:
            component.compatibility_mode, component.disable_warnings = mode, silent
        self.compatibility_mode = was_on
        register_hooks(self)
        for point, name in names:  # which compatibility mode changes
            point.name = name
        raise


def _hookables(bridge: Any) -> list[Any]:
    found: list[Any] = []
    apply_fn_to_all_components(bridge, found.append)
    return found


def process_weights(
    self: Any,
    verbose: bool = False,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Process the Bridge's weights in place, each component on the device where it lies.

    See `TransformerBridge.process_weights`. At most one component is held twice on a device.

    Raises:
        ValueError: if the attention matrices cannot be refactored, or, with TransformerLens 3, if
            blocks are offloaded.
        NotImplementedError: if weights are packed (quantised), or have no values.
        RuntimeError: if weights are only partly processed, as an earlier call failed.
        torch.OutOfMemoryError: saying at which component.
    """
    refuse_unfinished(self)
    if self._weights_processed:
        _log.warning(
            "process_weights was already applied to this bridge, so it is skipped: boot it again "
            "to process its weights in another way."
        )
        return
    for name, parameter in self.original_model.named_parameters():
        require_readable_weight(
            parameter,
            operation=f"process weights ({name})",
            owner=self.original_model,
            remedy="Load the model dequantized, or use the bridge without weight processing "
            "(enable_compatibility_mode(no_processing=True)).",
        )
    _refuse_offloaded(self)
    if center_unembed and (getattr(self.cfg, "output_logits_soft_cap", None) or 0) > 0:
        _log.warning("center_unembed=True cannot be done with a logit softcap: set to False.")
        center_unembed = False
    steps = Steps(
        fold_ln,
        center_writing_weights,
        center_unembed,
        fold_value_biases,
        refactor_factored_attn_matrices,
    )
    processing = Processing(steps, self.cfg, self.adapter)
    forget(self)
    with changing_weights(self):
        _process(self, processing, verbose)


def _refuse_offloaded(bridge: Any) -> None:
    placement: Placement | None = getattr(bridge, "placement", None)
    offloaded = [c.name for c in placement.components if c.offloaded] if placement else []
    if offloaded and installed() < Version("4.dev0"):
        raise ValueError(
            f"{in_short(offloaded)} are offloaded, but TransformerLens {installed()} keeps folded "
            "MLP weights beside a Bridge's parameters, where they cannot visit a device: leave the "
            "weights unprocessed (no_processing=True), offload nothing, or use TransformerLens 4"
        )


def _process(bridge: Any, processing: Processing, verbose: bool) -> None:
    def process(unit: Unit) -> None:
        if verbose:
            print(f"Processing {unit.name}")
        with _naming(unit.name):
            _process_unit(bridge, unit, processing)

    todo = units(bridge)
    devices = [_device_of_unit(bridge, unit) for unit in todo]
    with hf_logging.tqdm(total=len(todo), desc="Processing components") as progress:
        each_on_its_device(process, todo[:-1], devices[:-1], progress.update)
        # The unembedding after all others, as some adapters remember that they have seen it.
        each_on_its_device(process, todo[-1:], devices[-1:], progress.update)
    bridge.adapter.postprocess_weights(bridge)
    if getattr(bridge, "placement", None) is not None:
        pin(bridge, bridge.placement)  # the weights are other tensors now
    bridge._weights_processed = True


@contextlib.contextmanager
def _naming(unit: str) -> Iterator[None]:
    """Say what was being processed when a device had no room for it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())
        raise torch.OutOfMemoryError(
            f"a device ran out of memory while {unit} was processed, which takes half as much "
            f"again as its weights in float32, beside the model ({reason}): boot the bridge again, "
            "with less on that device by max_memory"
        ) from error


def _process_unit(bridge: Any, unit: Unit, processing: Processing) -> None:
    given, device = unit.weights, _device_of_unit(bridge, unit)
    unit.weights = {}
    if not given:
        return
    with torch.no_grad():
        processed = private_copies(_named_for_steps(unit.name, given), device)
        if unit.name in ("embed", "pos_embed"):
            processing.of_embedding(processed)
        elif unit.name == "unembed":
            processing.of_unembed(processed)
        elif unit.name.startswith("blocks."):
            processing.of_block(processed)
        mlp = getattr(unit.components.get(unit.name), "mlp", None)
        if isinstance(mlp, MoEBridge):
            _replace_by_copies(unit.components[unit.name])
            for name in list(processed):
                processed[name] = processed[name]  # a copy each, for the same reason
        _replace(unit, given, processed)
        if isinstance(mlp, MoEBridge) and has_batched_experts(mlp) and processing.asked.fold_ln:
            _fold_into_batched_experts(bridge, unit)


def _device_of_unit(bridge: Any, unit: Unit) -> torch.device:
    """Where a unit is processed: where most of it lies, or, if it is offloaded, where it runs."""
    placement: Placement | None = getattr(bridge, "placement", None)
    lies_on = device_of(unit.weights)
    if placement is None or lies_on is None:
        return lies_on or HOST
    return placement.device_for(unit.name)


def _named_for_steps(unit: str, weights: Weights) -> Weights:
    """A block's weights as if it were the first, others as they are named."""
    if not unit.startswith("blocks."):
        return dict(weights)
    return {name.replace(f"{unit}.", BLOCK, 1): tensor for name, tensor in weights.items()}


def _replace(unit: Unit, given: Weights, processed: WorkingCopies) -> None:
    """Give the Bridge's components their processed weights, rounded, where the old ones were."""
    by_component: dict[str, Weights] = {name: {} for name in unit.components}
    for named, tensor in _popped(processed):
        name = named
        if unit.name.startswith("blocks."):
            name = named.replace(BLOCK, f"{unit.name}.", 1)
        if name not in given:  # a bias that folding has made is like its weight
            weight = f"{name.rpartition('.')[0]}.weight"
            component, within = unit.places[weight]
            unit.places[name] = component, f"{within.rpartition('.')[0]}.bias".lstrip(".")
            given[name] = given[weight]
        component, within = unit.places[name]
        like = given[name]
        by_component[component][within] = tensor.to(like.device, like.dtype)
        del tensor
    for component, weights in by_component.items():
        if weights:
            unit.components[component].set_processed_weights(weights)  # type: ignore[operator]


def _popped(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    while weights:
        name = next(iter(weights))
        yield name, dict.pop(weights, name)


def _fold_into_batched_experts(bridge: Any, unit: Unit) -> None:
    """Fold a block's ln2 into experts that are stacked in one parameter, as TransformerLens does.

    That reads blocks by their position, so the block is in its place among none.
    """
    kind, _, index = unit.name.partition(".")
    blocks = [None] * int(index) + [unit.components[unit.name]]
    only = SimpleNamespace(adapter=bridge.adapter, cfg=bridge.cfg, **{kind: blocks})
    type(bridge)._fold_layer_norms_into_batched_experts(only)


def _replace_by_copies(block: Any) -> None:
    """Have a block's MLP and norms hold copies, as experts are changed in place."""
    copies: dict[int, nn.Parameter] = {}
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module._parameters[name] = copies.setdefault(id(parameter), copy)
