"""Where weights come from, read one component at a time in HookedTransformer's format.

The conversion is TransformerLens's own. To convert one block, it is shown a model that shares the
given model's weights but has only that block, and whose other matrices have no values; the given
model is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
import transformer_lens.loading_from_pretrained as tl_loading
from torch import nn

from tl_devicefix.folding import Weights
from tl_devicefix.processing import name_in_unit, processing_unit

CONVERTIBLE_NAME = "gpt2"
"""An official name, for calls in which TransformerLens wants one and then does not use it."""


class Source(Protocol):
    """Anything that weights can be read from, one processing unit at a time."""

    def read(self, unit: str, device: torch.device) -> Weights:
        """The weights of one unit, by their names within it, perhaps on `device` already.

        They may alias the source's own tensors, so they are for copying only.
        """


class StateDictSource:
    """A whole state dict in HookedTransformer's format, as the small `.pth` models come."""

    def __init__(self, state_dict: Weights) -> None:
        self._state_dict = state_dict

    def read(self, unit: str, device: torch.device) -> Weights:
        """See `Source.read`."""
        return _of_unit(self._state_dict, unit)


class HuggingFaceSource:
    """A Hugging Face model, wherever its weights lie; it is never changed.

    Raises:
        ValueError: if the model's blocks cannot be found.
    """

    def __init__(self, hf_model: nn.Module, cfg: Any) -> None:
        self._model = hf_model
        self._cfg = cfg
        self._blocks = _find_blocks(hf_model, cfg)

    def read(self, unit: str, device: torch.device) -> Weights:
        """See `Source.read`.

        Raises:
            ValueError: if a weight is on the meta device, so has no values.
        """
        converted = self._convert(unit)
        in_block = unit.startswith("blocks.")
        weights = _of_unit(converted, "blocks.0" if in_block else unit)
        for name, tensor in weights.items():
            if tensor.is_meta:
                raise ValueError(
                    f"{unit}: {name} is on the meta device, so it has a shape but no values; load "
                    "the model with its weights (device_map=None) and pass that as hf_model"
                )
        return weights

    def _convert(self, unit: str) -> Weights:
        """Convert one block, then called "blocks.0", or what is outside the blocks."""
        layers = [int(unit.split(".")[1])] if unit.startswith("blocks.") else []
        view = _View(self._blocks, layers, self._in_converter(unit)).of(self._model)
        cfg = copy.copy(self._cfg)
        cfg.n_layers = len(layers)
        # Converters make missing biases on cfg.device, or on the CPU, and move some weights there.
        cfg.device = str(_device_of(self._blocks[layers[0]] if layers else self._model))
        cfg.from_checkpoint = False  # or TransformerLens would load the checkpoint again
        try:
            return tl_loading.get_pretrained_state_dict(
                CONVERTIBLE_NAME, cfg, view, dtype=cfg.dtype
            )
        except AttributeError as error:
            given = type(self._model).__name__
            if given == cfg.original_architecture:
                reason = "this transformers lays out otherwise than this TransformerLens reads"
                remedy = "install versions of the two that were released together"
            else:
                reason = f"cannot be read as the {cfg.original_architecture} that is named"
                remedy = "pass the model that belongs to the name"
            raise ValueError(
                f"hf_model is a {given}, which {reason} ({error}); {remedy}"
            ) from error

    def _in_converter(self, unit: str) -> torch.dtype | None:
        """The dtype that matrices are converted in, if not their own.

        Converters copy matrices, but scale the embedding of a Gemma: in the dtype asked for.
        """
        scaled = unit == "embed" and (self._cfg.original_architecture or "").startswith("Gemma")
        return self._cfg.dtype if scaled else None


def _of_unit(state_dict: Weights, unit: str) -> Weights:
    return {
        name_in_unit(name): tensor
        for name, tensor in state_dict.items()
        if processing_unit(name) == unit
    }


def _find_blocks(hf_model: nn.Module, cfg: Any) -> nn.ModuleList:
    """The one list of blocks in a Hugging Face model."""
    hf_config: Any = hf_model.config
    hf_config = getattr(hf_config, "text_config", hf_config)  # multimodal models nest it
    n_blocks = hf_config.num_hidden_layers
    lists = [m for m in hf_model.modules() if isinstance(m, nn.ModuleList) and len(m) == n_blocks]
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
        blocks: the model's list of blocks.
        layers: which of them the view has (none or one).
        dtype: the dtype to show matrices in; by default their own.
    """

    def __init__(self, blocks: nn.ModuleList, layers: list[int], dtype: torch.dtype | None) -> None:
        self._blocks = blocks
        self._layers = layers
        self._dtype = dtype

    def of(self, module: nn.Module) -> nn.Module:
        """The view of the model, or of a part of it that is not in a block."""
        if module is self._blocks:
            here = [self._blocks[layer] for layer in self._layers]
            return nn.ModuleList(_copy_structure(block, self._shown) for block in here)
        return _copy_structure(module, self._outside, self.of)

    def _outside(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._layers and tensor.dim() > 1:
            return torch.empty_like(tensor, device="meta")
        return self._shown(tensor)

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.is_meta or not tensor.is_floating_point():
            return tensor
        if tensor.dim() <= 1:
            # Converters add 1 to the norms of a Gemma: not in less than float32.
            return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if self._dtype is None:
            return tensor
        return tensor.to(torch.promote_types(tensor.dtype, self._dtype))


def _copy_structure(
    module: nn.Module,
    convert: Callable[[torch.Tensor], torch.Tensor],
    copy_child: Callable[[nn.Module], nn.Module] | None = None,
) -> nn.Module:
    """A copy of a module and its submodules, whose tensors are `convert` of the module's own."""
    if copy_child is None:

        def copy_child(child: nn.Module) -> nn.Module:
            return _copy_structure(child, convert)

    new = copy.copy(module)
    new.__dict__ = dict(module.__dict__)
    new._parameters = {
        name: None if p is None else nn.Parameter(convert(p), requires_grad=False)
        for name, p in module._parameters.items()
    }
    new._buffers = {name: None if b is None else convert(b) for name, b in module._buffers.items()}
    new._modules = {
        name: None if child is None else copy_child(child)
        for name, child in module._modules.items()
    }
    return new
