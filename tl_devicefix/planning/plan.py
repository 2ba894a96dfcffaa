"""`plan(...)`: where each component of a model would be. Dry runs use the rest of this module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from transformers import PretrainedConfig

from tl_devicefix.adapters import Adapter, adapters
from tl_devicefix.errors import refuse_unknown, shown
from tl_devicefix.placement.deciding import DeviceMap, decide_fitting
from tl_devicefix.placement.devices import DeviceLike, has_slash
from tl_devicefix.placement.memory import MaxMemory
from tl_devicefix.placement.placement import Placement
from tl_devicefix.simulation.session import check_number

if TYPE_CHECKING:
    from transformer_lens import HookedTransformerConfig

    from tl_devicefix.hooked_transformer.blueprint import HookedBlueprint
    from tl_devicefix.transformer_bridge.blueprint import BridgeBlueprint

ConfigOrName: TypeAlias = "str | HookedTransformerConfig | PretrainedConfig"
"""A config, a model's name, or a local checkpoint directory."""


Blueprint: TypeAlias = "HookedBlueprint | BridgeBlueprint"
"""A model at its full size, which can be made and run without values."""


def blueprint(
    config_or_model_name: ConfigOrName,
    dtype: torch.dtype | str | None,
    options: Mapping[str, object],
    cls: type | None = None,
) -> Blueprint:
    """Return the model that would be loaded with these arguments; see `dry_run`.

    The dtype is float32 by default, or that of a HookedTransformerConfig.
    """
    adapter = adapter_to_load(config_or_model_name, cls)
    model: Blueprint = adapter.read_blueprint(config_or_model_name, dtype, {**options}, cls)
    n_ctx = options.get("n_ctx")
    # With another n_ctx, learnt position embeddings would not have the checkpoint's shape.
    if n_ctx is not None and any(size.name == "pos_embed" for size in model.sizes()):
        own = blueprint(config_or_model_name, dtype, {**options, "n_ctx": None}, cls).n_ctx
        if n_ctx != own:
            raise ValueError(
                f"n_ctx is {n_ctx}, but this model has {own} learnt position embeddings: leave "
                "n_ctx out"
            )
    return model


def check_options(
    function: Callable[..., object],
    config_or_model_name: ConfigOrName,
    options: Iterable[str],
    cls: type | None = None,
) -> None:
    """Refuse options that `estimate` or `dry_run` does not have."""
    if "device" in options:
        raise TypeError(
            f"{function.__name__} has no argument 'device', since it runs on no device: leave it "
            "out, and say how many there are by n_devices"
        )
    adapter = adapter_to_load(config_or_model_name, cls)
    names = adapter.option_names(config_or_model_name)
    # Suggest the function's own arguments too: one of them may be misspelt.
    own = [name for name in inspect.signature(function).parameters if name != "options"]
    where = "" if names else " for a config, which has every setting"
    where = " for a TransformerBridge" if adapter.name == "TransformerBridge" else where
    refuse_unknown(function.__name__, options, [*own, *names], where)


def adapter_to_load(config_or_model_name: ConfigOrName, cls: type | None = None) -> Adapter:
    """Return the adapter of the class that would be loaded; for `cls` see `dry_run`."""
    installed = adapters()
    if cls is None:
        # transformers' configs have `model_type`; TransformerLens's do not.
        is_of_transformers = hasattr(config_or_model_name, "model_type")
        usual = installed.get("TransformerBridge" if is_of_transformers else "HookedTransformer")
        return usual or next(iter(installed.values()))  # TransformerLens 4 has a Bridge only
    for name, adapter in installed.items():
        # Refuse a Bridge's subclasses: `boot_transformers` makes no other class.
        is_hooked = name == "HookedTransformer" and isinstance(cls, type)
        if cls is adapter.model_class or (is_hooked and issubclass(cls, adapter.model_class)):
            return adapter
    raise ValueError(f"cls must be {' or '.join(installed)}, but is {shown(cls)}")


