"""Quantised weights: those of bitsandbytes are dequantised layer by layer, others are refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from tl_devicefix.checkpoints.offloaded import OffloadedWeights
from tl_devicefix.checkpoints.optional import required


def is_quantised(module: nn.Module) -> bool:
    """Whether this is a linear layer of bitsandbytes, in 4 or 8 bits."""
    kind = type(module._parameters.get("weight")).__name__
    return kind in ("Params4bit", "Int8Params") and isinstance(module, nn.Linear)


def dequantised(module: Any, packed: torch.Tensor, weights: OffloadedWeights) -> torch.Tensor:
    """The weight of a bitsandbytes layer, by the library's own functions.

    Args:
        module: the layer; not changed.
        packed: the values of its weight. If they are not packed yet, they are returned.
        weights: where its other tensors are, if they are offloaded.

    Raises:
        ValueError: if the scales are lost.
    """
    functional = required("bitsandbytes.functional")
    weight, is_8bit = module.weight, type(module.weight).__name__ == "Int8Params"
    state = module.state if is_8bit else copy.copy(weight.quant_state)
    if state is None or (is_8bit and packed.is_floating_point()):
        return packed
    if is_8bit:  # the first forward moves the scales from the weight to the layer's state
        scales = state.SCB if weight.SCB is None else weight.SCB
        scales = torch.empty(0, device="meta") if scales is None else scales
        scales = weights.values(module, "SCB", scales)
    else:
        scales = state.absmax
    if scales.is_meta:
        raise ValueError(
            "hf_model has quantised weights whose scales are lost (offloading 4-bit weights "
            "loses them), so it cannot run either; load it again, without offloading"
        )
    if is_8bit:
        return functional.int8_vectorwise_dequant(packed, scales.to(packed.device))
    if getattr(state, "packing_format_for_cpu", False):
        # A forward on a CPU with AVX512-BF16 repacks the weight in place, which no dequantiser
        # reads; and bitsandbytes' inverse leaves the scales transposed, or rounds them again.
        state.original_nested, state.absmax = False, scales.T.reshape(-1).float()
        packed, state = functional._convert_weight_packed_for_cpu_inverse(packed, state)
    return functional.dequantize_4bit(packed, state)


def refuse_packed(model: nn.Module) -> None:
    """Refuse weights that nothing here can unpack.

    Raises:
        ValueError: naming how they are quantised.
    """
    settings: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    settings = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    method = settings.get("quant_method", "bitsandbytes")
    found = {str(getattr(method, "value", method))} - {"bitsandbytes"}
    for module in model.modules():
        weights = [p for p in module._parameters.values() if p is not None]
        if not is_quantised(module):
            packers = (_PACKERS.match(type(each).__module__) for each in (module, *weights))
            found |= {packer[0] for packer in packers if packer}
            found |= {str(p.dtype) for p in weights if not p.is_floating_point() or p.itemsize < 2}
    if found:
        raise ValueError(
            f"hf_model is quantised ({', '.join(sorted(found))}) in a way that cannot be undone "
            "here; pass it as it was before, or dequantised if its method can do that"
        )


_PACKERS = re.compile(r"(torchao|optimum|hqq|gptqmodel|auto_gptq|awq|torch\.ao\.nn)\b")
