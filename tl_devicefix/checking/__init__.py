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
    """Look through a live model for what work on it may have left wrong.

    Every parameter and buffer is compared with `model.placement` (without one, with `cfg.device`);
    then come a HookedTransformer's norms that are not folded as the config says, processing that
    was interrupted, and hooks left behind. No value is read, and nothing is changed unless `repair`
    is set.

    Args:
        model: a HookedTransformer or a TransformerBridge, on one device or several. SAEs that are
            attached to a HookedTransformer may be on any device.
        repair: move what is misplaced to where the placement says, set up modules that were put in
            and make the config follow. What else is found is left as it is.

    Returns:
        What is wrong; it prints as a list in which each sentence ends with the line that mends it.
        It is true if all is well.

    Raises:
        TypeError: if it is neither.
        HostLost: if a host is lost that has some of the model.
        ValueError: if the model has no placement and its `cfg.device` does not exist here.
        torch.OutOfMemoryError: if a device has no room for what belongs there. What was moved until
            then stays moved; the rest is where it was.

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
