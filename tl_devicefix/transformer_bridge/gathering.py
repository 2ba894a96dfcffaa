"""What a Bridge's components hold and have cached, read together: at home, or by `gather_on`."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from transformer_lens import ActivationCache

from tl_devicefix.dispatch.carrying import bring_home, is_output_read
from tl_devicefix.dispatch.mixing import mix_devices
from tl_devicefix.gathering.caches import CacheAtHome, cache_for
from tl_devicefix.gathering.gathering import gathering_device
from tl_devicefix.monkeypatch.patch import patches


@patches(
    "TransformerBridge",
    takes="self input return_cache_object remove_batch_dim",
    why="cached activations are read at home",
)
def run_with_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """See TransformerLens's. Activations stay where they are computed, and are read at home.

    With `device`, they are moved there as they are computed, and read there.
    """
    at_home = cache_for(self, kwargs.get("device"))
    if at_home is None:
        return original(self, *args, **kwargs)
    with warnings.catch_warnings():
        # TransformerLens says that it ignores `device`, and does not.
        warnings.filterwarnings("ignore", message=r"run_with_cache\(device=.*ignored")
        output, cache = original(self, *args, **kwargs)
    if isinstance(cache, ActivationCache):
        cache.cache_dict = at_home.of(cache.cache_dict)
    else:
        cache = at_home.of(cache)
    return bring_home(output, self.placement.home) if is_output_read() else output, cache


@patches(
    "TransformerBridge",
    takes="self",
    why="weights of several devices are read at home, or on the device of `gather_on`",
)
def get_params(original: Any, self: Any) -> dict[str, torch.Tensor]:
    """`TransformerBridge.get_params`: a dict whose weights are read together when asked for."""
    device = gathering_device(self)
    weights: dict[str, torch.Tensor] = original(self)
    return weights if device is None else CacheAtHome(device).of(weights)


@patches(
    None,
    takes="model corrupted_tokens clean_cache corrupted_cache patching_metric src_layer",
    why="the source head's activations, read at home, meet its weights on its own device",
    since="3.9",
)
def get_act_patch_direct_path(original: Any, *args: Any, **kwargs: Any) -> Any:
    """See TransformerLens's. Activations and weights of other devices are brought together."""
    with mix_devices():
        return original(*args, **kwargs)


@patches(
    None,
    takes="model tokens metric_fn names_filter",
    why="cached activations and gradients are read at home",
    since="3.9",
)
def cache_activation_and_gradient(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """See TransformerLens's. Activations and gradients are read at home, as cached ones are."""
    cache: Any = original(model, *args, **kwargs)
    at_home = cache_for(model)
    if at_home is None:
        return cache
    return dataclasses.replace(
        cache, activations=at_home.of(cache.activations), gradients=at_home.of(cache.gradients)
    )
