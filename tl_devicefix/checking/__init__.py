"""Check a live model: whether all of it is where the placement says, with values, and nothing else.

One file per question: `places`, `hosts`, `configs`, `setups`, `values`, `norms`, `hooks`. What is
asked of a HookedTransformer and of a TransformerBridge in different ways is in `hooked` and
`bridge`.
"""

from __future__ import annotations

from typing import Any

from tl_devicefix.checking.by_class import of_class
from tl_devicefix.checking.configs import config_findings
from tl_devicefix.checking.hooks import hook_findings, hook_notes
from tl_devicefix.checking.hosts import host_findings, host_notes
from tl_devicefix.checking.places import device_findings, memory, place_notes
from tl_devicefix.checking.report import Finding, Report
from tl_devicefix.checking.values import value_findings
from tl_devicefix.dispatch.forward import WHY_REFUSED, is_unfinished
from tl_devicefix.monkeypatch.versions import class_names, is_bridge, is_hooked_transformer

__all__ = ["Finding", "Report", "check"]


def check(model: Any, repair: bool = False) -> Report:
    """Look through a live model for what work on it may have left wrong.

    Every parameter and buffer is compared with `model.placement` (without one, with `cfg.device`);
    then come values that are missing, NaN or infinite, parameters that share storage, norms that
    are not folded as the config says, processing that was interrupted, and hooks left behind.
    Nothing is copied between devices, and nothing is changed unless `repair` is set.

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
        HostLost: if a rank is lost that has some of the model.
        ValueError: if the model has no placement and its `cfg.device` does not exist here; or if it
            is to be spread by its config, and does not fit.
        torch.OutOfMemoryError: if a device has no room for what belongs there. What was moved until
            then stays moved; the rest is where it was.

    >>> assert check(model)  # doctest: +SKIP
    """
    if not is_hooked_transformer(model) and not is_bridge(model):
        raise TypeError(
            f"check looks through a {class_names()}, but this is a {type(model).__name__}: give "
            "the model itself"
        )
    findings = _repairable(model)
    repaired: list[Finding] = []
    if repair and findings:
        found = findings
        of_class(model).put_right(model)
        findings = _repairable(model)
        repaired = [each for each in found if each not in findings]
    interrupted = [Finding("processing", "model", WHY_REFUSED)] if is_unfinished(model) else []
    others = [
        host_findings(model),
        value_findings(model),
        of_class(model).norm_findings(model),
        hook_findings(model),
    ]
    return Report(
        findings=(*interrupted, *findings, *(each for kind in others for each in kind)),
        repaired=tuple(repaired),
        notes=(*place_notes(model), *host_notes(model), *hook_notes(model)),
        n_parameters=of_class(model).count_parameters(model),
        memory=memory(model),
    )


def _repairable(model: Any) -> list[Finding]:
    """What `repair` mends."""
    return [
        *config_findings(model),
        *device_findings(model),
        *of_class(model).setup_findings(model),
    ]
