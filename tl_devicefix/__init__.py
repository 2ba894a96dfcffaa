"""HookedTransformer and TransformerBridge over several devices: import before loading.

Importing applies the patches that `report()` lists, unless TL_DEVICEFIX_DISABLE=1 is set: at once
if TransformerLens is imported already, or else as soon as it is.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from tl_devicefix.patches import apply as _apply
from tl_devicefix.patching.import_hook import call_now, when_imported
from tl_devicefix.patching.versions import check_version

if TYPE_CHECKING:
    from tl_devicefix.attention.implementation import set_attn_implementation
    from tl_devicefix.before_loading.estimation import Estimate, estimate
    from tl_devicefix.before_loading.planning import plan
    from tl_devicefix.before_loading.rehearsal import Rehearsal, rehearse
    from tl_devicefix.checking import check
    from tl_devicefix.flights.flying import in_flight
    from tl_devicefix.flights.sweeping import one_by_one, sweep
    from tl_devicefix.harvests.harvesting import harvest
    from tl_devicefix.harvests.reading import open_harvest
    from tl_devicefix.hosts.joining import join
    from tl_devicefix.patches import apply, patched, report, restore, unpatched
    from tl_devicefix.placement.gathering_device import gather_on
    from tl_devicefix.placement.placement import Placement
    from tl_devicefix.running.mixing import mix_devices
    from tl_devicefix.simulation import simulate

__version__ = "0.2.0"
__all__ = [
    "Estimate",
    "Placement",
    "Rehearsal",
    "apply",
    "check",
    "estimate",
    "gather_on",
    "harvest",
    "in_flight",
    "join",
    "mix_devices",
    "one_by_one",
    "open_harvest",
    "patched",
    "plan",
    "rehearse",
    "report",
    "restore",
    "set_attn_implementation",
    "simulate",
    "sweep",
    "unpatched",
]

_LAZY = {
    **dict.fromkeys(("apply", "patched", "report", "restore", "unpatched"), "tl_devicefix.patches"),
    "check": "tl_devicefix.checking",
    "Estimate": "tl_devicefix.before_loading.estimation",
    "estimate": "tl_devicefix.before_loading.estimation",
    "gather_on": "tl_devicefix.placement.gathering_device",
    "harvest": "tl_devicefix.harvests.harvesting",
    "in_flight": "tl_devicefix.flights.flying",
    "join": "tl_devicefix.hosts.joining",
    "mix_devices": "tl_devicefix.running.mixing",
    "one_by_one": "tl_devicefix.flights.sweeping",
    "open_harvest": "tl_devicefix.harvests.reading",
    "Placement": "tl_devicefix.placement.placement",
    "plan": "tl_devicefix.before_loading.planning",
    "Rehearsal": "tl_devicefix.before_loading.rehearsal",
    "rehearse": "tl_devicefix.before_loading.rehearsal",
    "set_attn_implementation": "tl_devicefix.attention.implementation",
    "simulate": "tl_devicefix.simulation",
    "sweep": "tl_devicefix.flights.sweeping",
}


def __getattr__(name: str) -> Any:
    """Import what needs TransformerLens or torch only when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tl_devicefix' has no attribute {name!r}")
    if name != "open_harvest":  # which needs no TransformerLens
        call_now()
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__


if os.environ.get("TL_DEVICEFIX_DISABLE", "0") in ("", "0"):
    check_version()
    when_imported(_apply)
