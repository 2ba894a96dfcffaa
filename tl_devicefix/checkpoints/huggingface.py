"""A Hugging Face model as a source, converted one block at a time.

The conversion is TransformerLens's own. To convert one block, it is shown a model that shares the
given model's weights but has only that block, and whose other matrices have no values; the given
model is not touched.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformer_lens.loading_from_pretrained as tl_loading
from torch import nn
from transformers import PreTrainedModel

from tl_devicefix.checkpoints.live_weights import LiveWeights
from tl_devicefix.checkpoints.state_dict import of_unit
from tl_devicefix.placement.memory import is_out_of_memory
from tl_devicefix.weight_processing import Weights

CONVERTIBLE_NAME = "gpt2"
"""An official name, for calls in which TransformerLens wants one and then does not use it."""

META = torch.device("meta")


class HuggingFaceSource:
    """A Hugging Face model, wherever and however its weights lie; it is never changed.

    Raises:
        ValueError: if the model's blocks cannot be found, or its adapters or its quantisation
            cannot be undone.
        ImportError: if it uses PEFT or bitsandbytes, and that is not installed.
    """

    def __init__(self, hf_model: nn.Module, cfg: Any) -> None:
        self._live = LiveWeights(hf_model)
        self._model = self._live.model
        self.computes = self._live.computes
        self._cfg = cfg
        self._blocks = _find_blocks(self._model, cfg)

    def read(self, unit: str, device: torch.device) -> Weights:
        """See `Source.read`.

        Raises:
            ValueError: if a weight is on the meta device, so has no values.
        """
        converted = self._convert(unit, device)
        in_block = unit.startswith("blocks.")
        weights = of_unit(converted, "blocks.0" if in_block else unit)
        for name, tensor in weights.items():
            if tensor.is_meta:
                raise ValueError(
                    f"{unit}: {name} is on the meta device, so it has a shape but no values; load "
                    "the model with its weights (device_map=None) and pass that as hf_model"
                )
        return weights

    def _convert(self, unit: str, device: torch.device) -> Weights:
        """Convert one block, then called "blocks.0", or what is outside the blocks."""
        layers = [int(unit.split(".")[1])] if unit.startswith("blocks.") else []
        view = _View(
            self._live,
            self._blocks,
            layers,
            device,
            self._matrices_in(unit),
            unwanted=self._embeddings_not_of(unit),
        ).of(self._model)
        cfg = copy.copy(self._cfg)
        cfg.n_layers = len(layers)
        # Converters make missing biases on cfg.device, or on the CPU, and move some weights there.
        cfg.device = str(_device_of(self._blocks[layers[0]] if layers else self._model))
        cfg.from_checkpoint = False  # or TransformerLens would load the checkpoint again
        try:
            return tl_loading.get_pretrained_state_dict(
                CONVERTIBLE_NAME, cfg, view, dtype=cfg.dtype
            )
        except (AttributeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            given = type(self._model).__name__
            if given != cfg.original_architecture:
                raise _other_architecture(given, cfg.original_architecture, error) from error
            if isinstance(error, RuntimeError):
                raise
            raise ValueError(
                f"hf_model is a {given}, which this transformers lays out otherwise than this "
                f"TransformerLens reads ({error}); install versions of the two that were released "
                "together"
            ) from error

    def _embeddings_not_of(self, unit: str) -> set[nn.Module]:
        """The embedding and the unembedding, less what is read for this unit: both if tied."""
        if not isinstance(self._model, PreTrainedModel):
            return set()
        of_unit = {
            "embed": self._model.get_input_embeddings(),
            "unembed": self._model.get_output_embeddings(),
        }
        if None in of_unit.values():  # then the embedding may be read for both
            return set()
        read = of_unit.get(unit)
        shared = None if read is None else read.weight  # made anew at each read by some adapters
        return {
            module
            for module in of_unit.values()
            if module is not read and module.weight is not shared
        }

    def _matrices_in(self, unit: str) -> torch.dtype | None:
        """The dtype that matrices are converted in, if not their own.

        Converters copy matrices, but scale the embedding of a Gemma: in the dtype asked for.
        """
        scaled = unit == "embed" and (self._cfg.original_architecture or "").startswith("Gemma")
        return self._cfg.dtype if scaled else None


def _other_architecture(given: str, named: str, error: Exception) -> ValueError:
    """What to raise where a model is not of the architecture that TransformerLens was told."""
    unknown_to_einops = "einops" in str(error)  # which is given None for a weight that is missing
    reason = f"a weight of a {named} is missing" if unknown_to_einops else str(error)
    return ValueError(
        f"hf_model is a {given}, which cannot be read as the {named} that is named ({reason}); "
        "pass the model that belongs to the name, of AutoModelForCausalLM"
    )


def _find_blocks(hf_model: nn.Module, cfg: Any) -> nn.ModuleList:
    """The one list of blocks in a Hugging Face model."""
    hf_config: Any = hf_model.config
    hf_config = getattr(hf_config, "text_config", hf_config)  # multimodal models nest it
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
            f"{cfg.n_layers} layers are asked for, but hf_model has {n_blocks}; check "
            "first_n_layers, and that hf_model is the model that is named"
        )
    return lists[0]


def _device_of(module: nn.Module) -> torch.device:
    """Where a module's first weight with values is; the CPU if none has any."""
    there = (p.device for p in module.parameters() if not p.is_meta)
    return next(there, torch.device("cpu"))


