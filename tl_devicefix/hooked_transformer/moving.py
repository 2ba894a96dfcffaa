"""Move a whole model: split it across devices, gather it on one, change its dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_devicefix.around import Args, Around, Kwargs
from tl_devicefix.dispatch import forward as running
from tl_devicefix.dispatch.forward import is_aligned
from tl_devicefix.fusing.one_forward import is_in_forward
from tl_devicefix.hooked_transformer.components import component_sizes
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.multihost.remote_block import refuse_to_convert
from tl_devicefix.offload import pin
from tl_devicefix.placement.deciding import decide_fitting
from tl_devicefix.placement.devices import resolve, resolve_to_move
from tl_devicefix.placement.elsewhere import TensorElsewhere, is_elsewhere
from tl_devicefix.placement.fitting import move_components
from tl_devicefix.placement.in_use import use
from tl_devicefix.placement.placement import Placement, placement_of


def place(model: HookedTransformer, placement: Placement) -> None:
    """Move each component to its planned device, and make the model run there.

    Everything else, such as a subclass's own parameters, moves home. The model's `placement`,
    `cfg.device` and `cfg.n_devices` are set.
    """
    share_buffers(model)
    move_components(model, placement, rest=model)
    settle(model, placement)


def settle(model: HookedTransformer, placement: Placement) -> None:
    """Record where the weights are, and make the model run there."""
    _record(model, placement)
    model.cfg.device = str(placement.home)
    model.cfg.n_devices = len(placement.devices)
    _tell_accelerate(model, placement)
    align_hooked(model, placement)


def _record(model: Any, placement: Placement) -> None:
    model.placement = placement
    use(placement)
    remember(model.cfg, placement)


def _tell_accelerate(model: HookedTransformer, placement: Placement) -> None:
    """Mark a split model as transformers does, so that accelerate and Trainer do not move it."""
    vars(model).pop("hf_device_map", None)
    if len(placement.memories) > 1:
        vars(model)["hf_device_map"] = {c.name: c.stored_on for c in placement.components}


@patches(
    "HookedTransformer",
    takes="self device_or_dtype",
    why="keep the device's index; a dtype keeps the placement",
)
def to(
    self: HookedTransformer,
    device_or_dtype: torch.device | str | torch.dtype | int,
    print_details: bool = True,
) -> HookedTransformer:
    """Move the model to one device, or change its dtype in place.

    A dtype keeps the placement. A device gathers the whole model there, and updates the placement
    and `cfg.device`, with the device's index. A number is the index of a device of home's type.
    Anything else, such as a tensor, is left to torch.

    Raises:
        ValueError: if the device does not exist.
    """
    target: Any = device_or_dtype
    if isinstance(target, torch.dtype):
        if print_details:
            print("Changing model dtype to", target)
        nn.Module.to(self, target)
        self.cfg.dtype = target
    elif isinstance(target, torch.device | str | int):
        home: Any = self.cfg.device  # typed as a str, but users also give an index
        target = resolve_to_move(target, torch.device(home))
        if print_details:
            print("Moving model to device: ", target)
        nn.Module.to(self, target)
        self.cfg.device = str(target)
    else:
        nn.Module.to(self, target)
    return self


@patches("HookedTransformer", takes="self fn", why="inputs follow the weights when they move")
def _apply(
    self: HookedTransformer, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> HookedTransformer:
    """Convert or move the weights, and update the placement, even if a parent module is moved.

    Every way to move a module (`to`, `cuda`, a wrapper's `to`, accelerate's `prepare`) ends here.
    """
    refuse_to_convert(self, fn)
    before, placement = _devices(self), placement_of(self)
    nn.Module._apply(self, fn, recurse)
    if _devices(self) != before:
        share_buffers(self)
        _follow_weights(self)
    elif placement is not None:
        share_buffers(self)
        placement = placement.reweighed(self)  # the dtype may have changed
        _record(self, placement)
        pin(self, placement)
    return self


def _follow_weights(model: HookedTransformer) -> None:
    """Update config and placement if all weights are now on one device."""
    devices = _devices(model)
    if len(devices) != 1:
        return
    device, placement = devices.pop(), placement_of(model)
    model.cfg.device = str(device)
    if placement is not None:
        settle(model, placement.gathered_on(device).reweighed(model))
    else:
        running.unalign(model)


def _devices(model: nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters()}


@patches(
    "HookedTransformer",
    takes="self",
    why="place by the plan, not on whichever device has most free memory",
)
def move_model_modules_to_device(original: Callable[..., None], self: HookedTransformer) -> None:
    """Place the model by its config. A split model with the same `n_devices` keeps its devices."""
    placement = placement_of(self)
    if placement is not None and placement.here is not placement:
        return  # a model across several hosts is not moved
    if placement is not None and _is_spread_by(placement, self.cfg):
        place(self, placement)
    elif self.cfg.n_devices > 1:
        sizes = component_sizes(self.cfg)
        place(self, decide_fitting(sizes, self.cfg.n_devices, self.cfg.device))
    elif placement is not None:
        place(self, placement.gathered_on(resolve(self.cfg.device)))
    else:
        original(self)


def _is_spread_by(placement: Placement, cfg: HookedTransformerConfig) -> bool:
    """Return True for a split or offloaded placement with the config's device and their number."""
    if resolve(cfg.device) != placement.home:
        return False
    return cfg.n_devices == len(placement.devices) and len(placement.memories) > 1


