"""Check a live model: all of it is where the placement says, and no hooks are left."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint, LensHandle

from tl_devicefix.adapters import adapter_of
from tl_devicefix.dispatch.carrying import not_carried_to
from tl_devicefix.dispatch.forward import WHY_REFUSED, is_unfinished
from tl_devicefix.dispatch.naming import expression, join_path, list_names, named_modules
from tl_devicefix.dispatch.user_modules import PlacedTensor, held_tensors, runs_where_it_is
from tl_devicefix.fusing.listening import HOOKS
from tl_devicefix.monkeypatch.patch import is_of_user
from tl_devicefix.placement.devices import printed, resolve, with_index
from tl_devicefix.placement.elsewhere import is_elsewhere
from tl_devicefix.placement.fitting import Mover
from tl_devicefix.placement.memory import gib
from tl_devicefix.placement.placement import component_of, placement_of
from tl_devicefix.types import Model

Kind = Literal[
    "processing",  # some weights are unprocessed
    "config",  # cfg.device or cfg.n_devices differs from the placement
    "device",  # a tensor is on another device than the placement says
    "setup",  # a module was assigned without model.setup()
    "hooks",  # a leftover hook
    "numbers",  # the load found that the numbers differ from transformers'
]

_REPAIR = "tl_devicefix.check(model, repair=True)"


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        kind: the sort of fault, for programs.
        name: the component, module or hook point, as the model names it.
        message: the fault, in words.
        fix: the line of code that fixes it, where there is one.
    """

    kind: Kind
    name: str
    message: str
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.message}: {self.fix}" if self.fix else self.message


def check(model: Model, repair: bool = False) -> Report:
    """Return the faults of a live model: misplaced parts, leftover hooks, a config that was edited.

    `check` compares every parameter and buffer with `model.placement` (without one, with
    `cfg.device`). It also finds processing that was interrupted, and repeats the load's warning if
    the numbers are not transformers'. It reads no values, and changes nothing without `repair`.

    Args:
        model: a HookedTransformer or a TransformerBridge, on one device or several. SAEs that are
            attached to a HookedTransformer may be on any device.
        repair: move misplaced parts to their devices, set up modules that were assigned, and make
            the config follow the placement. Other faults stay listed.

    Returns:
        A report, which is true if all is well. It prints as a list of faults, each with the line
        that fixes it.

    Raises:
        TypeError: if the model is neither of these.
        HostLost: if a host that has blocks of the model is lost.
        ValueError: if the model has no placement and its `cfg.device` does not exist here.
        torch.OutOfMemoryError: if a device has no room for its parts. Parts that were
            already moved stay moved; the others are where they were.

    >>> assert check(model)  # doctest: +SKIP
    """
    adapter = adapter_of(model)
    findings = _repairable(model)
    repaired: list[Finding] = []
    if repair and findings:
        before = findings
        bring_back(model)
        adapter.realign(model, placement_of(model))
        # Some faults cannot be repaired.
        findings = _repairable(model)
        repaired = [finding for finding in before if finding not in findings]
    if is_unfinished(model):
        findings = [Finding("processing", "model", WHY_REFUSED), *findings]
    findings += hook_findings(model)
    if (warning := getattr(model, "numbers_warning", None)) is not None:
        findings.append(Finding("numbers", "model", warning))
    return Report(tuple(findings), tuple(repaired))


def _repairable(model: Model) -> list[Finding]:
    return [*config_findings(model), *device_findings(model), *setup_findings(model)]


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a check. It is true if all is well; printing it lists the faults.

    Attributes:
        findings: the faults.
        repaired: the faults that have been repaired.
    """

    findings: tuple[Finding, ...]
    repaired: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        """True if nothing is wrong, or everything is repaired."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.well

    def __repr__(self) -> str:
        lines = []
        if self.repaired:
            lines.append(f"repaired ({len(self.repaired)}):")
            # A repaired fault needs no fix any more.
            lines += _listed([replace(repair, fix=None) for repair in self.repaired])
        lines.append("all is well" if self.well else f"wrong ({len(self.findings)}):")
        return "\n".join([*lines, *_listed(self.findings)])


_MAX_OF_A_KIND = 8  # a model that `.to` moved has hundreds


