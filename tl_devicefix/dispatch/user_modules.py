"""Handle modules and tensors that users assign to a component from another device.

- Parameters, buffers and TransformerLens's modules are moved to the component, by `model.setup()`
  and before the model runs.
- In a HookedTransformer, other modules, such as SAEs and probes, run on their own device, as do
  modules that components on several devices share: input is carried there, and output back.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.around import Args, Forward, Kwargs, ResumesModes
from tl_devicefix.dispatch.carrying import bring_home
from tl_devicefix.dispatch.mixing import JoinedAt, resuming_modes, tensor_bytes, tensors_in
from tl_devicefix.dispatch.naming import join_path, list_names
from tl_devicefix.fusing.listening import IN_VIEW
from tl_devicefix.monkeypatch.patch import package_of
from tl_devicefix.offload import attach_parts, pin
from tl_devicefix.placement.fitting import Mover
from tl_devicefix.placement.in_use import devices_in_use
from tl_devicefix.placement.memory import gib
from tl_devicefix.placement.placement import Placement
from tl_devicefix.types import Model

WATCH = "_tl_devicefix_watch"
"""A model split across devices has its `Watch` under this name."""


class PinnedModule(ResumesModes):
    """Runs a user's module where its weights are when it is called."""

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Return the module's output on the device of its input."""
        back = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
        device = device_of_weights(module) or back
        if back is None or device is None:
            return run(*args, **kwargs)
        with resuming_modes(), JoinedAt(device, devices_in_use() | {device}):
            return bring_home(run(*args, **kwargs), back)


def device_of_weights(module: nn.Module) -> torch.device | None:
    """Return the device of a module's weights; None if it has none."""
    # SAELens's wrapper keeps its SAE in its attributes, not among its modules.
    modules = [value for value in vars(module).values() if isinstance(value, nn.Module)]
    tensors = (t for m in (module, *modules) for t in (*m.parameters(), *m.buffers()))
    return next((tensor.device for tensor in tensors), None)


def runs_where_it_is(module: nn.Module) -> bool:
    """Return True for a module that runs on its own device."""
    return PinnedModule.of(module) is not None


def _users_modules(model: Model, placement: Placement) -> Iterator[nn.Module]:
    """Yield the outermost modules in each component that are not part of TransformerLens."""
    # A module of torch's is a user's if it is a component, or directly in one, and elsewhere:
    # TransformerLens's own are further inside, such as the linear layers of experts.
    inside: set[nn.Module] = set()
    for component, root in placement.modules_of(model):
        own = (None, component.device, component.stored_on)  # None without weights
        for path, module in root.named_modules():
            package = package_of(type(module))
            if module in inside or package == "transformer_lens":
                continue
            is_outer = "." not in path
            if package != "torch" or (is_outer and device_of_weights(module) not in own):
                inside.update(module.modules())
                yield module


def move_in_parts(model: Model, placement: Placement) -> None:
    """Move parts that were assigned since the last forward to their component's device.

    Not in a view: its parts were moved before it was made, and it is not watched.
    """
    watch: Watch = model.__dict__[WATCH]
    if IN_VIEW not in vars(model) and not watch.is_as_seen():
        watch.bring_in(model, placement)


