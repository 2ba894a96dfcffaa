"""The values of a live Hugging Face model's weights, as plain tensors.

- Weights that accelerate offloaded are read from the CPU or the disk.
- Weights that bitsandbytes packed are dequantised.
- Active PEFT adapters are merged in float32 or wider.

One module is copied at a time, and the given model is never changed. peft and bitsandbytes are
optional, so we recognise their classes by name without importing them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tl_devicefix.monkeypatch.patch import package_of
from tl_devicefix.placement.memory import is_out_of_memory


def is_from(package: str, thing: object) -> bool:
    """Return True if an object is an instance of a class of that package."""
    return any(package_of(kind) == package for kind in type(thing).__mro__)


def unwrap(hf_model: nn.Module) -> nn.Module:
    """Return the model within `torch.compile`'s wrappers, a PeftModel and its tuner."""
    model: Any = hf_model  # with peft's attributes
    if "_orig_mod" in model._modules:
        return unwrap(model._modules["_orig_mod"])
    if not is_from("peft", model):
        return hf_model
    for name in getattr(model, "active_adapters", ()):
        config = model.peft_config[name]
        if config.is_prompt_learning or config.is_adaption_prompt:
            _refuse_adapter(config.peft_type.value)
    inner = model._modules.get("base_model", model._modules.get("model"))
    return unwrap(inner) if inner is not None else _refuse_adapter(type(model).__name__)


def class_in_transformers(hf_model: nn.Module) -> type[Any]:
    """Return the first transformers class among a model's class and bases; else its own class."""
    classes = type(hf_model).__mro__
    return next((c for c in classes if c.__module__.startswith("transformers.models")), classes[0])


def has_other_forward(module: nn.Module) -> bool:
    """Return True if a module has a forward that is neither its class's nor accelerate's."""
    attributes = vars(module)
    # accelerate's hooks and mixed precision keep the forward, and leave it behind, undecorated.
    if "forward" not in attributes or attributes.keys() & {"_old_forward", "_original_forward"}:
        return False
    forward = getattr(attributes["forward"], "__func__", attributes["forward"])
    return inspect.unwrap(type(module).forward, stop=lambda each: each is forward) is not forward


def refuse_unmergeable(module: nn.Module) -> None:
    """Refuse adapters whose layers cannot be merged."""
    module = active_version(module)
    if is_adapter(module):
        no_merge = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer.merge
        # X-LoRA replaces the forward. The base class has a `merge` too, which only raises.
        if has_other_forward(module) or _unquantised_adapter_class(type(module)).merge is no_merge:
            _refuse_adapter(f"{type(module).__module__}.{type(module).__name__}")
    elif is_from("peft", module):
        _refuse_adapter(type(module).__name__)
    else:
        for child in module.children():
            refuse_unmergeable(child)


def _refuse_adapter(kind: str) -> NoReturn:
    raise ValueError(
        f"hf_model has an adapter ({kind}) that is not a weight delta, so it cannot be "
        "merged; pass the base model, loaded without the adapter"
    )


def active_version(module: nn.Module) -> nn.Module:
    """Return the version of a module that a PEFT wrapper calls; other modules unchanged."""
    if not is_from("peft", module):
        return module
    if "token_adapter" in module._modules:
        return module.get_submodule("token_adapter")
    # PEFT's `modules_to_save` are whole copies of a module, one for each adapter.
    if not {"original_module", "modules_to_save"} <= module._modules.keys():
        return module
    wrapper: Any = module
    active, versions = wrapper.active_adapter, wrapper.modules_to_save
    active = [active] if isinstance(active, str) else active
    used = not wrapper.disable_adapters and active and all(name in versions for name in active)
    chosen: nn.Module = versions[active[0]] if used else wrapper.original_module
    return chosen


def merge_adapters(layer: Any) -> nn.Module:
    """Merge a copied layer's active adapters, or unmerge disabled ones; return its base layer."""
    if any(t.is_meta for t in (*layer.parameters(), *layer.buffers())):
        return layer.get_base_layer().to("meta")  # there are no values to merge
    layer.__class__ = _unquantised_adapter_class(type(layer))
    layer.__dict__.setdefault("fan_in_fan_out", False)  # bitsandbytes adapters lack it
    layer.quantization_backend = None  # the base layer holds floats now
    try:
        if layer.disable_adapters and layer.merged:
            layer.unmerge()
        elif not layer.disable_adapters and not layer.merged:
            layer.merge()
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"hf_model's adapters cannot be merged ({error}); deactivate those that cannot, or "
            "pass the base model, loaded without them"
        ) from error
    return layer.get_base_layer()


