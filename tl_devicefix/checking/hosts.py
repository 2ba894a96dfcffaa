"""Whether a model's devices are still of some host, and what it sends between hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tl_devicefix.checking.report import Finding
from tl_devicefix.checking.tensors import placement_of_model
from tl_devicefix.placement.devices import site_of
from tl_devicefix.placement.placement import by_hosts, in_short, in_words


def host_findings(model: Any) -> Iterator[Finding]:
    """Components on devices of hosts that are not joined any more."""
    placement = placement_of_model(model)
    for device in placement.devices if placement is not None else ():
        assert placement is not None
        planned = site_of(device, placement.sites)
        if planned is not None and site_of(device) != planned:
            names = in_short([each.name for each in placement.components if each.device == device])
            message = f"{names}: on {device} ({planned.name}), which is no device here any more"
            yield Finding("hosts", names, message, "load the model again, over hosts that are here")


def host_notes(model: Any) -> Iterator[Finding]:
    """That the residual stream goes between hosts more often than it has to, or weights do."""
    placement = placement_of_model(model)
    if placement is None:
        return
    times = sum(each.per_token > 0 for each in placement.crossings)
    hosts = {site_of(each, placement.sites) for each in placement.devices}
    n_hosts = len({site.host for site in hosts if site is not None})
    if times > n_hosts:
        message = (
            f"the residual stream goes from host to host {times} times in a forward, where "
            f"{n_hosts} would do: give each host blocks that follow each other"
        )
        yield Finding("hosts", "model", message)
    visits = [(each, each.per_forward) for each in placement.crossings]
    sent = by_hosts(visits, placement.sites)
    if sent:
        message = f"each forward sends weights of offloaded blocks between hosts: {in_words(sent)}"
        yield Finding("hosts", "model", message)
