"""Bring what is misplaced to where it belongs."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import nn

from tl_devicefix.checking.tensors import Tensor, is_unspread, placement_of_model, tensors
from tl_devicefix.dispatch.naming import joined
from tl_devicefix.hooked_transformer.layout import ConvertedOnce, share_buffers
from tl_devicefix.hooked_transformer.moving import settle
from tl_devicefix.placement.components import component_of
from tl_devicefix.placement.fitting import naming_full_devices


def put_right(model: Any) -> None:
    """Move what is misplaced, and make the config and the hooks across devices follow."""
    placement = placement_of_model(model)
    if is_unspread(model):
        model.move_model_modules_to_device()
        return
    for device, misplaced in _by_planned_device(model).items():
        # The other tensors of their modules stay: an offloaded block's buffers are not on the host.
        wanted = {id(each) for t in misplaced for each in (t.value, t.value.grad)}
        move = ConvertedOnce(model, partial(_moved, device=device, wanted=wanted))
        for tensor in misplaced:
            component = component_of(joined(tensor.path, tensor.name))
            known = placement is not None and component in placement.device_map
            with naming_full_devices(model, placement if known else None, component):
                nn.Module._apply(tensor.module, move, recurse=False)
    share_buffers(model)
    if placement is not None:
        settle(model, placement)
    model.setup()


def _by_planned_device(model: Any) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors(model):
        if tensor.is_misplaced:
            groups[tensor.planned].append(tensor)
    return groups


def _moved(tensor: torch.Tensor, device: torch.device, wanted: set[int]) -> torch.Tensor:
    return tensor if tensor.is_meta or id(tensor) not in wanted else tensor.to(device)
