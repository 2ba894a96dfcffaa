"""Check a live model: all of it is where the placement says, and no hooks are left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tl_devicefix.adapters import Adapter, adapter_of
from tl_devicefix.checking.findings import (
    Finding,
    Kind,
    bring_back,
    config_findings,
    device_findings,
    hook_findings,
    setup_findings,
)
from tl_devicefix.dispatch.forward import WHY_REFUSED, is_unfinished
from tl_devicefix.placement.placement import placement_of
from tl_devicefix.types import Model

__all__ = ["Finding", "Kind", "Report", "check"]


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
    findings = _repairable(model, adapter)
    repaired: list[Finding] = []
    if repair and findings:
        before = findings
        bring_back(model)
        adapter.realign(model, placement_of(model))
        # Some faults cannot be repaired.
        findings = _repairable(model, adapter)
        repaired = [finding for finding in before if finding not in findings]
    if is_unfinished(model):
        findings = [Finding("processing", "model", WHY_REFUSED), *findings]
    findings += hook_findings(model)
    if (warning := getattr(model, "numbers_warning", None)) is not None:
        findings.append(Finding("numbers", "model", warning))
    return Report(tuple(findings), tuple(repaired))


def _repairable(model: Model, adapter: Adapter) -> list[Finding]:
    setup = setup_findings(model, *adapter.setup_hint)
    return [*config_findings(model), *device_findings(model), *setup]


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
