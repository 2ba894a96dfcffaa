"""`TransformerBridge.process_weights` and compatibility mode, one component at a time per device.

Each component is processed on its device, in float32 or wider, and rounded once into its parameter.
If processing fails halfway, the Bridge refuses to run: some weights are folded and others
are not.

- Blocks: by the static methods of the installed `ProcessWeights`, which know every
  architecture. They are given one block at a time.
- Value biases: by this package; TransformerLens's method fails with grouped-query attention.
- Embeddings and unembedding: by `tl_devicefix.weight_processing`, in place in a working copy. They
  are the largest components, and `ProcessWeights` would need memory for a second copy.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers.utils.logging as hf_logging
from packaging.version import Version
from torch import nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.moe import MoEBridge, has_batched_experts
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformer_lens.utilities.quantization import require_readable_weight
from transformer_lens.weight_processing import ProcessWeights

from tl_devicefix.dispatch.forward import changing_weights, refuse_unfinished
from tl_devicefix.errors import refuse_unknown
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.multihost.remote_block import call_everywhere
from tl_devicefix.offload import pin
from tl_devicefix.placement.devices import CPU
from tl_devicefix.placement.elsewhere import TensorElsewhere
from tl_devicefix.placement.fitting import naming_full_devices
from tl_devicefix.placement.placement import in_short, placement_of
from tl_devicefix.placement.workers import each_on_its_device
from tl_devicefix.transformer_bridge.components import Unit, bridge_components, units
from tl_devicefix.transformer_bridge.fused import forget_fused
from tl_devicefix.transformer_bridge.twin import EXTRA_PARTS, check_bridge_numbers
from tl_devicefix.twin import OnMismatch, chosen_action
from tl_devicefix.weight_processing import Steps, Weights, check_refactorable, uses_layer_norm
from tl_devicefix.weight_processing.slices import WorkingCopies, working_dtype
from tl_devicefix.weight_processing.steps import (
    center,
    center_unembed_weights,
    fold_layer_norm_into_unembed,
    fold_value_biases_of_block,
)

_log = logging.getLogger(__name__)
_REFACTORS = "refactor_factored_attn_matrices"
_FLAGS = "fold_ln center_writing_weights center_unembed fold_value_biases"


@patches(
    "TransformerBridge",
    takes=f"self disable_warnings no_processing {_FLAGS}",
    why="refuses weights that cannot be processed before it changes any",
)
def enable_compatibility_mode(
    original: Callable[..., None],
    self: TransformerBridge,
    *args: object,
    on_mismatch: OnMismatch | None = None,
    **kwargs: object,
) -> None:
    """See TransformerLens's method. Weights that cannot be processed are refused before any change.

    Args:
        on_mismatch: as for `boot_transformers`: what to do if a tiny model, processed in the same
            way, does not give the same numbers as transformers.

    Raises:
        ValueError: if the attention matrices cannot be refactored, or if `hf_model` has parts
            that its config does not describe.
        NotImplementedError: if weights are packed (quantised), or have no values.
        RuntimeError: if weights are only partly processed after an earlier call failed.
    """
    takes = inspect.signature(original)
    refuse_unknown("enable_compatibility_mode", kwargs, [*takes.parameters, "on_mismatch"])
    bound = takes.bind(self, *args, **kwargs)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    if not bound.arguments["no_processing"] and not self._weights_processed:
        _check_processable(self, bound.arguments[_REFACTORS])
    extra = vars(self).get(EXTRA_PARTS)
    if extra and chosen_action(on_mismatch) != "ignore":
        raise ValueError(
            "compatibility mode would leave out parts of hf_model that its config does not "
            f"describe ({extra}): undo the change, leave compatibility mode out, or pass "
            "on_mismatch='ignore'"
        )
    hf_config: Any = getattr(self.original_model, "config", None)
    name = str(self.cfg.model_name)
    # Keep an earlier warning if this call neither processes the weights again nor checks them.
    stays = self._weights_processed or chosen_action(on_mismatch) == "ignore"
    earlier = vars(self).get("numbers_warning") if stays else None
    warning = check_bridge_numbers(hf_config, name, on_mismatch, arguments)
    self.__dict__["numbers_warning"] = earlier or warning
    forget_fused(self)  # some modules compute differently in compatibility mode
    original(self, *args, **kwargs)
    call_everywhere(self, "enable_compatibility_mode", {**arguments, "on_mismatch": "ignore"})


@patches(
    "TransformerBridge",
    takes=f"self verbose {_FLAGS}",
    why="processes each component on its own device, and rounds it once",
)
def process_weights(
    self: TransformerBridge,
    verbose: bool = False,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Process the Bridge's weights in place, each component on its own device.

    See `TransformerBridge.process_weights`. A device needs room for its weights, and for a working
    copy of one component.

    Raises:
        ValueError: if the attention matrices cannot be refactored, or, on TransformerLens 3, if
            blocks are offloaded.
        NotImplementedError: if weights are packed (quantised), or have no values.
        RuntimeError: if weights are only partly processed after an earlier call failed.
        torch.OutOfMemoryError: if a device is full. The message names the component.
    """
    if self._weights_processed:
        _log.warning(
            "process_weights was already applied to this bridge, so it is skipped: boot it again "
            "to process its weights in another way."
        )
        return
    _check_processable(self, refactor_factored_attn_matrices)
    if center_unembed and (getattr(self.cfg, "output_logits_soft_cap", None) or 0) > 0:
        _log.warning("center_unembed=True cannot be done with a logit softcap: set to False.")
        center_unembed = False
    flags = fold_ln, center_writing_weights, center_unembed, fold_value_biases
    steps = Steps(*flags, refactor_factored_attn_matrices)
    if fold_value_biases and (part := _part_preventing_fold(self)):
        steps = steps.without_value_biases(part)
    requested = {name: getattr(steps, name) for name in (*_FLAGS.split(), _REFACTORS)}
    processing = Processing(steps, self)
    forget_fused(self)
    with changing_weights(self):
        call_everywhere(self, "process_weights", {"verbose": verbose, **requested})
        _process(self, processing, verbose)


