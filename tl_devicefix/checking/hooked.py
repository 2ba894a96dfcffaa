"""The checks of a HookedTransformer that a TransformerBridge does not need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformer_lens.components import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

from tl_devicefix.checking.places import placement_of
from tl_devicefix.checking.report import Finding
from tl_devicefix.dispatch.naming import listed
from tl_devicefix.dispatch.user_modules import attached_modules, runs_where_it_is
from tl_devicefix.hooked_transformer.components import is_own

_NORMS = (LayerNorm, LayerNormPre, RMSNorm, RMSNormPre)


def attached(model: Any) -> dict[nn.Module, str]:
    """The modules of attached ones that were set up, which run where they are, and their paths.

    Not those that TransformerLens itself has there, which someone moved before a setup.
    """
    roots = {
        path: module
        for path, module in model.named_modules()
        if runs_where_it_is(module) and not is_own(model, path, module)
    }
    return {module: path for path, root in roots.items() for module in root.modules()}


def hint(model: Any, path: str) -> str:
    """Suggest `model.setup()` for a misplaced module that a user has attached."""
    placement = placement_of(model)
    if placement is None or len(placement.devices) == 1:
        return ""
    module, paths = model.get_submodule(path), {m: p for p, m in model.named_modules()}
    roots = (root for root in attached_modules(model, placement) if module in root.modules())
    if any(not is_own(model, paths[root], root) for root in roots):
        return "; model.setup() lets it run where it is, or move it"
    return ""


def norm_findings(model: Any) -> Iterator[Finding]:
    """Norms of another class than TransformerLens builds by this config."""
    is_right: dict[tuple[str, type[nn.Module]], bool] = {}
    wrong: dict[str, type[nn.Module]] = {}
    for path, module in model.named_modules():
        if isinstance(module, _NORMS):
            # Blocks have the same norms, and to build one takes a while.
            key = path.split(".", 2)[-1], type(module)
            if key not in is_right:
                is_right[key] = is_own(model, path, module)
            if not is_right[key]:
                wrong[path] = type(module)
    if wrong:
        kinds = listed(sorted({kind.__name__ for kind in wrong.values()}))
        message = (
            f"{listed(list(wrong))} cannot be {kinds} where cfg.normalization_type is "
            f"{model.cfg.normalization_type!r}: correct the config, or load the model again if its "
            "weights are folded in part only"
        )
        yield Finding("norms", next(iter(wrong)), message)
