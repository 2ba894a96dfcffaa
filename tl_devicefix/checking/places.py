"""Where a model's tensors are, and where its placement and its config say they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.checking.report import Finding, Memory
from tl_devicefix.dispatch.carrying import not_carried_to
from tl_devicefix.dispatch.naming import WRAPPED, expression, joined, listed, named_modules
from tl_devicefix.dispatch.user_modules import PlacedTensor, device_of_weights, held_tensors
from tl_devicefix.placement.devices import HOST, is_elsewhere, printed, resolve, site_of, with_index
from tl_devicefix.placement.fitting import move_parameter
from tl_devicefix.placement.memory import gib
from tl_devicefix.placement.placement import Placement, in_short
from tl_devicefix.placement.remote_tensor import RemoteTensor


def tensors(model: Any, attached: Container[nn.Module] = ()) -> Iterator[PlacedTensor]:
    """The tensors of a model, but those of attached modules, whose place is their owner's."""
    planned = planned_by(model)
    for path, module in named_modules(model):
        if module in attached:
            continue
        for name, value, is_weight in held_tensors(module):
            device = planned(joined(path, name), is_weight)
            if is_elsewhere(device) and type(value) is not RemoteTensor:
                device = model.placement.home  # as of a block that replaces a remote one
            yield PlacedTensor(path, name, module, value, is_weight, device)


def placement_of(model: Any) -> Placement | None:
    """The model's placement; None if it was built on one device, or is not spread yet."""
    return getattr(model, "placement", None)


def is_unspread(model: Any) -> bool:
    """Whether it is built for several devices, and not on them yet (`move_to_device=False`)."""
    is_built_first = hasattr(model, "move_model_modules_to_device")  # a Bridge is not
    return is_built_first and placement_of(model) is None and model.cfg.n_devices > 1


def planned_by(model: Any) -> Callable[[str, bool], torch.device]:
    """A name in the model, and whether it is a weight's -> its device.

    By the placement, or else by `cfg.device`.
    """
    placement = placement_of(model)
    if placement is not None:
        return placement.device_for
    device = resolve(model.cfg.device)
    return lambda name, of_weights: device


def bring_back(model: Any, attached: Container[nn.Module] = ()) -> None:
    """Move each misplaced tensor, with its gradient, to its device."""
    for tensor in list(tensors(model, attached)):
        if tensor.is_misplaced and tensor.is_weight:
            move_parameter(tensor.value, tensor.planned)
        elif tensor.is_misplaced:
            tensor.module._buffers[tensor.name] = tensor.value.to(tensor.planned)


# --------------------------------------------------------------------------------------------
# What the config says


def config_findings(model: Any) -> Iterator[Finding]:
    """A `cfg.device` or `cfg.n_devices` that is not the placement's."""
    placement, cfg = placement_of(model), model.cfg
    if is_unspread(model):
        message = f"cfg.n_devices is {cfg.n_devices}, but the model has not been spread"
        fix = "model.move_model_modules_to_device()"
        yield Finding("config", "cfg.n_devices", message, fix)
    if placement is None:
        return
    home, count = placement.home, len(placement.devices)
    if torch.device(cfg.device).type != home.type or with_index(torch.device(cfg.device)) != home:
        message = f"cfg.device is {str(cfg.device)!r}, but the placement's home is {home}"
        yield Finding("config", "cfg.device", message, f'model.cfg.device = "{home}"')
    if cfg.n_devices != count:
        message = f"cfg.n_devices is {cfg.n_devices}, but the placement has {count} devices"
        yield Finding("config", "cfg.n_devices", message, f"model.cfg.n_devices = {count}")


# --------------------------------------------------------------------------------------------
# Where tensors are


