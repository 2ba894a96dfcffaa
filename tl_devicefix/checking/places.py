"""Where a model's tensors are, beside where the placement puts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tl_devicefix.checking.by_class import of_class
from tl_devicefix.checking.report import Finding, Memory
from tl_devicefix.checking.tensors import (
    Tensor,
    attached,
    is_own,
    is_unspread,
    placement_of_model,
    planned_by,
    tensors,
)
from tl_devicefix.dispatch.naming import WRAPPED, expression, joined, listed
from tl_devicefix.dispatch.user_modules import attached_modules, device_of_weights
from tl_devicefix.monkeypatch.versions import is_bridge
from tl_devicefix.placement.devices import HOST, printed
from tl_devicefix.placement.tables import gib


def memory(model: Any) -> tuple[Memory, ...]:
    """What each device holds of the model, and what is planned for it."""
    placement = placement_of_model(model)
    held = of_class(model).bytes_held(model)
    if placement is not None:
        planned = {each: placement.bytes_on(each) for each in placement.memories}
    else:
        planned = {planned_by(model)("model", True): sum(held.values())}
    devices = dict.fromkeys((*planned, *sorted(held, key=str)))
    return tuple(
        Memory(device, planned.get(device, 0), held.get(device, 0))
        for device in devices
        if device.type != "meta"
    )


def place_notes(model: Any) -> list[Finding]:
    """Attached modules that run on a device of their own."""
    placement = placement_of_model(model)
    if placement is None:
        return []
    notes = []
    for path, module in attached(model):
        here, there = placement.device_for(path), device_of_weights(module)
        if there is not None and there != here:
            kind = type(module).__name__
            message = f"{path} ({kind}) is on {printed(there)}, and its block on {printed(here)}: "
            message += "it runs where it is"
            notes.append(Finding("attached", path, message))
    return notes


def device_findings(model: Any) -> Iterator[Finding]:
    """The largest modules of which all is misplaced, or else tensors, by the module they are in."""
    if is_unspread(model):
        return
    found = list(tensors(model))
    whole = _wholly_misplaced(found, apart=[path for path, _ in attached(model)])
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in found:
        if tensor.is_misplaced:
            groups[_outermost(tensor.path, whole)].append(tensor)
    for path, misplaced in groups.items():
        yield _device_finding(model, path, misplaced, path in whole)


def _device_finding(model: Any, path: str, misplaced: list[Tensor], is_whole: bool) -> Finding:
    names = [tensor.name for tensor in misplaced]
    name = path or "model"
    if not is_whole:
        name = joined(path, names[0]) if len(names) == 1 else f"{listed(names)} of {name}"
    size = gib(sum({id(t.value): t.value.nbytes for t in misplaced}.values()))
    there = listed(sorted({printed(tensor.value.device) for tensor in misplaced}))
    planned = misplaced[0].planned
    by = "the placement" if placement_of_model(model) is not None else "cfg.device"
    message = f"{name} ({size}) is on {there}, but {by} puts it on {printed(planned)}"
    if _may_run_where_it_is(model, path):
        message += "; model.setup() lets it run where it is, or move it"
    fix = f'{expression(path)}.to("{planned}")'
    if planned == HOST and placement_of_model(model) is not None:
        fix = "tl_devicefix.check(model, repair=True)"  # .to(...) would move the buffers too
    return Finding("device", name, message, fix)


def _may_run_where_it_is(model: Any, path: str) -> bool:
    placement = placement_of_model(model)
    if placement is None or len(placement.devices) == 1 or is_bridge(model):
        return False
    module = model.get_submodule(path)
    roots = (root for root in attached_modules(model, placement) if module in root.modules())
    return any(not is_own(model, _path_of(model, root), root) for root in roots)


def _path_of(model: Any, module: nn.Module) -> str:
    return next(path for path, each in model.named_modules() if each is module)


def _wholly_misplaced(found: list[Tensor], apart: list[str]) -> set[str]:
    """The modules all of whose tensors are on one device and belong on one other.

    None that holds a module apart: to move the one would move the other.
    """
    holding = {path for each in apart for path in _enclosing(each)}
    places: dict[str, set[tuple[torch.device, torch.device]]] = defaultdict(set)
    for tensor in found:
        there = tensor.value.device if tensor.is_misplaced else tensor.planned
        for path in _enclosing(tensor.path):
            places[path].add((there, tensor.planned))
    return {
        path
        for path, pairs in places.items()
        if len(pairs) == 1 and path not in holding and not path.endswith(WRAPPED)
        if all(there != planned for there, planned in pairs)
    }


def _outermost(path: str, of: set[str]) -> str:
    return next((each for each in _enclosing(path) if each in of), path)


def _enclosing(path: str) -> Iterator[str]:
    """ "blocks.4.mlp" -> "", "blocks", "blocks.4", "blocks.4.mlp"."""
    yield ""
    parts = path.split(".") if path else []
    for end in range(len(parts)):
        yield ".".join(parts[: end + 1])
