"""PEFT adapters: active ones are merged into copies of the layers that they adapt.

peft, as bitsandbytes, is optional: its classes are recognised without importing it.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, NoReturn

from torch import nn

from tl_devicefix.placement.memory import is_out_of_memory


def is_from(package: str, thing: object) -> bool:
    """Whether an object is an instance of a class of that package."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(thing).__mro__)


def required(name: str) -> Any:
    """Import a module of an optional dependency."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"hf_model uses {package}, which cannot be imported ({error}); pip install {package}"
        ) from error


def out_of_wrappers(hf_model: nn.Module) -> nn.Module:
    """The model within a PeftModel and its tuner; a model that is neither is itself."""
    model: Any = hf_model
    while is_from("peft", model):
        for name in getattr(model, "active_adapters", ()):
            config = model.peft_config[name]
            if config.is_prompt_learning or config.is_adaption_prompt:
                _refuse_adapter(config.peft_type.value)
        inner = model._modules.get("base_model", model._modules.get("model"))
        model = inner if inner is not None else _refuse_adapter(type(model).__name__)
    return model


def refuse_unmergeable(module: nn.Module) -> None:
    """Refuse adapters whose layers cannot be merged."""
    module = in_use(module)
    if is_adapter(module):
        replaced = "forward" in vars(module) and "_old_forward" not in vars(module)  # by X-LoRA
        no_merge = required("peft.tuners.tuners_utils").BaseTunerLayer.merge
        if replaced or _class_over_floats(type(module)).merge is no_merge:
            _refuse_adapter(f"{type(module).__module__}.{type(module).__name__}")
    elif is_from("peft", module):
        _refuse_adapter(type(module).__name__)
    else:
        for child in module.children():
            refuse_unmergeable(child)


def _refuse_adapter(kind: str) -> NoReturn:
    raise ValueError(
        f"hf_model has an adapter ({kind}) that cannot be merged, as it does more than change "
        "weights; pass the base model, loaded without the adapter"
    )


def in_use(module: Any) -> Any:
    """Which of its versions of a module a PEFT wrapper calls; other modules are themselves."""
    if not is_from("peft", module):
        return module
    if "token_adapter" in module._modules:
        return module.token_adapter
    if not {"original_module", "modules_to_save"} <= module._modules.keys():
        return module
    active, versions = module.active_adapter, module.modules_to_save
    active = [active] if isinstance(active, str) else active
    if module.disable_adapters or not active or any(name not in versions for name in active):
        return module.original_module
    return versions[active[0]]


def merged(layer: Any) -> nn.Module:
    """The base layer of a copied adapter layer, changed to what the layer computes now."""
    if any(t.is_meta for t in (*layer.parameters(), *layer.buffers())):
        return layer.get_base_layer().to("meta")
    layer.__class__ = _class_over_floats(type(layer))
    layer.__dict__.setdefault("fan_in_fan_out", False)  # the classes over bitsandbytes lack it
    layer.quantization_backend = None
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


def _class_over_floats(kind: Any) -> Any:
    """The adapter layer's class for a base layer that is not quantised."""
    package, _, module = kind.__module__.rpartition(".")
    if module != "bnb":
        return kind
    return getattr(required(f"{package}.layer"), re.sub(r"(4bit|8bitLt)$", "", kind.__name__))


def is_adapter(module: nn.Module) -> bool:
    """Whether this is a layer of PEFT around a layer of the base model."""
    if not is_from("peft", module):
        return False
    return isinstance(module, required("peft.tuners.tuners_utils").BaseTunerLayer)
