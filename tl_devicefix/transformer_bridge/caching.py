"""`TransformerBridge.run_with_cache`, whose cache is read at home."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformer_lens import ActivationCache

from tl_devicefix.dispatch.carrying import bring_home, is_output_read
from tl_devicefix.gathering.cache_at_home import CacheAtHome
from tl_devicefix.placement.devices import with_index


def run_with_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """See TransformerLens's. Activations stay where they are computed, and are read at home.

    With `device`, they are moved there as they are computed, and read there.
    """
    placement = getattr(self, "placement", None)
    if placement is None or len(placement.devices) == 1:
        return original(self, *args, **kwargs)
    with warnings.catch_warnings():
        # TransformerLens says that it ignores `device`, and does not.
        warnings.filterwarnings("ignore", message=r"run_with_cache\(device=.*ignored")
        output, cache = original(self, *args, **kwargs)
    device = kwargs.get("device")
    read_on = placement.home if device is None else with_index(torch.device(device))
    if isinstance(cache, ActivationCache):
        cache.cache_dict = CacheAtHome(read_on).of(cache.cache_dict)
    else:
        cache = CacheAtHome(read_on).of(cache)
    return bring_home(output, placement.home) if is_output_read() else output, cache
