"""HookedTransformer and TransformerBridge across several devices: import this, then load.

The import imports TransformerLens and applies the patches that `report()` lists, unless
TL_DEVICEFIX_DISABLE=1 is set.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from typing import TYPE_CHECKING

from tl_devicefix.errors import did_you_mean

if TYPE_CHECKING:
    from tl_devicefix.activation_store.reader import load_activations as load_activations
    from tl_devicefix.activation_store.save import save_activations as save_activations
    from tl_devicefix.checking import check as check
    from tl_devicefix.dispatch.mixing import mix_devices as mix_devices
    from tl_devicefix.fusing.fused import fuse_blocks as fuse_blocks
    from tl_devicefix.fusing.fused import unfuse_blocks as unfuse_blocks
    from tl_devicefix.multihost.init_hosts import init_hosts as init_hosts
    from tl_devicefix.patches import disable as disable
    from tl_devicefix.patches import disabled as disabled
    from tl_devicefix.patches import enable as enable
    from tl_devicefix.patches import enabled as enabled
    from tl_devicefix.patches import report as report
    from tl_devicefix.pipelining.patching import batch_sweeps as batch_sweeps
    from tl_devicefix.pipelining.pipeline_map import pipeline_map as pipeline_map
    from tl_devicefix.pipelining.sweep import sweep as sweep
    from tl_devicefix.placement.in_use import gather_on as gather_on
    from tl_devicefix.placement.placement import Placement as Placement
    from tl_devicefix.planning.dry_run import DryRun as DryRun
    from tl_devicefix.planning.dry_run import dry_run as dry_run
    from tl_devicefix.planning.estimation import Estimate as Estimate
    from tl_devicefix.planning.estimation import estimate as estimate
    from tl_devicefix.planning.plan import plan as plan
    from tl_devicefix.simulation import simulate as simulate

__version__ = "0.5.0.dev0"

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
__all__ = sorted(_LAZY)


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