@patches("HookedTransformer", takes="self state", why="copies keep the placement")
def __setstate__(self: HookedTransformer, state: dict[str, object]) -> None:
    """Restore a copied or unpickled model, whose config is a new object."""
    nn.Module.__setstate__(self, state)
    placement = placement_of(self)
    if placement is None:
        return
    _record(self, placement)
    try:
        devices = _devices(self)
    except AttributeError:
        return  # unfinished: a block is being copied, and a hook of it refers to the model
    # torch.load has a `map_location`, so the devices may differ from the saved ones.
    if devices != {c.stored_on for c in placement.here.components if c.weights}:
        _follow_weights(self)
    else:
        pin(self, placement)


def share_buffers(model: nn.Module) -> None:
    """Make blocks share equal buffers, which are separate after a model is built or moved."""
    shared: dict[Hashable, torch.Tensor] = {}
    for module in model.modules():
        kind = getattr(module, "attn_type", None)
        for name, buffer in module._buffers.items() if kind is not None else ():
            if not (buffer is None or buffer.is_meta or isinstance(buffer, TensorElsewhere)):
                key = (type(module), kind, name, buffer.shape, buffer.dtype, buffer.device)
                first = shared.setdefault(key, buffer)
                # A user may have given one block other values.
                if first is not buffer and torch.equal(first, buffer):
                    module._buffers[name] = first


def align_hooked(model: HookedTransformer, placement: Placement) -> None:
    """Make `model` run across the devices of `placement`, replacing any earlier alignment."""
    # A block's output goes to the next device, not home.
    running.align(model, placement, lambda name: not name.startswith("blocks."))
    if model.cfg.positional_embedding_type != "alibi":
        return
    for block in model.blocks:
        if hasattr(block.attn, "alibi"):  # it does not move with the weights
            block.attn.alibi = None
    if is_aligned(model):
        for component, module in placement.here.modules_of(model):
            if component.name.startswith("blocks."):
                AlibiOnDevice(component.device).attach(module)


@dataclass(frozen=True)
class AlibiOnDevice(Around):
    """Makes a block's ALiBi table on its device.

    TransformerLens's attention would make it on the config's device, which is home.
    """

    device: torch.device

    def pre_forward(self, block: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Make the table if there is none that is long enough."""
        entry, attn = kwargs.get("past_kv_cache_entry"), block.attn
        past = 0 if entry is None else entry.past_keys.shape[1]
        n_keys = past + (args[0] if args else kwargs["resid_pre"]).shape[1]  # [batch, pos, ...]
        if hasattr(attn, "alibi"):  # a user may have replaced `attn`
            table = attn.alibi  # [head_index, query_pos, key_pos]
            if table is None or table.shape[-1] < n_keys:
                table = attn.create_alibi_bias(attn.cfg.n_heads, n_keys, self.device)
            attn.alibi = table.to(self.device)
        return args, kwargs


@patches(
    "HookedTransformer",
    takes="self",
    why="SAEs and similar modules run on their own device, whatever block they are attached to",
)
def setup(original: Callable[..., object], self: HookedTransformer) -> object:
    """Wrap `HookedRootModule.setup`, which is called after a module was attached or removed."""
    result, placement = original(self), placement_of(self)
    if placement is not None and is_aligned(self):
        align_hooked(self, placement)
    return result


# Keys are ids of configs: TransformerLens passes nothing else when it asks for a block's device.
# It asks for each block in each forward, and torch's WeakIdKeyDictionary is ten times slower.
_placement_by_config: dict[int, tuple[weakref.ref[HookedTransformerConfig], Placement]] = {}


def placement_by(cfg: HookedTransformerConfig) -> Placement | None:
    """Return the placement of the model that has this config object, if it has one."""
    config_ref, placement = _placement_by_config.get(id(cfg), (None, None))
    # A config's id may be reused before the freed config's entry is removed.
    return placement if config_ref is not None and config_ref() is cfg else None


def remember(cfg: HookedTransformerConfig, placement: Placement) -> None:
    """Make `placement_by` find a placement by a config, as long as the config exists."""
    key = id(cfg)
    _placement_by_config[key] = (
        weakref.ref(cfg, lambda _: _placement_by_config.pop(key, None)),
        placement,
    )


@patches(None, takes="index cfg device", why="the placement says where blocks lie", until="3")
def get_device_for_block_index(
    original: Callable[..., torch.device | None],
    index: int,
    cfg: HookedTransformerConfig,
    device: torch.device | str | None = None,
) -> torch.device | None:
    """Return a block's device by the model's placement; None where a forward would move to it."""
    placement = placement_by(cfg)
    if placement is None:
        return original(index, cfg, device)
    # TransformerLens's forward calls `x.to()` with the result, and `x.to(None)` moves nothing: the
    # residual stream is left to each block's `CarryTo`, which also waits for the device if several
    # runs are in flight. A call with `device` is for a KV cache.
    if index and device is None and is_in_forward():
        return None
    # With index 0, TransformerLens asks for the tokens' device, which is home.
    runs_on = placement.home if index == 0 else placement.device_of(f"blocks.{index}")
    return placement.home if is_elsewhere(runs_on) else runs_on
