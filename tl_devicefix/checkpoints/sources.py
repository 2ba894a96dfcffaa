"""Sources of weights, read one component at a time, in HookedTransformer's format.

A Hugging Face model is converted one block at a time, by TransformerLens's own converter. For each
block, the converter gets a view of the model. The view shares the model's weights, but has only
that block, and matrices outside the blocks have no values. The given model is not changed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformer_lens.loading_from_pretrained as tl_loading
from torch import nn
from transformers import PreTrainedModel

from tl_devicefix.checkpoints.live_weights import LiveWeights, copy_with
from tl_devicefix.errors import is_own_bug
from tl_devicefix.placement.memory import is_out_of_memory
from tl_devicefix.placement.placement import component_of
from tl_devicefix.weight_processing import Weights

if TYPE_CHECKING:
    from transformer_lens import HookedTransformerConfig


def processing_unit(name: str) -> str:
    """Return the unit with which a weight is processed: its component; for ln_final, unembed."""
    component = component_of(name)
    return "unembed" if component == "ln_final" else component


def name_in_unit(name: str) -> str:
    """Return a name within its unit: "attn.W_Q" for "blocks.3.attn.W_Q"; others stay whole."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def full_name(unit: str, name: str) -> str:
    """Return the full name, the inverse of `name_in_unit`."""
    return f"{unit}.{name}" if unit.startswith("blocks.") else name


