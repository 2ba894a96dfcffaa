"""Where a model's tensors are, beside where the placement puts them; and how to bring them there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.alignment import not_aligned
from tl_devicefix.attached import attached_modules, device_of_weights, runs_where_it_is
from tl_devicefix.checking.naming import expression, joined, listed
from tl_devicefix.checking.report import Finding, Memory
from tl_devicefix.components import component_of, empty_component
from tl_devicefix.devices import resolve, with_index
from tl_devicefix.fitting import gib, naming_full_devices
from tl_devicefix.moving import settle
from tl_devicefix.placement import Placement
from tl_devicefix.shared_buffers import ConvertedOnce, share_buffers


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of the model itself, and where it belongs."""

    path: str
    """The name of the module that holds it."""
    name: str
    """Its name there."""
    module: nn.Module
    value: torch.Tensor
    planned: torch.device

    @property
    def is_misplaced(self) -> bool:
        """Whether it is elsewhere; what is on meta has no values to be anywhere."""
        return not self.value.is_meta and self.value.device != self.planned


def place_findings(model: Any) -> list[Finding]:
    """What is not where it belongs, what was put in without a setup, and a config that is off."""
    return [*_config_findings(model), *_device_findings(model), *_setup_findings(model)]


def put_right(model: Any) -> None:
    """Move what is misplaced, and make the config and the hooks across devices follow."""
    placement = _placement(model)
    if placement is None and model.cfg.n_devices > 1:
        model.move_model_modules_to_device()
        return
    for tensors in _by_planned_device(model).values():
        move = ConvertedOnce(model, partial(_moved, device=tensors[0].planned))
        for tensor in tensors:
            component = component_of(joined(tensor.path, tensor.name))
            known = placement is not None and component in placement.device_map
            with naming_full_devices(model, placement if known else None, component):
                nn.Module._apply(tensor.module, move, recurse=False)
    share_buffers(model)
    if placement is not None:
        settle(model, placement)
    model.setup()


def memory(model: Any) -> tuple[Memory, ...]:
    """What each device holds of the model, and what is planned for it."""
    placement = _placement(model)
    held: dict[torch.device, int] = defaultdict(int)
    for tensor in (*model.parameters(), *model.buffers()):
        held[tensor.device] += 0 if tensor.is_meta else tensor.nbytes
    if placement is not None:
        planned = {device: placement.bytes_on(device) for device in placement.devices}
    else:
        planned = {_planned_without_placement(model): sum(held.values())}
    devices = dict.fromkeys((*planned, *sorted(held, key=str)))
    return tuple(
        Memory(device, planned.get(device, 0), held.get(device, 0))
        for device in devices
        if device.type != "meta"
    )


def place_notes(model: Any) -> list[Finding]:
    """Attached modules that run on a device of their own."""
    placement = _placement(model)
    notes = []
    for path, module in _attached(model):
        here = placement.device_for(path) if placement is not None else None
        there = device_of_weights(module)
        if here is not None and there not in (None, here):
            kind = type(module).__name__
            message = f"{path} ({kind}) is on {there} and runs there; {here} carries to it"
            notes.append(Finding("attached", path, message))
    return notes


def _placement(model: Any) -> Placement | None:
    return getattr(model, "placement", None)


def _planned_without_placement(model: Any) -> torch.device:
    return resolve(model.cfg.device)


def _config_findings(model: Any) -> Iterator[Finding]:
    placement, cfg = _placement(model), model.cfg
    if placement is None:
        if cfg.n_devices > 1:
            message = f"cfg.n_devices is {cfg.n_devices}, but the model has not been spread"
            fix = "model.move_model_modules_to_device()"
            yield Finding("config", "cfg.n_devices", message, fix)
        return
    home, count = placement.home, len(placement.devices)
    if torch.device(cfg.device).type != home.type or with_index(torch.device(cfg.device)) != home:
        message = f"cfg.device is {str(cfg.device)!r}, but the placement's home is {home}"
        yield Finding("config", "cfg.device", message, f'model.cfg.device = "{home}"')
    if cfg.n_devices != count:
        message = f"cfg.n_devices is {cfg.n_devices}, but the placement has {count} devices"
        yield Finding("config", "cfg.n_devices", message, f"model.cfg.n_devices = {count}")