def _check_processable(bridge: TransformerBridge, refactors: bool) -> None:
    refuse_unfinished(bridge)
    placement = placement_of(bridge)
    # A worker's Bridge also has other hosts' components, which its placement lacks.
    names = {name for name, _ in bridge_components(bridge)}
    is_in_part = placement is not None and not names <= placement.device_map.keys()
    for name, parameter in bridge.original_model.named_parameters():
        if isinstance(parameter, TensorElsewhere) or (is_in_part and parameter.is_meta):
            continue  # another host processes it
        require_readable_weight(
            parameter,
            operation=f"process weights ({name})",
            owner=bridge.original_model,
            remedy="Load the model dequantized, or use the bridge without weight processing "
            "(enable_compatibility_mode(no_processing=True)).",
        )
    offloaded = [c.name for c in placement.components if c.offloaded] if placement else []
    if offloaded and installed() < Version("4.dev0"):
        raise ValueError(
            f"{in_short(offloaded)} are offloaded, but TransformerLens {installed()} keeps folded "
            "MLP weights outside of a Bridge's parameters, so they cannot be copied to a device: "
            "leave out compatibility mode, offload nothing, or use TransformerLens 4"
        )
    if refactors:
        cfg = bridge.cfg
        is_grouped = cfg.n_key_value_heads not in (None, cfg.n_heads)
        check_refactorable(cfg, is_grouped, _part_preventing_fold(bridge))


_USUAL_PARTS = frozenset(("q", "k", "v", "o", "qkv", "q_norm", "k_norm"))
"""With these parts alone, attention writes `z @ W_O`, with z the weighted means of the values.

So a value bias adds a constant, and can be folded.
"""


