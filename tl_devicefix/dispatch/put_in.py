"""What people put into a component by hand, from another device: brought to the component.

A mask of another block, a rotary table, a module, a parameter, `.data`. It is brought when the
model is set up, and at the latest before the component runs. Modules that are not TransformerLens's
run where they are (`attached.py`), and so does what components on several devices share.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.dispatch.attached import detach_copies, run_where_it_is, runs_where_it_is
from tl_devicefix.dispatch.joining import bytes_of
from tl_devicefix.dispatch.naming import expression, joined, listed, stacklevel_of_user
from tl_devicefix.offload.visiting import pin
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.placement import PlacedComponent, Placement
from tl_devicefix.placement.tables import gib

_WATCH = "_tl_devicefix_watch"


def watch(
    model: Any, placement: Placement, attach: Callable[[Any, Placement], None] | None = None
) -> list[Any]:
    """Bring what was put in to where it belongs: now, and before a component runs.

    Args:
        model: aligned, but for this.
        placement: where its components belong.
        attach: lets modules of others run where they are, if they may be in this model.

    Returns:
        The handles of the hooks that look.
    """
    watching: Watch = model.__dict__.setdefault(_WATCH, Watch(attach))
    watching.bind(model)
    watching.bring_in(model)
    handles = []
    for component, module in _components(model, placement):
        look = Look(component, watching)
        look.see(module)
        handles.append(module.register_forward_pre_hook(look))
    return handles


def look_early(model: Any, placement: Placement) -> None:
    """At the start of a forward: know the model, and look at offloaded blocks, which are sent for.

    It may be a copied or unpickled model, whose hooks do not know yet which model they are of.
    """
    watching: Watch | None = model.__dict__.get(_WATCH)
    if watching is None:
        return
    watching.bind(model)
    if not watching.has_looked:
        watching.bring_in(model)
    for component in placement.components if HOST in placement.memories else ():
        if component.offloaded:
            block = model.get_submodule(component.name)
            for hook in list(block._forward_pre_hooks.values()):
                if isinstance(hook, Look):
                    hook(block, ())


class Watch:
    """What the hooks of one model share: the model, which they do not hold, and how to mend it.

    Args:
        attach: as for `watch`.
    """

    def __init__(self, attach: Callable[[Any, Placement], None] | None) -> None:
        self._attach = attach
        self._model: weakref.ref[Any] | None = None
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self.has_looked = False
        """Whether all components have been looked through, in this very model."""

    def __reduce__(self) -> Any:
        return Watch, (self._attach,)

    def model(self) -> Any:
        """The model; None in a copy that has not run yet."""
        return None if self._model is None else self._model()

    def bind(self, model: Any) -> None:
        """Know the model."""
        if self.model() is not model:
            self._model = weakref.ref(model)

    def bring_in(self, model: Any) -> None:
        """Bring all that is elsewhere to its component, and warn of it once."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            placement = model.placement
            detach_copies(model)
            if self._attach is not None:
                self._attach(model, placement)
            shared = _shared(model, placement)
            copies: dict[tuple[int, torch.device], torch.Tensor] = {}
            moved, left = [], []
            for each in list(_put_in(model, placement)):
                if shared(each.module) and not each.module._parameters:
                    continue  # as some Hugging Face models have one rotary table for all blocks
                if shared(each.module) or (each.is_weight and shared(each.value)):
                    run_where_it_is(model, placement, each.module)
                    left.append(each)
                    continue
                moved.append(each)
                if each.is_weight:
                    _move(each.value, each.belongs)
                else:  # another block may have it too, rightly
                    key = id(each.value), each.belongs
                    copies[key] = copies[key] if key in copies else each.value.to(each.belongs)
                    each.module._buffers[each.name] = copies[key]
            if moved:
                pin(model, placement)
            self.has_looked = True
        _warn(moved, [each for each in left if each.full_name not in self._told])
        self._told |= {each.full_name for each in left}


