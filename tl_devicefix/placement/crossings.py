"""What crosses between hosts in a forward, by where the components are.

The residual stream, once for each boundary between hosts and once home; and the weights of
offloaded blocks that run on another host than the script's, in whose memory they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tl_devicefix.placement.devices import HOST, site_of
from tl_devicefix.placement.memory import gib
from tl_devicefix.simulation.sites import Site

BetweenHosts = dict[tuple[str, str], int]
"""Bytes from one host to another, by their names."""


@dataclass(frozen=True)
class Crossing:
    """What goes from a device of one host to one of another.

    Attributes:
        source: where from; the CPU is the script's host's.
        target: where to.
        per_token: bytes for each token of each sequence.
        per_forward: bytes however many tokens there are.
    """

    source: torch.device
    target: torch.device
    per_token: int = 0
    per_forward: int = 0


def crossings(components: Sequence[Any], sites: Sequence[Site]) -> tuple[Crossing, ...]:
    """All of a forward, in order.

    Args:
        components: those of a placement, in the order they run; the first is at home.
        sites: of which host each device is.
    """
    return tuple(each for each in _moves(components) if are_of_two_hosts(each, sites))


def _moves(components: Sequence[Any]) -> Iterator[Crossing]:
    passing_on = [each for each in components if each.gives]
    for component, following in zip(passing_on, [*passing_on[1:], *passing_on[:1]]):
        if component.offloaded:
            yield Crossing(HOST, component.device, per_forward=component.weights)
        yield Crossing(component.device, following.device, per_token=component.gives)


def are_of_two_hosts(moved: Any, sites: Sequence[Site]) -> bool:
    """Whether something (with `source` and `target`) goes from one host to another."""
    return _host(moved.source, sites) != _host(moved.target, sites)


def by_hosts(moved: Iterable[tuple[Any, int]], sites: Sequence[Site]) -> BetweenHosts:
    """How much goes from each host to each other.

    Args:
        moved: what goes from `source` to `target`, and its bytes.
        sites: of which host each device is.
    """
    sums: BetweenHosts = {}
    for each, size in moved:
        if size and are_of_two_hosts(each, sites):
            pair = _host(each.source, sites), _host(each.target, sites)
            sums[pair] = sums.get(pair, 0) + size
    return sums


def _host(device: torch.device, sites: Sequence[Site]) -> str:
    """The name of a device's host; of what is no device of one, that is where the script runs."""
    site = site_of(device, sites)
    if site is None:
        return sites[0].hostname if sites else ""
    return site.hostname


def in_words(sums: BetweenHosts) -> str:
    """ "host0 -> host1 32.00 MiB, host1 -> host0 32.00 MiB"."""
    pairs = (f"{source} -> {target} {gib(size)}" for (source, target), size in sums.items())
    return ", ".join(pairs) or "nothing"