def _part_preventing_fold(bridge: TransformerBridge) -> str | None:
    """Return the part of attention that rules out folding value biases; None if none does."""
    block: Any
    for name, block in bridge_components(bridge):
        attention = block._modules.get("attn")
        if not name.startswith("blocks.") or "v" not in getattr(attention, "submodules", ()):
            continue
        parts = {part: attention._modules[part] for part in attention.submodules}
        if getattr(parts["v"].original_component, "bias", None) is None:
            continue
        if others := sorted(parts.keys() - _USUAL_PARTS):  # such as a gate or a norm of values
            return others[0]
        # Skip parameters of the block's other parts: BERT's attention holds a norm.
        other_parts = [block._modules[part] for part in block.submodules if part != "attn"]
        known_ids = {id(p) for part in (*parts.values(), *other_parts) for p in part.parameters()}
        for path, parameter in attention.original_component.named_parameters():
            if id(parameter) not in known_ids:  # such as sinks
                return path
        # W_Q and W_O have n_heads * d_head * d_model elements; a larger W_Q also computes a gate.
        if parts["q"].weight.numel() > parts["o"].weight.numel():
            return "a gate in its query projection"
    return None


def _process(bridge: TransformerBridge, processing: Processing, verbose: bool) -> None:
    def process(unit: Unit) -> None:
        if verbose:
            print(f"Processing {unit.name}")
        with naming_full_devices(placement_of(bridge), unit.name):
            _process_unit(bridge, unit, processing)

    todo = []  # without other hosts' units, whose weights have no values here
    for unit in units(bridge):
        if not any(w.is_meta or isinstance(w, TensorElsewhere) for w in unit.weights.values()):
            todo.append(unit)
    devices = [_device_of_unit(bridge, unit) for unit in todo]
    with hf_logging.tqdm(total=len(todo), desc="Processing components") as progress:
        each_on_its_device(process, todo[:-1], devices[:-1], progress.update)
        # The unembedding comes last: some adapters set a flag once they have seen it.
        each_on_its_device(process, todo[-1:], devices[-1:], progress.update)
    bridge.adapter.postprocess_weights(bridge)
    if (placement := placement_of(bridge)) is not None:
        pin(bridge, placement)  # pin again: processing replaced the tensors
    bridge._weights_processed = True


def _process_unit(bridge: TransformerBridge, unit: Unit, processing: Processing) -> None:
    originals, device = unit.weights, _device_of_unit(bridge, unit)
    unit.weights = {}  # the caller keeps the unit, which would keep the old weights
    if not originals:
        return
    block = _BLOCK if unit.name.startswith("blocks.") else f"{unit.name}."
    with torch.no_grad():
        # Rename the block to block 0, the only one that ProcessWeights gets.
        named = {name.replace(f"{unit.name}.", block, 1): originals[name] for name in originals}
        processed = WorkingCopies(named, device, working_dtype(named, torch.float32))
        if unit.name in ("embed", "pos_embed"):
            processing.process_embedding(processed)
        elif unit.name == "unembed":
            processing.process_unembed(processed)
        elif unit.name.startswith("blocks."):
            processing.process_block(processed, unit.components[unit.name])
        _assign_processed(unit, originals, processed)
        mlp = getattr(unit.components.get(unit.name), "mlp", None)
        if isinstance(mlp, MoEBridge) and has_batched_experts(mlp) and processing.requested.fold_ln:
            _fold_into_batched_experts(bridge, unit)


def _device_of_unit(bridge: TransformerBridge, unit: Unit) -> torch.device:
    """Return the device to process a unit on: the one that runs it, also if it is offloaded."""
    placement = placement_of(bridge)
    if placement is not None and unit.weights:
        return placement.device_for(unit.name)
    return next((weight.device for weight in unit.weights.values()), CPU)