class Look:
    """Forward pre-hook of a component: has something been put in from another device?

    It asks for the device of each tensor and compares each module's children with those that were
    there, as that is quick. It holds no module: modules hold it, and weights that are replaced are
    to be gone at once.

    Args:
        component: the component's place.
        watching: what mends it.
    """

    def __init__(self, component: PlacedComponent, watching: Watch) -> None:
        self._component = component
        self._watching = watching
        self._seen: list[_Seen] | None = None

    def __reduce__(self) -> Any:
        return Look, (self._component, self._watching)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look, and mend."""
        if torch.compiler.is_compiling():
            return
        if self._seen is None and self._watching.has_looked:
            self.see(module)
        if self._is_as_seen():
            return
        model = self._watching.model()
        if model is not None:
            self._watching.bring_in(model)
            self.see(module)

    def see(self, module: nn.Module) -> None:
        """Remember what is there, as it is right."""
        self._seen = [_Seen.of(each, self._component) for each in _own_modules(module)]

    def _is_as_seen(self) -> bool:
        return self._seen is not None and all(map(_Seen.is_so, self._seen))


class _Seen(NamedTuple):
    """A module as it was when all was right: its children, and where its tensors may be."""

    module: weakref.ref[nn.Module]
    children: list[Callable[[], nn.Module | None]]
    places_of_weights: set[torch.device]
    places_of_buffers: set[torch.device]

    @classmethod
    def of(cls, module: nn.Module, component: PlacedComponent) -> _Seen:
        """As it is now."""
        children = [_reference(child) for child in module._modules.values()]
        places = [
            {tensor.device for tensor in held.values() if tensor is not None}.union(
                _places(component, is_weight)
            )
            for held, is_weight in ((module._parameters, True), (module._buffers, False))
        ]
        return cls(weakref.ref(module), children, *places)

    def is_so(self) -> bool:
        """Whether it is still so."""
        module = self.module()
        if module is None or len(module._modules) != len(self.children):
            return False
        for known, child in zip(self.children, module._modules.values()):
            if known() is not child:
                return False
        return _all_are_on(module._parameters, self.places_of_weights) and _all_are_on(
            module._buffers, self.places_of_buffers
        )


def _reference(child: nn.Module | None) -> Callable[[], nn.Module | None]:
    return _no_module if child is None else weakref.ref(child)


def _no_module() -> None:
    return None


def _all_are_on(held: Mapping[str, torch.Tensor | None], places: set[torch.device]) -> bool:
    for tensor in held.values():
        if tensor is not None and tensor.device not in places and not tensor.is_meta:
            return False
    return True


class _PutIn(NamedTuple):
    """A tensor that is not where its component's belong."""

    path: str
    name: str
    module: nn.Module
    value: torch.Tensor
    is_weight: bool
    belongs: torch.device

    @property
    def full_name(self) -> str:
        return joined(self.path, self.name)

    @property
    def line(self) -> str:
        """The line that puts in one that is where it belongs."""
        put = ".data" if self.is_weight else ""  # torch takes no tensor for a parameter
        return f'{expression(self.full_name)}{put} = value.to("{self.belongs}")'


def _components(model: Any, placement: Placement) -> Iterator[tuple[PlacedComponent, nn.Module]]:
    modules = dict(model.named_modules())
    for component in placement.components:
        if component.name in modules:
            yield component, modules[component.name]


def _put_in(model: Any, placement: Placement) -> Iterator[_PutIn]:
    """What is elsewhere; not what has no values, and nothing in modules that run where they are."""
    for component, module in _components(model, placement):
        names = {id(each): path for path, each in module.named_modules(prefix=component.name)}
        for each in _own_modules(module):
            for held, is_weight in ((each._parameters, True), (each._buffers, False)):
                places = _places(component, is_weight)
                for name, value in held.items():
                    if value is not None and value.device not in places and not value.is_meta:
                        yield _PutIn(names[id(each)], name, each, value, is_weight, places[0])


def _places(component: PlacedComponent, is_weight: bool) -> tuple[torch.device, ...]:
    """Where a component's tensors may be, and first where they belong."""
    if is_weight and component.offloaded:  # while it runs, its weights are on the device
        return component.stored_on, component.device
    return (component.device,)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those in it, but for hook points, and for what runs where it is."""
    inside: set[nn.Module] = set()
    for each in module.modules():
        if runs_where_it_is(each):
            inside.update(each.modules())
        elif each not in inside and not isinstance(each, HookPoint):
            yield each


def _shared(model: Any, placement: Placement) -> Callable[[Any], bool]:
    """Whether components on several devices have a module or a parameter together."""
    places: dict[int, set[torch.device]] = defaultdict(set)
    for component, module in _components(model, placement):
        for each in module.modules():
            for held in (each, *each._parameters.values()):
                places[id(held)].add(component.stored_on)
    return lambda held: len(places[id(held)]) > 1


def _move(parameter: torch.Tensor, device: torch.device) -> None:
    """Move a parameter, which stays the same object, and its gradient."""
    gradient = parameter.grad
    parameter.data = parameter.data.to(device)
    if gradient is not None and gradient.device != device:
        parameter.grad = None
        parameter.grad = gradient.to(device)


def _warn(moved: list[_PutIn], left: list[_PutIn]) -> None:
    """One warning for all."""
    said = []
    if moved:
        said.append(
            "what was put in from another device is brought to its component's, "
            f"{_named(moved)}: put in one that is there, {moved[0].line}"
        )
    if left:
        said.append(
            "what is shared by components on several devices is copied at each run, "
            f"{_named(left)}: if they need not share it, put a copy in each"
        )
    if said:
        warnings.warn("; ".join(said), stacklevel=stacklevel_of_user(sys._getframe()))


def _named(found: list[_PutIn]) -> str:
    size = sum({id(each.value): bytes_of(each.value) for each in found}.values())
    return f"{listed([each.full_name for each in found])} ({gib(size)})"
