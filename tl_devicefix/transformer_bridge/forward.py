"""Functions that run a Bridge or read several components; their results are at home."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge

from tl_devicefix.dispatch import forward as running
from tl_devicefix.dispatch.carrying import bring_home
from tl_devicefix.dispatch.mixing import mix_devices
from tl_devicefix.fusing.fused import class_of
from tl_devicefix.fusing.listening import unsupported_mode
from tl_devicefix.fusing.one_forward import forward_cache, one_forward
from tl_devicefix.gathering import CacheAtHome, cache_for, gathering_device
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.transformer_bridge.attention import CONFIG_OF_SDPA, ThisForward
from tl_devicefix.transformer_bridge.fused import config_of_sdpa, starts_at

_Result = TypeVar("_Result")


@patches("TransformerBridge", takes="self input return_type", why="what leaves it is at home")
def forward(
    original: Callable[..., Any], self: TransformerBridge, *args: object, **kwargs: object
) -> object:
    """`TransformerBridge.forward`, whose results are at home.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    if "past_key_values" in kwargs and _takes_cache(self):
        kwargs["cache"] = kwargs.pop("past_key_values")
    first = getattr(self, "blocks", ())[:1] if kwargs.get("start_at_layer") is not None else ()
    if not all(starts_at(class_of(block)) for block in first):
        warnings.warn(
            "TransformerLens ignores start_at_layer in this architecture: all blocks run, from the "
            "stream that you gave",
            stacklevel=4,
        )
    named = [kwargs.get(name) for name in ("attention_mask", "one_zero_attention_mask")]
    # Any tensor that is given by position may be a mask, except the first, which is the input.
    masks = [*named, *(value for value in args[1:] if isinstance(value, torch.Tensor))]
    # A Bridge reads masks of pairs of tokens differently than transformers' layers do.
    is_plain = all(map(_is_of_tokens, masks)) and is_enabled() and unsupported_mode() is None
    config = config_of_sdpa(self) if is_plain else None
    is_cache_read = _is_cache_read(*args[1:2], **kwargs)
    with one_forward(ThisForward(is_plain, config is not None, is_cache_read)):
        if config is not None:
            forward_cache()[CONFIG_OF_SDPA] = config
        return running.run_forward(original, self, *args, **kwargs)


def _is_cache_read(return_type: object = None, **kwargs: object) -> bool:
    """Return True if a KV cache is given, asked for, or returned; `generate` asks for one."""
    names = "past_key_values", "cache", "use_cache", "use_past_kv_cache"
    is_named = any(kwargs.get(name) not in (None, False) for name in names)
    return is_named or return_type == "logits_and_cache"


def _takes_cache(bridge: TransformerBridge) -> bool:
    """Return True if the model's forward takes `cache`, where `generate` says `past_key_values`."""
    if not getattr(bridge.cfg, "is_stateful", False):
        return False  # `generate` asks at each token, and reading a signature takes time
    return "cache" in inspect.signature(bridge.original_model.forward).parameters


def _is_of_tokens(mask: object) -> bool:
    """Return False for masks of pairs of tokens; True for a mask [batch, pos], or none."""
    return mask.dim() <= 2 if isinstance(mask, torch.Tensor) else not isinstance(mask, Mapping)


@patches(
    "TransformerBridge",
    takes="self input return_cache_object remove_batch_dim",
    why="cached activations are read at home",
)
def run_with_cache(
    original: Callable[..., Any], self: TransformerBridge, *args: object, **kwargs: Any
) -> tuple[object, ActivationCache | Mapping[str, torch.Tensor]]:
    """See TransformerLens's method. Activations stay where they are computed; reads are at home.

    With `device`, they are moved to it as they are computed, and read on it.
    """
    at_home = cache_for(self, kwargs.get("device"))
    is_used = at_home is not None and kwargs.get("device") is not None
    with warnings.catch_warnings() if is_used else contextlib.nullcontext():
        if is_used:  # TransformerLens says that it is not
            warnings.filterwarnings("ignore", message=r"run_with_cache\(device=.*ignored")
        output, cache = original(self, *args, **kwargs)
    if at_home is None:
        return output, cache
    if isinstance(cache, ActivationCache):
        cache.cache_dict = at_home.of(cache.cache_dict)
    else:
        cache = at_home.of(cache)
    return bring_home(output, self.placement.home), cache


@patches(
    "TransformerBridge",
    takes="self",
    why="weights of several devices are read at home, or on the device of `gather_on`",
)
def get_params(
    original: Callable[[TransformerBridge], dict[str, torch.Tensor]], self: TransformerBridge
) -> dict[str, torch.Tensor]:
    """See TransformerLens's method. Each weight is copied to one device when it is read."""
    device = gathering_device(self)
    weights = original(self)
    return weights if device is None else CacheAtHome(device).of(weights)


@patches(
    None,
    takes="model corrupted_tokens clean_cache corrupted_cache patching_metric src_layer",
    why="the source head's activations, read at home, meet its weights on its own device",
    since="3.9",
)
def get_act_patch_direct_path(
    original: Callable[..., torch.Tensor], *args: object, **kwargs: object
) -> torch.Tensor:
    """See TransformerLens's function. Operands on different devices are brought together."""
    with mix_devices():
        return original(*args, **kwargs)


@patches(
    None,
    takes="model tokens metric_fn names_filter",
    why="cached activations and gradients are read at home",
    since="3.9",
)
def cache_activation_and_gradient(
    original: Callable[..., Any], model: TransformerBridge, *args: object, **kwargs: object
) -> object:
    """See TransformerLens's function. Activations and gradients are read at home."""
    cache = original(model, *args, **kwargs)
    at_home = cache_for(model)
    if at_home is None:
        return cache
    return dataclasses.replace(
        cache, activations=at_home.of(cache.activations), gradients=at_home.of(cache.gradients)
    )