def _assign_processed(unit: Unit, originals: Weights, processed: WorkingCopies) -> None:
    """Round processed weights, and replace the old ones with them."""
    by_component: dict[str, Weights] = {name: {} for name in unit.components}
    for named in list(processed):
        name, tensor = named, dict.pop(processed, named)
        if unit.name.startswith("blocks."):
            name = named.replace(_BLOCK, f"{unit.name}.", 1)
        if name not in originals:  # a bias that folding added: dtype and device of its weight
            weight = f"{name.rpartition('.')[0]}.weight"
            component, within = unit.places[weight]
            unit.places[name] = component, f"{within.rpartition('.')[0]}.bias".lstrip(".")
            originals[name] = originals[weight]
        component, within = unit.places[name]
        like = originals[name]
        by_component[component][within] = tensor.to(like.device, like.dtype)
        del tensor
    for component, weights in by_component.items():
        if weights:
            unit.components[component].set_processed_weights(weights)  # type: ignore[operator]


def _fold_into_batched_experts(bridge: TransformerBridge, unit: Unit) -> None:
    """Fold a block's ln2 into experts that are stacked in one parameter."""
    kind, _, index = unit.name.partition(".")
    # TransformerLens's method skips None. The block keeps its index, which a warning names.
    blocks = [None] * int(index) + [unit.components[unit.name]]
    # `only` stands in for the Bridge, whose own list has all blocks.
    only = SimpleNamespace(adapter=bridge.adapter, cfg=bridge.cfg, **{kind: blocks})
    fold: Callable[[Any], None] = type(bridge)._fold_layer_norms_into_batched_experts
    fold(only)


_BLOCK = "blocks.0."
"""The prefix of a block's weights while they are processed, whichever block it is."""


class Processing:
    """The steps for one Bridge, and methods that apply them to one component's weights."""

    def __init__(self, requested: Steps, bridge: TransformerBridge) -> None:
        self.requested, self.cfg, self.adapter = requested, bridge.cfg, bridge.adapter
        self.steps = _applicable(requested, bridge)
        """The requested steps that TransformerLens would apply to this model."""

    def process_block(self, weights: Weights, block: Any) -> None:
        """Process a block's weights in place. Their names begin with "blocks.0." for any block."""
        steps, adapter, cfg = self.steps, self.adapter, copy.copy(self.cfg)
        cfg.n_layers = 1
        self._preprocess(weights)
        if steps.fold_ln:
            centers = uses_layer_norm(self.cfg)
            options: dict[str, Any] = {"fold_biases": centers, "center_weights": centers}
            options |= {"layer_idx": 0, "gqa": "" if cfg.n_key_value_heads is None else "_"}
            ProcessWeights._fold_layer(weights, cfg, adapter=adapter, **options)
        if steps.center_writing_weights:
            # ProcessWeights fails without embeddings, so it gets stand-ins.
            for name in ("embed.weight", "pos_embed.weight"):
                weights[name] = torch.zeros(1, cfg.d_model)
            ProcessWeights.center_writing_weights(weights, cfg, adapter=adapter)
            del weights["embed.weight"], weights["pos_embed.weight"]
        if steps.fold_value_biases and f"{_BLOCK}attn.v.bias" in weights:
            _fold_value_biases(weights, cfg, block.attn.o.original_component)
        if steps.recenter_b_O and f"{_BLOCK}attn.o.bias" in weights:
            weights[f"{_BLOCK}attn.o.bias"] -= weights[f"{_BLOCK}attn.o.bias"].mean()
        if steps.refactor_factored_attn_matrices:
            attention = {n: weights[n] for n in weights if n.startswith(f"{_BLOCK}attn.")}
            refactor = ProcessWeights.refactor_factored_attn_matrices
            for name, tensor in refactor(attention, cfg, adapter=adapter).items():
                weights[name] = tensor

    def process_embedding(self, weights: Weights) -> None:
        """Process "embed.weight" or "pos_embed.weight" [tokens or positions, d_model] in place."""
        is_post_norm = getattr(self.cfg, "original_architecture", None) in POST_NORM_ARCHITECTURES
        if self.steps.center_writing_weights and not is_post_norm:
            center(weights, "embed.weight", "pos_embed.weight")

    def process_unembed(self, weights: Weights) -> None:
        """Process "unembed.weight" [d_vocab, d_model] and its bias with ln_final, in place."""
        self._preprocess(weights)
        if "unembed.weight" not in weights:
            return
        folds_bias = uses_layer_norm(self.cfg) and not getattr(self.cfg, "final_rms", False)
        # `.T` is a view: in-place steps on `head` change `weights` too.
        head = {"unembed.W_U": weights["unembed.weight"].T}  # [d_model, d_vocab]
        if "unembed.bias" in weights:
            head["unembed.b_U"] = weights["unembed.bias"]
        if self.steps.center_unembed:
            center_unembed_weights(head)
        if self.steps.fold_ln and "ln_final.weight" in weights:
            # Norms such as Gemma's multiply by 1 + weight.
            offset = float(bool(getattr(self.cfg, "rmsnorm_uses_offset", False)))
            head["ln_final.w"] = weights["ln_final.weight"] + offset
            if "ln_final.bias" in weights:
                head["ln_final.b"] = weights["ln_final.bias"]
            fold_layer_norm_into_unembed(
                head, fold_biases=folds_bias, center_weights=folds_bias, keep_norms=True
            )
            weights["ln_final.weight"].fill_(1.0 - offset)  # the norm multiplies by 1 now
            if "ln_final.b" in head and "unembed.b_U" in head and folds_bias:
                weights["unembed.bias"] = head["unembed.b_U"]
                weights["ln_final.bias"].zero_()

    def _preprocess(self, weights: Weights) -> None:
        self.adapter._fold_ln_requested = self.requested.fold_ln  # Phi-3's adapter reads it
        preprocessed = self.adapter.preprocess_weights(weights)
        if preprocessed is not weights:
            for name in weights.keys() - preprocessed.keys():
                del weights[name]
            for name, tensor in preprocessed.items():
                weights[name] = tensor


