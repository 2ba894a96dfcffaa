"""Whether the model knows all its modules: `setup` names hook points and carries to blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformer_lens.hook_points import HookPoint

from tl_devicefix.checking.report import Finding
from tl_devicefix.checking.tensors import placement_of_model
from tl_devicefix.dispatch.carrying import not_carried_to


def setup_findings(model: Any) -> Iterator[Finding]:
    """Modules whose hook points the model does not know, or that no input is brought to."""
    placement = placement_of_model(model)
    unknown = [] if placement is None else not_carried_to(model, placement)
    for path, module in model.named_modules():
        if isinstance(module, HookPoint) and model.hook_dict.get(path) is not module:
            unknown.append(path.rpartition(".")[0])
    for path in sorted(set(unknown), key=unknown.index):
        if not any(path != other and path.startswith(f"{other}.") for other in unknown):
            message = f"{path or 'model'} has changed since the model was set up: it lacks hooks"
            yield Finding("setup", path or "model", message, "model.setup()")
