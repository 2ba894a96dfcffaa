"""What a live Hugging Face model's modules would hold without adapters, quantisation or offloading.

The real weights, module by module: what accelerate offloaded is read from where it lies, what
bitsandbytes packed is dequantised, and active PEFT adapters are merged in float32 or wider. Only
the module that is asked for is copied, and the given model is never changed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tl_devicefix.checkpoints.adapters import (
    in_use,
    is_adapter,
    merged,
    out_of_wrappers,
    refuse_unmergeable,
)
from tl_devicefix.checkpoints.offloaded import OffloadedWeights
from tl_devicefix.checkpoints.quantised import dequantised, is_quantised, refuse_packed


class LiveWeights:
    """A model, read as if it had no adapters, no quantisation and no offloading.

    Attributes:
        model: the model to convert: the given one, out of its PEFT wrappers.
        computes: whether some values have to be computed, or read from where they are offloaded.
        values: the values of a module's tensor, wherever they are (`OffloadedWeights.values`).

    Raises:
        ValueError: one sentence, if its adapters or its quantisation cannot be undone.
        ImportError: if it uses PEFT or bitsandbytes, and that cannot be imported.
    """

    def __init__(self, hf_model: nn.Module) -> None:
        self.model = out_of_wrappers(hf_model)
        refuse_unmergeable(self.model)
        refuse_packed(self.model)
        self._offloaded = OffloadedWeights(hf_model)
        self.values = self._offloaded.values
        self.computes = any(
            is_adapter(module) or is_quantised(module) for module in self.model.modules()
        ) or any(parameter.is_meta for parameter in self.model.parameters())

    @torch.no_grad()
    def plain(self, module: nn.Module, device: torch.device) -> nn.Module:
        """What to read in place of `module`, which is itself if it is plain already.

        For an adapter or quantised layer, a new layer as in the base model, in float32 or wider, on
        `device`; on meta, so with shapes only, if there are no values. For a PEFT wrapper around
        versions of a module, the one that is in use: the model's own.
        """
        module = in_use(module)
        if not is_quantised(module) and not is_adapter(module):
            return module
        new = self._floating(module, device)
        if getattr(new, "source_cls", None) is not Conv1D:
            return new
        # bitsandbytes puts a linear layer, its weight transposed, in a Conv1D's place.
        with torch.device("meta"):
            conv = Conv1D(new.out_features, new.in_features)
        conv.weight, conv.bias = nn.Parameter(new.weight.T.contiguous(), False), new.bias
        return conv

    def _floating(self, module: nn.Module, device: torch.device) -> Any:
        """A copy on `device` in float32 or wider, dequantised and merged."""
        module = in_use(module)
        new: Any
        if isinstance(module, nn.Linear) and is_quantised(module):
            new = nn.Linear(module.in_features, module.out_features, device="meta")
            new.source_cls = getattr(module, "source_cls", None)
        else:
            new = type(module).__new__(type(module))
            new.__dict__ = {
                # Containers, as a merge changes them; without the hooks that accelerate put there.
                name: copy.copy(value) if isinstance(value, dict | list | set) else value
                for name, value in vars(module).items()
                if name not in ("_hf_hook", "_old_forward", "forward")
            }
        new._parameters = {
            name: None if p is None else nn.Parameter(self._moved(module, name, p, device), False)
            for name, p in module._parameters.items()
        }
        new._buffers = {
            name: None if b is None else self._moved(module, name, b, device)
            for name, b in module._buffers.items()
        }
        new._modules = {
            name: None if child is None else self._floating(child, device)
            for name, child in module._modules.items()
        }
        return merged(new) if is_adapter(new) else new

    def _moved(self, module: Any, name: str, tensor: Any, device: torch.device) -> torch.Tensor:
        """A copy of one tensor, never an alias of the model's own: a merge is done in place."""
        packed = name == "weight" and is_quantised(module)
        if device.type != "meta":
            tensor = self.values(module, name, tensor)
        if device.type == "meta" or tensor.is_meta:
            shape = (module.out_features, module.in_features) if packed else tensor.shape
            dtype = torch.float32 if packed else _wide(tensor.dtype)
            return torch.empty(shape, dtype=dtype, device="meta")
        if packed:
            tensor = dequantised(module, tensor.data, self._offloaded)
        return tensor.detach().to(device, _wide(tensor.dtype), copy=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
