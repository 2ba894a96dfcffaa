"""HookedTransformer and TransformerBridge across several devices: import it, then load.

Importing it imports TransformerLens and applies the patches that `report()` lists, unless
TL_DEVICEFIX_DISABLE=1 is set.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from typing import TYPE_CHECKING

from tl_devicefix.misspelt import did_you_mean

if TYPE_CHECKING:
    from tl_devicefix.activation_store.reader import load_activations
    from tl_devicefix.activation_store.save import save_activations
    from tl_devicefix.checking import check
    from tl_devicefix.dispatch.mixing import mix_devices
    from tl_devicefix.fusing.fused import fuse_blocks, unfuse_blocks
    from tl_devicefix.multihost.init_hosts import init_hosts
    from tl_devicefix.patches import disable, disabled, enable, enabled, report
    from tl_devicefix.pipelining.patching import batch_sweeps
    from tl_devicefix.pipelining.pipeline_map import pipeline_map
    from tl_devicefix.pipelining.sweep import sweep
    from tl_devicefix.placement.in_use import gather_on
    from tl_devicefix.placement.placement import Placement
    from tl_devicefix.planning.dry_run import DryRun, dry_run
    from tl_devicefix.planning.estimation import Estimate, estimate
    from tl_devicefix.planning.plan import plan
    from tl_devicefix.simulation import simulate

__version__ = "0.5.0.dev0"
__all__ = [
    "DryRun",
    "Estimate",
    "Placement",
    "batch_sweeps",
    "check",
    "disable",
    "disabled",
    "dry_run",
    "enable",
    "enabled",
    "estimate",
    "fuse_blocks",
    "gather_on",
    "init_hosts",
    "load_activations",
    "mix_devices",
    "pipeline_map",
    "plan",
    "report",
    "save_activations",
    "simulate",
    "sweep",
    "unfuse_blocks",
]

_LAZY = {
    **dict.fromkeys(("enable", "enabled", "report", "disable", "disabled"), "tl_devicefix.patches"),
    **dict.fromkeys(("fuse_blocks", "unfuse_blocks"), "tl_devicefix.fusing.fused"),
    **dict.fromkeys(("Estimate", "estimate"), "tl_devicefix.planning.estimation"),
    **dict.fromkeys(("DryRun", "dry_run"), "tl_devicefix.planning.dry_run"),
    "batch_sweeps": "tl_devicefix.pipelining.patching",
    "check": "tl_devicefix.checking",
    "gather_on": "tl_devicefix.placement.in_use",
    "init_hosts": "tl_devicefix.multihost.init_hosts",
    "load_activations": "tl_devicefix.activation_store.reader",
    "mix_devices": "tl_devicefix.dispatch.mixing",
    "pipeline_map": "tl_devicefix.pipelining.pipeline_map",
    "Placement": "tl_devicefix.placement.placement",
    "plan": "tl_devicefix.planning.plan",
    "save_activations": "tl_devicefix.activation_store.save",
    "simulate": "tl_devicefix.simulation",
    "sweep": "tl_devicefix.pipelining.sweep",
}


def __getattr__(name: str) -> object:
    """Import what needs TransformerLens or torch only when it is asked for."""
    if name not in _LAZY:
        meant = did_you_mean(name, __all__, 0.8)
        raise AttributeError(f"module 'tl_devicefix' has no attribute {name!r}{meant}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__


# The commands of `python -m tl_devicefix` call `enable()` themselves, so that help and usage errors
# need not wait for the import of TransformerLens. While Python imports this file, argv[0] is "-m".
_is_command = sys.argv[:1] == ["-m"] and ("-m", "tl_devicefix") in itertools.pairwise(sys.orig_argv)
if os.environ.get("TL_DEVICEFIX_DISABLE", "0") in ("", "0") and not _is_command:
    importlib.import_module("tl_devicefix.patches").enable()
