"""What TransformerLens is made of, object by object."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from typing import Any

# Without tl_devicefix, whose import is what some tests look at.
if importlib.util.find_spec("transformer_lens.HookedTransformer"):
    from transformer_lens import HookedTransformer as MODEL_CLASS
else:
    from transformer_lens.model_bridge import TransformerBridge as MODEL_CLASS

__all__ = ["MODEL_CLASS", "changed", "ours", "parts_of_transformer_lens"]

Parts = dict[str, Any]


def parts_of_transformer_lens() -> Parts:
    """Every attribute of every module and class of TransformerLens that is imported, by its path.

    Also of a module of transformers with a patch. Of functions the code, which a patch exchanges.
    """
    parts: Parts = {}
    for module_name, module in list(sys.modules.items()):
        its = module_name, module_name.partition(".")[0]
        if module is None or not {"transformers.masking_utils", "transformer_lens"} & {*its}:
            continue
        for name, value in list(vars(module).items()):
            parts[f"{module_name}:{name}"] = getattr(value, "__code__", value)
            if inspect.isclass(value) and value.__module__ == module_name:
                attributes = vars(value).items()
                parts.update({f"{module_name}:{name}.{k}": part for k, part in attributes})
    return parts


def changed(before: Parts, after: Parts) -> set[str]:
    """What was added, removed, or replaced by another object."""
    missing = object()
    paths = before.keys() | after.keys()
    return {p for p in paths if before.get(p, missing) is not after.get(p, missing)}


def ours(parts: Parts) -> set[str]:
    """What is replaced by something that tl_devicefix defines."""

    def is_ours(part: Any) -> bool:
        if inspect.iscode(part):
            return f"{os.sep}tl_devicefix{os.sep}" in part.co_filename
        module = getattr(getattr(part, "__func__", part), "__module__", None)
        return isinstance(module, str) and module.partition(".")[0] == "tl_devicefix"

    return {path for path, part in parts.items() if is_ours(part)}
