"""HookedTransformer and TransformerBridge over several devices: import before loading.

Importing applies the patches that `report()` lists, unless TL_DEVICEFIX_DISABLE=1 is set.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from tl_devicefix.patches import apply, patched, report, restore, unpatched

if TYPE_CHECKING:
    from tl_devicefix.attending.choosing import attention
    from tl_devicefix.before_loading.estimation import Estimate, estimate
    from tl_devicefix.before_loading.planning import plan
    from tl_devicefix.before_loading.rehearsal import Rehearsal, rehearse
    from tl_devicefix.checking import check
    from tl_devicefix.flights.flying import in_flight
    from tl_devicefix.flights.sweeping import one_by_one, sweep
    from tl_devicefix.harvests.harvesting import harvest
    from tl_devicefix.harvests.reading import open_harvest
    from tl_devicefix.hosts.joining import join
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
    "attention",
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
    "simulate",
    "sweep",
    "unpatched",
]

_LAZY = {
    "attention": "tl_devicefix.attending.choosing",
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
    "simulate": "tl_devicefix.simulation",
    "sweep": "tl_devicefix.flights.sweeping",
}


def __getattr__(name: str) -> Any:
    """Import what needs TransformerLens or torch only when it is asked for."""
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tl_devicefix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _is_the_command() -> bool:
    """Whether this is `python -m tl_devicefix`, which applies the patches once it needs them.

    Python's own: while `-m` looks for its module, and so imports this, `sys.argv[0]` is "-m".
    """
    started = sys.orig_argv
    named = started[started.index("-m") + 1 :][:1] if "-m" in started else []
    return sys.argv[:1] == ["-m"] and named == ["tl_devicefix"]


if os.environ.get("TL_DEVICEFIX_DISABLE", "0") in ("", "0") and not _is_the_command():
    apply()
