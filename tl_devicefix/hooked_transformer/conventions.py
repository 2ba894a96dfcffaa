"""Where the installed TransformerLens processes weights differently from other versions.

Parity is with the version that is installed, so the folding steps take these differences as data.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache

from transformer_lens import HookedTransformer

from tl_devicefix.monkeypatch.applying import original
from tl_devicefix.weight_processing import Conventions


@cache
def installed_conventions() -> Conventions:
    """The conventions of the TransformerLens that is installed."""
    is_3x = importlib.util.find_spec("transformer_lens.weight_processing") is not None
    # Folding of MoE came with 3.0, went, and came back; only this warning tells which it is.
    loader = inspect.getsource(original(HookedTransformer, "load_and_process_state_dict"))
    refuses_moe = "You are using MoE, so the layer norm weights can't be folded" in loader
    return Conventions(folds_moe=not refuses_moe, recenters_b_O=is_3x, keeps_folded_norms=is_3x)