def _unquantised_adapter_class(kind: type) -> Any:
    """Return the adapter's class for an unquantised base layer."""
    package, _, module = kind.__module__.rpartition(".")
    if module != "bnb":
        return kind
    name = re.sub(r"(4bit|8bitLt)$", "", kind.__name__)
    return getattr(importlib.import_module(f"{package}.layer"), name)


def is_adapter(module: nn.Module) -> bool:
    """Return True if this is a PEFT layer that wraps a layer of the base model."""
    if not is_from("peft", module):
        return False
    return isinstance(module, importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer)


def copy_with(
    module: nn.Module,
    tensor: Callable[[str, torch.Tensor], torch.Tensor],
    child: Callable[[nn.Module], nn.Module],
) -> Any:
    """Copy a module, with new tensors and children, and without accelerate's hooks.

    `tensor` returns the new value of a parameter or buffer by its name and value; `child` returns
    the new module in place of a child.
    """
    new = object.__new__(type(module))
    new.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(module).items()
        if name not in ("_hf_hook", "_old_forward", "forward")
    }
    for name, parameter in module._parameters.items():
        if parameter is not None:
            new._parameters[name] = nn.Parameter(tensor(name, parameter), False)
    for name, buffer in module._buffers.items():
        new._buffers[name] = None if buffer is None else tensor(name, buffer)
    for name, inner in module._modules.items():
        new._modules[name] = None if inner is None else child(inner)
    return new