def plan(
    config_or_model_name: ConfigOrName,
    n_devices: int | None = None,
    device: DeviceLike | None = None,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    dtype: torch.dtype | str | None = None,
) -> Placement:
    """Return where each component of a model would be, without loading or allocating it.

    Blocks lie in contiguous ranges on the first device (home) and those after it. Home also has the
    embeddings, the final norm and the unembedding, so it gets fewer blocks. A device with more free
    memory gets more. Weights of offloaded blocks are in CPU memory, and are copied to a device
    while the block runs.

    Args:
        config_or_model_name: a HookedTransformerConfig, or whatever `from_pretrained` takes as a
            model name (a name TransformerLens knows, or a local checkpoint directory). The sizes
            of common models are known, so that the hub is not asked for their configs. With
            TransformerLens 4: a transformers config, or what `boot_transformers` takes.
        n_devices: how many devices to split the blocks across; by default those that `max_memory`
            names, or else 1.
        device: the first device; the others are those that follow it. "cuda:2" with `n_devices=2`
            means cuda:2 and cuda:3. By default the current device, or the lowest that `max_memory`
            names.
        device_map: instead of `n_devices`: "balanced" or "auto" (all devices from `device` on,
            evenly), "sequential" (fill each before the next), one device, or a dict from components
            ("embed", "blocks.3", "unembed") or prefixes ("blocks", "") to devices. Blocks on
            "cpu" are offloaded if embed is elsewhere: they run where the block before them does.
        max_memory: the most that weights may take of each device: one size ("36GiB"), or a dict
            (`{0: "20GiB", 1: "40GiB"}`), whose devices are used, unless `n_devices` says how many.
            With "cpu" in it, blocks that do not fit are offloaded.
        dtype: the dtype of the parameters; by default float32, or a HookedTransformerConfig's own.
            Sizes include norms, although loading with `fold_ln=True` removes them.

    Returns:
        The placement; printing it shows a table of devices, components and their bytes.

    Raises:
        ValueError: if the arguments do not fit together, or the weights do not fit.
    """
    # Count norms: a HookedTransformer folds them by default, and a Bridge is booted with them.
    is_of_bridge = adapter_to_load(config_or_model_name).name == "TransformerBridge"
    options = {} if is_of_bridge else {"fold_ln": False}
    model = blueprint(config_or_model_name, dtype, options)
    return decide_fitting(model.sizes(), n_devices, device, device_map, max_memory)


def _device_index(device: DeviceLike) -> DeviceLike:
    """Return 1 for "cuda:1", and 0 for "cuda": there may be no such GPU here."""
    if str(device) in ("cuda", "mps", "xpu"):
        return 0
    kind, _, number = str(device).partition(":")
    is_here = kind != "cpu" and not has_slash(device)
    return int(number) if is_here and number.isdecimal() else device


class DeviceRequest(NamedTuple):
    """A user's arguments about devices, with an index for each device."""

    n_devices: int  # the number of devices to simulate
    spread: int | None  # the number to split across; None if other arguments name the devices
    device_map: DeviceMap | None
    max_memory: MaxMemory | None
    names_used: bool  # True if `max_memory` alone names the devices to use


def device_request(
    n_devices: int | None,
    device_map: DeviceMap | None,
    max_memory: MaxMemory | None,
    at_least: int = 1,
) -> DeviceRequest:
    """Read a user's arguments about devices; there are at least `at_least`."""
    if isinstance(device_map, Mapping):
        device_map = {part: _device_index(device) for part, device in device_map.items()}
    elif device_map is not None:
        device_map = _device_index(device_map)
    if isinstance(max_memory, Mapping):
        max_memory = {_device_index(device): size for device, size in max_memory.items()}
    limited = list(max_memory) if isinstance(max_memory, Mapping) else []
    placed = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    # Skip names such as "cpu", and True: only ints are indices.
    least = 1 + max((index for index in (*placed, *limited) if type(index) is int), default=0)
    least = max(least, at_least)
    check_number(least if n_devices is None else n_devices)
    names_used = n_devices is None and any(type(key) is int for key in limited)
    # `spread` is None if a device_map was given: `decide` refuses both.
    spread = None if names_used or device_map is not None else n_devices or least
    return DeviceRequest(max(least, n_devices or 1), spread, device_map, max_memory, names_used)
