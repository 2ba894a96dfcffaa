"""Modules that people attach to a component, such as SAEs and probes: run where they are.

Written for one device, they are at home, whichever block they are attached to. What goes into one
joins its weights, and what comes out is carried back to where its input was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tl_devicefix.dispatch.carrying import bring_home
from tl_devicefix.dispatch.joining import JoinedAt, tensors_in
from tl_devicefix.placement.placement import Placement

_ATTACHED = "_tl_devicefix_attached"


IsOwn = Callable[[Any, str, nn.Module], bool]
"""Whether a model's own class has such a module there: of (model, its path, module)."""


def attach(model: Any, placement: Placement, is_own: IsOwn = lambda *_: False) -> None:
    """Have each attached module run where it is, on a model that runs over several devices."""
    detach(model)
    for module in list(attached_modules(model, placement, is_own)):
        run_where_it_is(model, placement, module)


def run_where_it_is(model: Any, placement: Placement, module: nn.Module) -> None:
    """Have one module of a model run where its weights are, until `detach`."""
    if not runs_where_it_is(module):
        # Not by setattr, which the components of a Bridge hand on to what they wrap.
        vars(module)["forward"] = ForwardWhereItIs(module, frozenset(placement.memories))
        model.__dict__.setdefault(_ATTACHED, []).append(module)


def detach(model: Any) -> None:
    """Undo `attach`."""
    for module in model.__dict__.pop(_ATTACHED, ()):
        _detach(module)


def detach_copies(model: Any) -> None:
    """Undo `attach` for copies of TransformerLens's modules: only what they are of is attached."""
    attached = set(model.__dict__.get(_ATTACHED, ()))
    for module in model.modules():
        if module not in attached and _package(module) == "transformer_lens":
            _detach(module)


def _detach(module: nn.Module) -> None:
    run = vars(module).get("forward")
    if isinstance(run, ForwardWhereItIs):
        del vars(module)["forward"]
        if run.own is not None:
            vars(module)["forward"] = run.own


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def runs_where_it_is(module: nn.Module) -> bool:
    """Whether `attach` has been told of this module: where it is, is its owner's business."""
    return isinstance(vars(module).get("forward"), ForwardWhereItIs)


def attached_modules(
    model: Any, placement: Placement, is_own: IsOwn = lambda *_: False
) -> Iterator[nn.Module]:
    """The outermost modules in the components that are not TransformerLens's.

    It uses some of torch's itself, but where the component runs or its weights live; or elsewhere,
    if someone moved them, which `is_own` knows.
    """
    inside: set[nn.Module] = set()
    for name, here in placement.device_map.items():
        own = (None, here, placement.stored_on(name))
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            package = _package(module)
            if module in inside or package == "transformer_lens":
                continue
            elsewhere = device_of_weights(module) not in own
            if package != "torch" or (elsewhere and not is_own(model, path, module)):
                inside.update(module.modules())
                yield module


class ForwardWhereItIs:
    """An attached module's forward: at its weights, wherever these are when it is called.

    Args:
        module: the attached module, whose forward this replaces while it is attached.
        devices: the model's; tensors on these are brought to the weights.
    """

    def __init__(self, module: nn.Module, devices: frozenset[torch.device]) -> None:
        self.own = vars(module).get("forward")
        """The forward of this very module, if that is not its class's."""
        self._module = module
        self._devices = devices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward, and return what it gives where its input is."""
        module = self._module
        forward = self.own or type(module).forward.__get__(module)
        back = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
        there = device_of_weights(module) or back
        if back is None or there is None:
            return forward(*args, **kwargs)
        with JoinedAt(there, self._devices):
            return bring_home(forward(*args, **kwargs), back)


def device_of_weights(module: nn.Module) -> torch.device | None:
    """Where a module's weights are; SAELens's wrapper holds the SAE aside of its submodules."""
    held = [each for each in vars(module).values() if isinstance(each, nn.Module)]
    modules = (module, *held)
    tensors = (t for each in modules for t in (*each.parameters(), *each.buffers()))
    return next((tensor.device for tensor in tensors), None)