class LiveWeights:
    """Reads a model's weights with active adapters merged, dequantised, from where they lie.

    Attributes:
        model: the given model without its PEFT wrappers, to convert.
        needs_reading: True if some weights are offloaded, quantised or have adapters to merge.
    """

    def __init__(self, hf_model: nn.Module) -> None:
        self.model = unwrap(hf_model)
        refuse_unmergeable(self.model)
        _refuse_packed(self.model)
        self._stored = _offloaded_tensors(hf_model)
        self.needs_reading = any(
            is_adapter(module) or _is_quantised(module) for module in self.model.modules()
        ) or any(parameter.is_meta for parameter in self.model.parameters())

    def values(self, module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter or buffer, even if it is offloaded.

        Copy the result before editing: it may be the model's own. It is on meta if there are no
        values.
        """
        if not tensor.is_meta:
            return tensor
        # On disk, transformers 4 keeps tied weights under one of their names only.
        tied = (
            (owner, parameter_name)
            for owner in self._stored
            for parameter_name, parameter in owner._parameters.items()
            if parameter is tensor
        )
        for owner, parameter_name in itertools.chain([(module, name)], tied):
            stored, prefix = self._stored.get(owner, ({}, ""))
            if (value := stored.get(prefix + parameter_name)) is not None:
                return value.to(tensor.dtype)
        return tensor

    @torch.no_grad()
    def plain_module(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Return the module to read in place of `module`.

        - A plain module: itself.
        - An adapter or quantised layer: a new layer of the base model's class, in float32 or wider,
          on `device`, or on meta if there are no values.
        - A PEFT wrapper around versions of a module: the version in use.
        """
        module = active_version(module)
        if not _is_quantised(module) and not is_adapter(module):
            return module
        new = self._floating(module, device)
        if getattr(new, "source_cls", None) != Conv1D:
            return new
        # transformers replaces a Conv1D with bitsandbytes' linear layer: its weight is transposed.
        with torch.device("meta"):
            conv = Conv1D(new.out_features, new.in_features)
        conv.weight, conv.bias = nn.Parameter(new.weight.T.contiguous(), False), new.bias
        return conv

    def _floating(self, module: nn.Module, device: torch.device) -> Any:
        """Copy a layer to `device` in float32 or wider, dequantised and merged."""
        module = active_version(module)
        moved = functools.partial(self._moved, module, device)
        new = copy_with(module, moved, lambda child: self._floating(child, device))
        if _is_quantised(module):
            new.__class__ = nn.Linear
        return merge_adapters(new) if is_adapter(new) else new

    def _moved(
        self, module: Any, device: torch.device, name: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Copy one tensor, in float32 or wider."""
        packed = name == "weight" and _is_quantised(module)
        if device.type != "meta":
            tensor = self.values(module, name, tensor)
        if device.type == "meta" or tensor.is_meta:
            # Four-bit weights are packed flat, so take the layer's sizes.
            shape = (module.out_features, module.in_features) if packed else tensor.shape
            dtype = torch.float32 if packed else _wide(tensor.dtype)
            return torch.empty(shape, dtype=dtype, device="meta")
        if packed:
            tensor = self._dequantised(module, tensor.data)
        # Copy, since a merge works in place.
        return tensor.detach().to(device, _wide(tensor.dtype), copy=True)

    def _dequantised(self, module: Any, packed: torch.Tensor) -> torch.Tensor:
        """Dequantise a bitsandbytes layer's weight with bitsandbytes, if it is packed."""
        functional = importlib.import_module("bitsandbytes.functional")
        weight, is_8bit = module.weight, type(module.weight).__name__ == "Int8Params"
        state = module.state if is_8bit else weight.quant_state
        if state is None or (is_8bit and packed.is_floating_point()):
            return packed
        if is_8bit:  # the first forward moves the scales from the weight to the layer's state
            scales = state.SCB if weight.SCB is None else weight.SCB  # [d_out]
            scales = torch.empty(0, device="meta") if scales is None else scales
            scales = self.values(module, "SCB", scales)
        else:
            scales = state.absmax
        if scales.is_meta:
            raise ValueError(
                "hf_model has quantised weights whose scales were lost when they were offloaded, "
                "so it cannot run either; load it again, without offloading"
            )
        if is_8bit:
            return functional.int8_vectorwise_dequant(packed, scales.to(packed.device))
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                "hf_model has run in 4 bits on a CPU, where bitsandbytes repacks weights "
                "and rounds their scales; load it again, and pass it before it runs"
            )
        return functional.dequantize_4bit(packed, state)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _offloaded_tensors(model: nn.Module) -> dict[nn.Module, tuple[Mapping[str, torch.Tensor], str]]:
    """Return accelerate's map of tensors for each offloaded module, and the module's prefix."""
    stored: dict[nn.Module, tuple[Mapping[str, torch.Tensor], str]] = {}
    for module in model.modules():
        outer: Any = getattr(module, "_hf_hook", None)
        for hook in getattr(outer, "hooks", [outer]):
            if getattr(hook, "offload", False) and hook.weights_map is not None:
                owners = module.named_modules() if hook.place_submodules else [("", module)]
                for name, owner in owners:
                    stored[owner] = hook.weights_map, f"{name}." if name else ""
    return stored


def _is_quantised(module: nn.Module) -> bool:
    """Return True if this is a linear layer of bitsandbytes, in 4 or 8 bits."""
    kind = type(module._parameters.get("weight")).__name__
    return kind in ("Params4bit", "Int8Params") and isinstance(module, nn.Linear)


def _refuse_packed(model: nn.Module) -> None:
    """Refuse quantised weights, except bitsandbytes'."""
    settings: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    settings = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    method = settings.get("quant_method", "bitsandbytes")
    kinds = {str(getattr(method, "value", method))} - {"bitsandbytes"}
    for module in model.modules():
        weights = [p for p in module._parameters.values() if p is not None]
        if not _is_quantised(module):
            packers = (_PACKERS.match(type(item).__module__) for item in (module, *weights))
            kinds |= {packer[0] for packer in packers if packer}
            kinds |= {str(p.dtype) for p in weights if not p.is_floating_point() or p.itemsize < 2}
    if kinds:
        raise ValueError(
            f"hf_model is quantised ({', '.join(sorted(kinds))}) in a way that cannot be undone "
            "here; pass the unquantised model, or dequantise it first"
        )


_PACKERS = re.compile(r"(torchao|optimum|hqq|gptqmodel|auto_gptq|awq|torch\.ao\.nn)\b")