class Watch:
    """Snapshot of each component's modules and tensors; moves what was assigned since."""

    def __init__(self) -> None:
        # Use weak references: a replaced module has to be freed at once.
        self._modules: list[weakref.ref[nn.Module]] = []
        self._seen: tuple[list[int], list[torch.device]] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # A copied or unpickled model has other modules, so the snapshot is not copied.
        return Watch, ()

    def is_as_seen(self) -> bool:
        """Return True if modules, and the devices of tensors, are those of the last check."""
        return self._seen is not None and self._now() == self._seen

    def _now(self) -> tuple[list[int], list[torch.device]]:
        modules = [module for reference in self._modules if (module := reference()) is not None]
        children = [id(child) for module in modules for child in module._modules.values()]
        devices = [value.device for module in modules for _, value, _ in held_tensors(module)]
        return children, devices

    def bring_in(self, model: Model, placement: Placement) -> None:
        """Move misplaced parts to their component, and warn of them."""
        with torch.inference_mode(False), torch.no_grad():
            self._attach(model, placement)
            shared = _shared(model, placement)
            mover, moved, left = Mover(), [], []
            for tensor in list(_elsewhere(model, placement)):
                if shared(tensor.module) and not tensor.module._parameters:
                    continue  # such as a rotary table that blocks share
                if shared(tensor.module) or (tensor.is_weight and shared(tensor.value)):
                    _run_where_it_is(tensor.module)
                    left.append(tensor)
                    continue
                moved.append(tensor)
                mover.move(tensor.module, tensor.name, tensor.planned)
            if moved:  # some may have gone to host memory
                pin(model, placement)
            roots = [root for _, root in placement.modules_of(model)]
            for root in roots:  # last, so outside `PinnedModule`, which asks where the weights are
                attach_parts(root, root)
            self._modules = [weakref.ref(module) for root in roots for module in _own_modules(root)]
            self._seen = self._now()
        _warn(moved, left)

    def _attach(self, model: Model, placement: Placement) -> None:
        """Attach `PinnedModule` to users' modules, and detach it from all others."""
        for module in model.modules():
            PinnedModule.detach(module)
        if not hasattr(model, "original_model"):  # a Bridge's move to their component
            for module in list(_users_modules(model, placement)):
                _run_where_it_is(module)


def _run_where_it_is(module: nn.Module) -> None:
    if not runs_where_it_is(module):
        PinnedModule().attach(module)


@dataclass(frozen=True)
class PlacedTensor:
    """A parameter or buffer of a model: the module that holds it, and its planned device."""

    full_name: str  # in the model
    name: str  # in the module
    module: nn.Module
    value: torch.Tensor
    is_weight: bool
    planned: torch.device

    @property
    def is_misplaced(self) -> bool:
        """True if it is on another device. False on meta, where tensors have no values."""
        return not self.value.is_meta and self.value.device != self.planned


def held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield a module's own parameters and buffers: name, tensor, and True for a parameter."""
    for tensors, is_weight in ((module._parameters, True), (module._buffers, False)):
        for name, value in tensors.items():
            if value is not None:
                yield name, value, is_weight


def _elsewhere(model: Model, placement: Placement) -> Iterator[PlacedTensor]:
    """Yield misplaced tensors, except those in modules that run on their own device."""
    for component, root in placement.modules_of(model):
        names = {id(module): path for path, module in root.named_modules(prefix=component.name)}
        for module in _own_modules(root):
            for name, value, is_weight in held_tensors(module):
                # While an offloaded block runs, its weights are on its device.
                planned = component.stored_on if is_weight else component.device
                path = join_path(names[id(module)], name)
                tensor = PlacedTensor(path, name, module, value, is_weight, planned)
                if tensor.is_misplaced and not (is_weight and value.device == component.device):
                    yield tensor


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it, except hook points and modules that `PinnedModule` runs."""
    inside: set[nn.Module] = set()
    for part in module.modules():
        if runs_where_it_is(part):
            inside.update(part.modules())
        elif part not in inside and not isinstance(part, HookPoint):
            yield part


def _shared(model: Model, placement: Placement) -> Callable[[nn.Module | torch.Tensor], bool]:
    """Return a check whether components on several devices share a given module or weight."""
    places: dict[int, set[torch.device]] = defaultdict(set)
    for component, root in placement.modules_of(model):
        for module in root.modules():
            for owned in (module, *module._parameters.values()):
                places[id(owned)].add(component.stored_on)
    return lambda owned: len(places[id(owned)]) > 1


def _warn(moved: list[PlacedTensor], left: list[PlacedTensor]) -> None:
    sentences = []
    if moved:
        sentences.append(
            "tensors were assigned from another device, and are moved to their component's: "
            f"{_named(moved)}; to do without the copy, assign value.to('{moved[0].planned}')"
        )
    if left:
        sentences.append(
            "tensors are shared by components on several devices, and copied in each run: "
            f"{_named(left)}; if they need not be shared, put a copy into each component"
        )
    if sentences:
        warnings.warn("; ".join(sentences), stacklevel=2)


def _named(tensors: list[PlacedTensor]) -> str:
    size = sum({id(tensor.value): tensor_bytes(tensor.value) for tensor in tensors}.values())
    return f"{list_names([tensor.full_name for tensor in tensors])} ({gib(size)})"
