"""What a check has found, as people and programs read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tl_devicefix.placement.devices import printed, site_of
from tl_devicefix.placement.memory import format_table, gib

Kind = Literal[
    "processing",  # the weights are in part those from before
    "config",  # cfg.device or cfg.n_devices is not what the placement says
    "device",  # a tensor is not where the placement says
    "setup",  # a module was put in, and the model not told
    "norms",  # folded, or not folded, against the config
    "hooks",  # left behind
    "attached",  # an SAE or the like that runs on a device of its own: a note
    "hosts",  # a device of a host that is gone
]


@dataclass(frozen=True)
class Finding:
    """A fault, or a note.

    Attributes:
        kind: the sort of fault, for programs.
        name: the tensor, module or hook point, as the model names it.
        message: the fault, in words.
        fix: the line of code that mends it, where there is one.
    """

    kind: Kind
    name: str
    message: str
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.message}: {self.fix}" if self.fix else self.message


@dataclass(frozen=True)
class Memory:
    """Bytes of parameters and buffers on one device.

    Attributes:
        device: the device.
        planned: what the placement puts there.
        held: what is there.
    """

    device: torch.device
    planned: int
    held: int


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a check. It is true if all is well; printing it lists the faults.

    Attributes:
        findings: the faults.
        repaired: the faults that have been repaired.
        notes: facts worth knowing that are no faults.
        n_parameters: how many numbers the model's parameters are.
        memory: for each device, the bytes that are planned and the bytes that are there.
    """

    findings: tuple[Finding, ...]
    repaired: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    n_parameters: int
    memory: tuple[Memory, ...]

    @property
    def well(self) -> bool:
        """Whether nothing is wrong (any more)."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.well

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.repaired:
            yield f"repaired ({len(self.repaired)}):"
            yield from _listed([replace(repair, fix=None) for repair in self.repaired])
        if self.well:
            held = [memory for memory in self.memory if memory.held]
            on = f"on {held[0].device}" if len(held) == 1 else f"on {len(held)} devices"
            hosts = {
                site.hostname for memory in held if (site := site_of(memory.device)) is not None
            }
            on += f" of {len(hosts)} hosts ({', '.join(sorted(hosts))})" if len(hosts) > 1 else ""
            size = gib(sum(memory.held for memory in held))
            yield f"all is well: {self.n_parameters:,} parameters ({size} with buffers) {on}"
        else:
            yield f"wrong ({len(self.findings)}):"
            yield from _listed(self.findings)
        if self.notes:
            yield f"not wrong, but worth knowing ({len(self.notes)}):"
            yield from _listed(self.notes)
        if any(finding.kind == "device" for finding in self.findings):
            sizes = [(printed(m.device), gib(m.planned), gib(m.held)) for m in self.memory]
            yield format_table([("device", "planned", "really there"), *sizes], "<>>")


_MOST_OF_A_KIND = 8


def _listed(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each, but not hundreds of one kind."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        by_kind[finding.kind].append(f"- {finding}")
    for lines in by_kind.values():
        yield from lines[:_MOST_OF_A_KIND]
        if len(lines) > _MOST_OF_A_KIND:
            yield f"- and {len(lines) - _MOST_OF_A_KIND} more of this kind"
