"""Check a live model: whether all of it is where the placement says, and no hooks are left.

`places` and `user_hooks` ask the same of either class; what differs is in `hooked` and the
adapters.
"""

from __future__ import annotations

import importlib
from typing import Any

from tl_devicefix.adapters import Adapter, adapter_of
from tl_devicefix.checking.places import (
    attached_notes,
    bring_back,
    config_findings,
    count_parameters,
    device_findings,
    host_findings,
    is_unspread,
    memory,
    placement_of,
    setup_findings,
)
from tl_devicefix.checking.report import Finding, Report
from tl_devicefix.checking.user_hooks import hook_findings, hook_notes
from tl_devicefix.dispatch.forward import WHY_REFUSED, is_unfinished

__all__ = ["Finding", "Report", "check"]


def check(model: Any, repair: bool = False) -> Report:
    """Return the faults of a live model: misplaced parts, leftover hooks, a config that was edited.

    `check` compares every parameter and buffer with `model.placement` (without one, with
    `cfg.device`). It also finds a HookedTransformer's norms that are not folded as the config says,
    and processing that was interrupted. It reads no values, and changes nothing without `repair`.

    Args:
        model: a HookedTransformer or a TransformerBridge, on one device or several. SAEs that are
            attached to a HookedTransformer may be on any device.
        repair: move misplaced parts to their devices, set up modules that were put in, and make the
            config follow the placement. Other faults stay listed.

    Returns:
        A report, which is true if all is well. It prints as a list of faults, each with the line
        that mends it.

    Raises:
        TypeError: if the model is neither.
        HostLost: if a host that has blocks of the model is lost.
        ValueError: if the model has no placement and its `cfg.device` does not exist here.
        torch.OutOfMemoryError: if a device has no room for its parts. Parts that were moved until
            then stay moved; the others are where they were.

    >>> assert check(model)  # doctest: +SKIP
    """
    adapter = adapter_of(model)
    hooked: Any = None
    if adapter.NAME == "HookedTransformer":  # of which TransformerLens 4 lacks the components
        hooked = importlib.import_module("tl_devicefix.checking.hooked")
    findings = _repairable(model, adapter, hooked)
    repaired: list[Finding] = []
    if repair and findings:
        before = findings
        _put_right(model, adapter, hooked)
        findings = _repairable(model, adapter, hooked)
        repaired = [finding for finding in before if finding not in findings]
    attached = hooked.attached(model) if hooked else {}
    interrupted = [Finding("processing", "model", WHY_REFUSED)] if is_unfinished(model) else []
    return Report(
        findings=(
            *interrupted,
            *findings,
            *host_findings(model),
            *(hooked.norm_findings(model) if hooked else ()),
            *hook_findings(model),
        ),
        repaired=tuple(repaired),
        notes=(*attached_notes(model, attached), *hook_notes(model)),
        n_parameters=count_parameters(model),
        memory=memory(model),
    )


def _repairable(model: Any, adapter: Adapter, hooked: Any) -> list[Finding]:
    """What `repair` mends."""
    attached, hint = (hooked.attached(model), hooked.hint) if hooked else ({}, None)
    return [
        *config_findings(model),
        *device_findings(model, attached, hint),
        *setup_findings(model, adapter.SETUP),
    ]


def _put_right(model: Any, adapter: Adapter, hooked: Any) -> None:
    """Move what is misplaced, and make the config and the hooks follow."""
    if is_unspread(model):
        model.move_model_modules_to_device()
        return
    bring_back(model, hooked.attached(model) if hooked else {})
    adapter.realign(model, placement_of(model))