class StateDictSource:
    """A whole state dict in HookedTransformer's format, such as the small `.pth` models."""

    computes = False

    def __init__(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        self._units: dict[str, Weights] = {}
        for name, tensor in state_dict.items():
            self._units.setdefault(processing_unit(name), {})[name_in_unit(name)] = tensor

    def read(self, unit: str, device: torch.device) -> Weights:
        """See `HuggingFaceSource.read`."""
        return dict(self._units.get(unit, {}))


_META = torch.device("meta")


class HuggingFaceSource:
    """A Hugging Face model, whose weights may lie anywhere; it is never changed."""

    def __init__(self, hf_model: nn.Module, cfg: HookedTransformerConfig) -> None:
        self._live = LiveWeights(hf_model)
        self.hf_model = self._live.model
        self.computes = self._live.needs_reading
        """True if reading makes new tensors (merged, dequantised): one thread reads at a time."""
        self._cfg = cfg
        self._blocks = _find_blocks(self.hf_model, cfg)

    def read(self, unit: str, device: torch.device) -> Weights:
        """Return the weights of one unit, by their names within it, on `device` or elsewhere.

        Edit only copies: these may alias the source's own tensors.

        Args:
            unit: a component's name; ln_final's weights come with the unembedding's.
            device: the device to merge adapters and dequantise weights on.
        """
        converted = StateDictSource(self._convert(unit, device))
        return converted.read("blocks.0" if unit.startswith("blocks.") else unit, device)

    def _convert(self, unit: str, device: torch.device) -> Weights:
        """Convert one block, which is then called "blocks.0", or the parts outside the blocks."""
        layers = [int(unit.split(".")[1])] if unit.startswith("blocks.") else []
        # Converters scale a Gemma's embedding in its own dtype, which would round it.
        is_scaled = (self._cfg.original_architecture or "").startswith("Gemma") and unit == "embed"
        dtype = self._cfg.dtype if is_scaled else None
        unread = self._embeddings_not_of(unit)
        views = _View(self._live, self._blocks, layers, device, dtype, unread)
        view = views.of(self.hf_model, is_read=not layers)
        cfg = copy.copy(self._cfg)
        cfg.n_layers = len(layers)
        # Converters move some weights to cfg.device, and make missing biases there or on the CPU.
        converted = self._blocks[layers[0]] if layers else self.hf_model
        cfg.device = str(next((p.device for p in converted.parameters() if not p.is_meta), "cpu"))
        cfg.from_checkpoint = False  # otherwise the converter loads the model again
        try:
            # Any official name will do: the weights come from the view.
            weights = tl_loading.get_pretrained_state_dict("gpt2", cfg, view, dtype=cfg.dtype)
            if missing := [name for name, weight in weights.items() if weight is None]:
                raise RuntimeError(f"its {unit} has no {name_in_unit(missing[0])}")
            return weights
        except (AttributeError, RuntimeError) as error:
            if is_out_of_memory(error) or is_own_bug(error):
                raise
            named, own = self._cfg.original_architecture, type(self.hf_model).__name__
            # For a missing weight, converters pass None to einops, whose error does not name it.
            reason = f"a weight of a {named} is missing" if "einops" in str(error) else error
            if named == own:
                raise ValueError(
                    f"TransformerLens cannot convert this {own} ({reason}): try TransformerBridge"
                ) from error
            raise ValueError(
                f"hf_model is a {own}, but the name belongs to a {named} ({reason}); pass the "
                "model of that name, as AutoModelForCausalLM loads it"
            ) from error

    def _embeddings_not_of(self, unit: str) -> set[nn.Module]:
        """Return those of the embedding and the unembedding that this unit does not read."""
        if not isinstance(self.hf_model, PreTrainedModel):
            return set()
        embedding = self.hf_model.get_input_embeddings()
        head = self.hf_model.get_output_embeddings()
        if embedding is None or head is None:  # one may be read as the other
            return set()
        if not hasattr(head, "weight"):
            raise ValueError(
                f"the head of this {type(self.hf_model).__name__} is of class "
                f"{type(head).__name__}, which TransformerLens cannot convert: give it one linear "
                "layer"
            )
        read = {"embed": embedding, "unembed": head}.get(unit)
        shared = head.weight if unit == "unembed" else None  # a tied head may be the embedding
        # Some adapters (PEFT) compute `weight` at each access, so compare the modules too.
        return {m for m in (embedding, head) if m is not read and m.weight is not shared}


Source: TypeAlias = StateDictSource | HuggingFaceSource
"""Weights are read from it, one processing unit at a time."""


def _find_blocks(hf_model: nn.Module, cfg: HookedTransformerConfig) -> nn.ModuleList:
    """Find the list of blocks of a Hugging Face model."""
    hf_config: Any = hf_model.config
    hf_config = getattr(hf_config, "text_config", hf_config)  # multimodal configs nest it
    n_blocks = hf_config.num_hidden_layers
    lists = [
        module
        for name, module in hf_model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == n_blocks
        and "vision" not in name  # a multimodal model has blocks for images too
    ]
    if not lists:
        raise ValueError(
            f"{type(hf_model).__name__} has no list of {n_blocks} blocks (its config's "
            "num_hidden_layers), so it cannot be converted block by block; pass a model of an "
            "architecture that TransformerLens supports"
        )
    if cfg.n_layers > n_blocks:
        raise ValueError(
            f"{cfg.n_layers} layers are asked for, but this {type(hf_model).__name__} has "
            f"{n_blocks}: lower first_n_layers, or give the hf_model that the name belongs to"
        )
    return lists[0]


@dataclass
class _View:
    """Makes a model that shares a model's weights, but has only the given blocks."""

    live: LiveWeights
    blocks: nn.ModuleList
    layers: list[int]
    """The blocks of the view: none or one."""
    device: torch.device
    """The device to compute merged or dequantised weights on."""
    dtype: torch.dtype | None
    """The dtype to widen matrices to; None keeps their own."""
    unread: set[nn.Module]
    """Modules outside the blocks that the unit does not read: their matrices have no values."""

    def of(self, module: nn.Module, is_read: bool) -> nn.Module:
        """Copy a module, sharing the tensors that are read; other matrices have no values."""
        if module is self.blocks:
            return nn.ModuleList(self.of(self.blocks[i], is_read=True) for i in self.layers)
        is_read = is_read and module not in self.unread
        module = self.live.plain_module(module, self.device if is_read else _META)
        shown = functools.partial(self._shown, module, is_read)
        new: nn.Module = copy_with(module, shown, lambda child: self.of(child, is_read))
        return new

    def _shown(
        self, module: nn.Module, is_read: bool, name: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        if not is_read and tensor.dim() > 1:  # a matrix that the unit does not read
            return torch.empty_like(tensor, device=_META)
        tensor = self.live.values(module, name, tensor).detach()
        if self.dtype is not None and tensor.dim() > 1:
            tensor = tensor.to(torch.promote_types(tensor.dtype, self.dtype))
        return tensor