def _listed(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each finding, up to `_MAX_OF_A_KIND` of each kind."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        by_kind[finding.kind].append(f"- {finding}")
    for lines in by_kind.values():
        yield from lines[:_MAX_OF_A_KIND]
        if len(lines) > _MAX_OF_A_KIND:
            yield f"- and {len(lines) - _MAX_OF_A_KIND} more of this kind"


def config_findings(model: Model) -> Iterator[Finding]:
    """Find a `cfg.device` or `cfg.n_devices` that differs from the placement."""
    placement, cfg = placement_of(model), model.cfg
    if placement is None:
        return
    home, count = placement.home, len(placement.devices)
    given: Any = cfg.device  # users may set an index
    device = torch.device(given)
    if device.type != home.type or with_index(device) != home:
        message = f"cfg.device is {str(cfg.device)!r}, but the placement's home is {home}"
        yield Finding("config", "cfg.device", message, f'model.cfg.device = "{home}"')
    if cfg.n_devices != count:
        message = f"cfg.n_devices is {cfg.n_devices}, but the placement has {count} devices"
        yield Finding("config", "cfg.n_devices", message, f"model.cfg.n_devices = {count}")


def _tensors(model: Model) -> Iterator[PlacedTensor]:
    """Yield the tensors of a model, without those of attached SAEs and the like."""
    placement = placement_of(model)
    attached = set[nn.Module]()
    for module in model.modules():
        if runs_where_it_is(module):
            attached.update(module.modules())
    for path, module in named_modules(model):
        if module in attached:
            continue
        for name, value, is_weight in held_tensors(module):
            if placement is None:
                device = resolve(model.cfg.device)
            else:
                place = _in_placement(model, join_path(path, name))
                device = placement.device_for(place, is_weight)
                if is_elsewhere(device):  # a TensorElsewhere's `device` is home
                    device = placement.home
            yield PlacedTensor(join_path(path, name), name, module, value, is_weight, device)


def _in_placement(model: Model, name: str) -> str:
    """Return a tensor's name; for a Bridge's component within a block, that of the block."""
    # See `layout_of`: T5's position biases, for example, lie in its first block.
    components: dict[str, tuple[str, object]] = getattr(model, "real_components", {})
    part, _, rest = name.partition(".")
    own, _ = components.get(part, ("", None))
    for other, (path, blocks) in components.items():
        if isinstance(blocks, list) and own.startswith(f"{path}."):
            index = own.removeprefix(f"{path}.").partition(".")[0]
            return f"{other}.{index}.{rest}"
    return name


def bring_back(model: Model) -> None:
    """Move each misplaced tensor, with its gradient, to its device."""
    mover = Mover()
    for tensor in list(_tensors(model)):
        if tensor.is_misplaced:
            mover.move(tensor.module, tensor.name, tensor.planned)


def device_findings(model: Model) -> Iterator[Finding]:
    """Find the misplaced tensors of each component."""
    components: dict[str, list[PlacedTensor]] = defaultdict(list)
    for tensor in _tensors(model):
        components[component_of(tensor.full_name)].append(tensor)
    by = "cfg.device" if placement_of(model) is None else "the placement"
    for name, tensors in components.items():
        misplaced = [tensor for tensor in tensors if tensor.is_misplaced]
        if not misplaced:
            continue
        what = name
        if len(misplaced) < len(tensors):
            parts = [tensor.full_name.removeprefix(f"{name}.") for tensor in misplaced]
            what = f"{list_names(parts)} of {name}"
        # Tied parameters are one tensor, which counts once.
        size = gib(sum({id(t.value): t.value.nbytes for t in misplaced}.values()))
        actual = list_names(sorted({printed(tensor.value.device) for tensor in misplaced}))
        planned = list_names(sorted({printed(tensor.planned) for tensor in misplaced}))
        message = f"{what} ({size}) is on {actual}, but {by} puts it on {planned}"
        yield Finding("device", name, message, _REPAIR)


def setup_findings(model: Model) -> Iterator[Finding]:
    """Find modules with unregistered hook points, and modules to which no input is carried."""
    placement, registered = placement_of(model), set(model.hook_dict.values())
    paths = [] if placement is None else not_carried_to(model, placement)
    points = {
        path: module for path, module in named_modules(model) if isinstance(module, HookPoint)
    }
    present = set(points.values())
    for path, point in points.items():
        # Some names are those of another point: a BERT's `hook_mlp_in` is its `mlp.hook_in`.
        if point not in registered and model.hook_dict.get(path) not in present:
            paths.append(path.rpartition(".")[0])
    for path in dict.fromkeys(paths):  # only the outermost one
        if not any(path != other and path.startswith(f"{other}.") for other in paths):
            name = path or "model"
            message = f"{name} has changed since the model was set up: it lacks hooks"
            yield Finding("setup", name, message, _REPAIR)


def hook_findings(model: Model) -> Iterator[Finding]:
    """Find users' leftover hooks, which would run in the next forward; permanent ones may stay."""
    for path, module in named_modules(model):
        handles: list[LensHandle] = []
        if isinstance(module, HookPoint):
            handles = [*module.fwd_hooks, *module.bwd_hooks]
        if names := ", ".join(_name_of_handle(h) for h in handles if not h.is_permanent):
            message = f"{path} still has a hook ({names})"
            yield Finding("hooks", path, message, "model.reset_hooks()")
        # PyTorch's dicts also have a hook point's hooks, which were handled above.
        own = {handle.hook.id for handle in handles}
        for attribute in HOOKS:
            kind = attribute.strip("_s").replace("pre_", "pre-").replace("_", " ")
            for key, hook in getattr(module, attribute).items():
                if key not in own and is_of_user(hook):
                    name = path or "model"
                    message = f"{name} still has a PyTorch {kind} ({_name(hook)})"
                    fix = f"del {expression(path)}.{attribute}[{key}]"
                    yield Finding("hooks", name, message, fix)


def _name_of_handle(handle: LensHandle) -> str:
    if (hook := getattr(handle, "user_hook", None)) is not None:
        return _name(hook)
    # In TransformerLens 2.x, the hook's name is the repr of the user's hook.
    registered = (handle.hook.hooks_dict_ref() or {}).get(handle.hook.id)
    name = str(getattr(registered, "__name__", "unknown"))
    return re.sub(r"^<function (.*) at 0x\w+>$", r"\1", name)[:80]


def _name(hook: object) -> str:
    # The repr of a partial may show a whole cache.
    hook = getattr(hook, "func", hook)
    return (getattr(hook, "__qualname__", None) or type(hook).__name__)[:80]