def count_parameters(model: Any) -> int:
    """Count the elements of all parameters; views and tied parameters count once."""
    counts: dict[int, int] = {}
    for tensor in tensors(model):
        if isinstance(tensor.value, nn.Parameter):
            storage, nbytes = _storage(tensor.value)
            count = counts.get(storage, 0) + tensor.value.numel()
            counts[storage] = min(nbytes // tensor.value.itemsize, count)
    return sum(counts.values())


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """A tensor's memory, and its bytes; that of another host is the tensor's own."""
    if type(tensor) is RemoteTensor:
        return id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def memory(model: Any) -> tuple[Memory, ...]:
    """Bytes held and planned on each device; shared memory counts once."""
    placement = placement_of(model)
    storages = {}
    for tensor in tensors(model):
        if not tensor.value.is_meta:
            storage, nbytes = _storage(tensor.value)
            storages[storage] = tensor.device, nbytes
    nbytes_on: dict[torch.device, int] = defaultdict(int)
    for device, nbytes in storages.values():
        nbytes_on[device] += nbytes
    if placement is not None:
        planned = {device: placement.bytes_on(device) for device in placement.memories}
    else:
        planned = {planned_by(model)("model", True): sum(nbytes_on.values())}
    devices = dict.fromkeys((*planned, *sorted(nbytes_on, key=str)))
    return tuple(Memory(d, planned.get(d, 0), nbytes_on.get(d, 0)) for d in devices)


def device_findings(
    model: Any, attached: dict[nn.Module, str], hint: Callable[[Any, str], str] | None
) -> Iterator[Finding]:
    """The largest modules of which all is misplaced, or else tensors, by the module they are in.

    `hint` says what else may be done about a path.
    """
    if is_unspread(model):
        return
    own = list(tensors(model, attached))
    modules = _misplaced_modules(own, apart=attached.values())
    groups: dict[str, list[PlacedTensor]] = defaultdict(list)
    for tensor in own:
        if tensor.is_misplaced:
            path = next((p for p in _enclosing(tensor.path) if p in modules), tensor.path)
            groups[path].append(tensor)
    for path, misplaced in groups.items():
        names = [tensor.name for tensor in misplaced]
        name = path or "model"
        if path not in modules:
            name = joined(path, names[0]) if len(names) == 1 else f"{listed(names)} of {name}"
        size = gib(sum({id(t.value): t.value.nbytes for t in misplaced}.values()))
        devices = listed(sorted({printed(tensor.value.device) for tensor in misplaced}))
        planned, by = misplaced[0].planned, "cfg.device"
        fix = f'{expression(path)}.to("{planned}")'
        if placement_of(model) is not None:
            by = "the placement"
            if planned == HOST:  # .to(...) would move the buffers too
                fix = "tl_devicefix.check(model, repair=True)"
        message = f"{name} ({size}) is on {devices}, but {by} puts it on {printed(planned)}"
        yield Finding("device", name, message + (hint(model, path) if hint else ""), fix)


def _misplaced_modules(own: list[PlacedTensor], apart: Any) -> set[str]:
    """The modules all of whose tensors are on one device and belong on one other.

    None that holds a module apart: to move the one would move the other.
    """
    holding = {path for other in apart for path in _enclosing(other)}
    places: dict[str, set[tuple[torch.device, torch.device]]] = defaultdict(set)
    for tensor in own:
        device = tensor.value.device if tensor.is_misplaced else tensor.planned
        for path in _enclosing(tensor.path):
            places[path].add((device, tensor.planned))
    return {
        path
        for path, pairs in places.items()
        if len(pairs) == 1 and path not in holding and not path.endswith(WRAPPED)
        if all(device != planned for device, planned in pairs)
    }


def _enclosing(path: str) -> Iterator[str]:
    """ "blocks.4.mlp" -> "", "blocks", "blocks.4", "blocks.4.mlp"."""
    yield ""
    parts = path.split(".") if path else []
    for end in range(len(parts)):
        yield ".".join(parts[: end + 1])


def attached_notes(model: Any, attached: dict[nn.Module, str]) -> Iterator[Finding]:
    """Attached modules that run on a device of their own."""
    placement = placement_of(model)
    roots = {path: module for module, path in reversed(attached.items())}
    for path, module in roots.items():
        device = device_of_weights(module)
        if placement is not None and device not in (None, placement.device_for(path)):
            planned, kind = placement.device_for(path), type(module).__name__
            message = (
                f"{path} ({kind}) is on {printed(device)}, and its block on {printed(planned)}: "
                "it runs where it is"
            )
            yield Finding("attached", path, message)


# --------------------------------------------------------------------------------------------
# Devices of several hosts


def host_findings(model: Any) -> Iterator[Finding]:
    """Components on devices of hosts that are not joined any more."""
    if (placement := placement_of(model)) is None:
        return
    for device in placement.devices:
        planned = site_of(device, placement.sites)
        if planned is not None and planned.host and site_of(device) != planned:
            names = in_short([c.name for c in placement.components if c.device == device])
            message = f"{names}: {device} ({planned.name}) is not among the joined devices any more"
            yield Finding("hosts", names, message, "load the model again, over joined hosts")


# --------------------------------------------------------------------------------------------
# Modules that have changed


def setup_findings(model: Any, setup: tuple[str, str]) -> Iterator[Finding]:
    """Modules whose hook points the model does not know, or that no input is brought to."""
    when, fix = setup
    placement, registered = placement_of(model), set(model.hook_dict.values())
    paths = [] if placement is None else not_carried_to(model, placement)
    for path, module in named_modules(model):
        if isinstance(module, HookPoint) and module not in registered:
            paths.append(path.rpartition(".")[0])
    for path in dict.fromkeys(paths):  # the outermost
        if not any(path != other and path.startswith(f"{other}.") for other in paths):
            name = path or "model"
            yield Finding("setup", name, f"{name} has changed since {when}: it lacks hooks", fix)
