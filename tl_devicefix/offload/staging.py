"""Copies of pageable host memory, as a checkpoint's mapped files are, through pinned memory.

The host copies a chunk to pinned memory while the device reads the chunk before, and computes. A
device without streams is copied to directly.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from tl_devicefix.offload.copying import module_with_streams

BYTES_AT_ONCE = 2**24
"""The size of a chunk: two of them are pinned."""


class Staging:
    """Pinned memory through which one thread at a time copies weights to a device.

    The copies are in order with what the thread gives to its current stream of the device.

    Args:
        device: where to.

    >>> with Staging(torch.device("cpu")) as staging:
    ...     staging.to_device(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = module_with_streams(device)
        count = 0 if self._module is None else 2
        self._buffers = [_Buffer(self._module.Event()) for _ in range(count)]

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for buffer in self._buffers:
            buffer.read.synchronize()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `tensor.to(device)`, of a tensor without gradient."""
        if not self._is_staged(tensor):
            return tensor.to(self._device)
        target = torch.empty_like(tensor, device=self._device)
        self.copy(target, tensor)
        return target

    def copy(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """As `target.copy_(tensor)`, where `target` is on the device."""
        if not self._is_staged(tensor) or target.device != self._device:
            target.copy_(tensor)
        elif tensor.numel() * target.itemsize <= BYTES_AT_ONCE:
            buffer = self._buffers.pop(0)
            self._buffers.append(buffer)
            target.copy_(buffer.filled(tensor, target.dtype), non_blocking=True)
            buffer.read.record(self._module.current_stream(self._device))
        else:
            # Along the axis that is outermost in memory, so that chunks are contiguous.
            axes = [axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1]
            axis = max(axes, key=tensor.stride)
            bytes_of_row = tensor.numel() // tensor.shape[axis] * target.itemsize
            rows = max(BYTES_AT_ONCE // bytes_of_row, 1)
            for to, of in zip(target.split(rows, axis), tensor.split(rows, axis)):
                self.copy(to, of)

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return bool(self._buffers) and tensor.device.type == "cpu" and tensor.numel() > 0


class _Buffer:
    """A chunk of pinned memory."""

    def __init__(self, read: Any) -> None:
        self.read = read
        self._memory = torch.empty(BYTES_AT_ONCE, dtype=torch.uint8).pin_memory()

    def filled(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a tensor in this memory, laid out as the tensor, once that is free."""
        self.read.synchronize()
        layout = torch.empty_like(tensor, dtype=dtype, device="meta")
        flat = self._memory[: layout.nbytes].view(dtype)
        return flat.as_strided(layout.shape, layout.stride()).copy_(tensor)