def _device_findings(model: Any) -> Iterator[Finding]:
    """The largest modules of which all is misplaced; else the tensors, by the module they are in."""
    tensors = list(_tensors(model))
    whole = _wholly_misplaced(tensors)
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
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
    there = listed(sorted({str(tensor.value.device) for tensor in misplaced}))
    planned = misplaced[0].planned
    by = "the placement" if _placement(model) is not None else "cfg.device"
    message = f"{name} ({size}) is on {there}, but {by} puts it on {planned}"
    if _may_run_where_it_is(model, path):
        message += "; model.setup() lets it run where it is, or move it"
    return Finding("device", name, message, f'{expression(path)}.to("{planned}")')


def _setup_findings(model: Any) -> Iterator[Finding]:
    """Modules whose hook points the model does not know, or that no input is brought to."""
    placement = _placement(model)
    unknown = [] if placement is None else not_aligned(model, placement)
    for path, module in model.named_modules():
        if isinstance(module, HookPoint) and model.hook_dict.get(path) is not module:
            unknown.append(path.rpartition(".")[0])
    for path in sorted(set(unknown), key=unknown.index):
        if not any(path != other and path.startswith(f"{other}.") for other in unknown):
            message = f"{path or 'model'} has changed since the model was set up: it lacks hooks"
            yield Finding("setup", path or "model", message, "model.setup()")


def _tensors(model: Any) -> Iterator[Tensor]:
    """All tensors but those of attached modules, whose place is their owner's business."""
    placement = _placement(model)
    if placement is None and model.cfg.n_devices > 1:
        return
    aside = {each for _, root in _attached(model) for each in root.modules()}
    alone = _planned_without_placement(model) if placement is None else None
    for path, module in model.named_modules():
        if module in aside:
            continue
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                planned = alone or placement.device_for(joined(path, name))
                yield Tensor(path, name, module, value, planned)


def _attached(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The attached modules that were set up: they run where they are.

    Not those that TransformerLens itself has there, which someone moved before a setup.
    """
    for path, module in model.named_modules():
        if runs_where_it_is(module) and not _is_own(model, path, module):
            yield path, module


def _is_own(model: Any, path: str, module: nn.Module) -> bool:
    component = component_of(path)
    try:
        own = empty_component(component, model.cfg).get_submodule(path[len(component) + 1 :])
    except AttributeError:
        return False
    return type(own) is type(module)


def _may_run_where_it_is(model: Any, path: str) -> bool:
    placement = _placement(model)
    if placement is None or len(placement.devices) == 1:
        return False
    module = model.get_submodule(path)
    roots = (root for root in attached_modules(model, placement) if module in root.modules())
    return any(not _is_own(model, _path_of(model, root), root) for root in roots)


def _path_of(model: Any, module: nn.Module) -> str:
    return next(path for path, each in model.named_modules() if each is module)


def _wholly_misplaced(tensors: list[Tensor]) -> set[str]:
    """The modules all of whose tensors are on one device and belong on one other."""
    places: dict[str, set[tuple[torch.device, torch.device]]] = defaultdict(set)
    for tensor in tensors:
        there = tensor.value.device if tensor.is_misplaced else tensor.planned
        for path in _enclosing(tensor.path):
            places[path].add((there, tensor.planned))
    return {
        path for path, found in places.items() if len(found) == 1 and all(a != b for a, b in found)
    }


def _outermost(path: str, of: set[str]) -> str:
    return next((each for each in _enclosing(path) if each in of), path)


def _enclosing(path: str) -> Iterator[str]:
    """ "blocks.4.mlp" -> "", "blocks", "blocks.4", "blocks.4.mlp"."""
    yield ""
    parts = path.split(".") if path else []
    for end in range(len(parts)):
        yield ".".join(parts[: end + 1])


def _by_planned_device(model: Any) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in _tensors(model):
        if tensor.is_misplaced:
            groups[tensor.planned].append(tensor)
    return groups


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to(device)