def _applicable(steps: Steps, bridge: TransformerBridge) -> Steps:
    """Return the steps that TransformerLens would apply to this model, and warn as it does."""
    cfg, adapter = bridge.cfg, bridge.adapter
    for name in ("fold_ln", "center_writing_weights"):
        if getattr(steps, name) and not getattr(adapter, f"supports_{name}", True):
            warnings.warn(
                f"{type(adapter).__name__} does not support {name}: it is skipped.", stacklevel=6
            )
            steps = replace(steps, **{name: False})
    if cfg.normalization_type not in ("LN", "LNPre", "RMS", "RMSPre"):
        steps = replace(steps, fold_ln=False)
    if not uses_layer_norm(cfg) or getattr(cfg, "final_rms", False):
        steps = replace(steps, center_writing_weights=False)
    return replace(steps, recenter_b_O=steps.fold_value_biases and steps.center_writing_weights)


def _fold_value_biases(weights: Weights, cfg: TransformerBridgeConfig, output: nn.Module) -> None:
    """Fold value biases into b_O; TransformerLens's method fails with grouped-query attention.

    Args:
        weights: the block's weights; b_O is added if missing.
        cfg: a copy of the Bridge's config, with n_layers=1.
        output: the layer that holds W_O, an nn.Linear or a Conv1D.
    """
    W_O, b_V = weights[f"{_BLOCK}attn.o.weight"], weights[f"{_BLOCK}attn.v.bias"]
    W_O = W_O if type(output).__name__ == "Conv1D" else W_O.T  # [head * d_head, d_model]
    W_O = W_O.reshape(cfg.n_heads, -1, cfg.d_model)  # [head, d_head, d_model]
    b_O = weights.get(f"{_BLOCK}attn.o.bias", W_O.new_zeros(cfg.d_model))
    b_V_of_head = b_V.reshape(-1, W_O.shape[1])  # [head or key_value_head, d_head]
    attention = {"attn.W_O": W_O, "attn.b_V": b_V_of_head, "attn.b_O": b_O}
    fold_value_biases_of_block(attention)
    weights[f"{_BLOCK}attn.o.bias"] = attention["attn.b_O"]
    weights[f"{_BLOCK}attn.v.bias"] = torch.zeros_like(b_V)