class _View:
    """Makes a model that shares a model's weights, but has only the given blocks.

    When there are blocks, matrices outside them have no values: only the blocks' are wanted.

    Args:
        live: the model's real weights.
        blocks: the model's list of blocks.
        layers: which of them the view has (none or one).
        device: where to compute weights that have to be computed first.
        dtype: the dtype to show matrices in; by default their own.
        unwanted: modules outside the blocks whose matrices have no values either.
    """

    def __init__(
        self,
        live: LiveWeights,
        blocks: nn.ModuleList,
        layers: list[int],
        device: torch.device,
        dtype: torch.dtype | None,
        unwanted: set[nn.Module],
    ) -> None:
        self._live = live
        self._blocks = blocks
        self._layers = layers
        self._device = device
        self._dtype = dtype
        self._unwanted = unwanted
        self._widened: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, model: nn.Module) -> nn.Module:
        """The view of the model."""
        return self._of(model, wanted=not self._layers)

    def _of(self, module: nn.Module, wanted: bool) -> nn.Module:
        """A copy of a module whose tensors are the module's own, with values if they are wanted."""
        if module is self._blocks:
            return nn.ModuleList(self._of(self._blocks[i], wanted=True) for i in self._layers)
        wanted = wanted and module not in self._unwanted
        module = self._live.plain(module, self._device if wanted else META)
        new = copy.copy(module)
        new.__dict__ = dict(module.__dict__)
        new._parameters = {
            name: None
            if p is None
            else nn.Parameter(self._shown(module, name, p, wanted), requires_grad=False)
            for name, p in module._parameters.items()
        }
        new._buffers = {
            name: None if b is None else self._shown(module, name, b, wanted)
            for name, b in module._buffers.items()
        }
        new._modules = {
            name: None if child is None else self._of(child, wanted)
            for name, child in module._modules.items()
        }
        return new

    def _shown(
        self, module: nn.Module, name: str, tensor: torch.Tensor, wanted: bool
    ) -> torch.Tensor:
        if not wanted and tensor.dim() > 1:
            return torch.empty_like(tensor, device=META)
        tensor = self._live.values(module, name, tensor).detach()
        if tensor.is_meta or not tensor.is_floating_point():
            return tensor
        if tensor.dim() <= 1:
            # Converters add 1 to the norms of a Gemma: not in less than float32.
            return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if self._dtype is None:
            return tensor
        # What is tied stays so; with the original, so that no other tensor gets its pointer.
        key = tensor.data_ptr()
        if key not in self._widened:
            widened = tensor.to(torch.promote_types(tensor.dtype, self._dtype))
            self._widened[key] = tensor, widened
        return self._widened[key][1]
