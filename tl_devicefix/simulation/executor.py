"""Executors of a machine's operations: on the CPU at once, or without values."""

from __future__ import annotations

import re
from typing import Any

import numpy
import torch

from tl_devicefix.simulation.geometry import Geometry, call_without_values, geometry_of
from tl_devicefix.simulation.ordering import Memory


class Executor:
    """Runs operations on the tensors behind the simulated ones: on the CPU, at once.

    Devices are indices, and None is the host.
    """

    place = torch.device("cpu")
    """Where the tensors are that factories make before `upload`: the CPU, or meta."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Run an operation on a device, and return what it gives."""
        return func(*args, **kwargs)

    def allocate(self, geometry: Geometry, device: int) -> torch.Tensor:
        """Make a tensor in memory of a device, without values of its own."""
        return geometry.empty(self.place)

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Put values that no one else has on a device."""
        return values

    def resolve(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Copy a tensor; of a conjugated or negated view, its values."""
        return self.run(torch.ops.aten.clone.default, (tensor,), {}, device)  # type: ignore[no-any-return]

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Return a tensor of a device with its values, for the host."""
        return tensor

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
    ) -> None:
        """Copy in place between two devices, or a device and the host."""
        target.copy_(source)

    def convert(
        self, source: torch.Tensor, of: int, to: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Copy to a device or the host, also to another dtype: ``.to`` with torch's options."""
        return torch.ops.aten._to_copy.default(source, **options)  # type: ignore[no-any-return]

    def memory_of(self, tensor: torch.Tensor, device: int) -> Memory | None:
        """Return the users of the memory of a tensor, which is on a device from now on."""
        return None

    def free(self, memory: Memory) -> None:
        """Let go of memory, in the middle of anything."""

    def synchronize(self, device: int) -> None:
        """Wait for all operations of a device."""

    def contents(self, device: int) -> str:
        """Say in a sentence what takes the memory of a device, for errors; empty if not known."""
        return ""


class MetaExecutor(Executor):
    """Computes nothing: tensors have shapes, and no values."""

    place = torch.device("meta")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Make what the operation would give.

        Raises:
            NotImplementedError: if that depends on values.
        """
        try:
            return call_without_values(func, args, kwargs)
        except RuntimeError as error:  # NotImplementedError is one
            if re.search(r"meta tensor|with Meta|register_meta", str(error)):
                raise NotImplementedError(
                    f"the result of {func} depends on values, which a dry run does not have: "
                    "change or skip that operation, or run it on real devices"
                ) from error
            raise

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Forget the values."""
        return values.to(self.place)

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
    ) -> None:
        """Write zeros to integers of the host, which may be indices; writing more takes memory."""
        if not (source.is_meta and to is None):
            target.copy_(source)
        elif not target.is_floating_point():
            target.zero_()

    def convert(
        self, source: torch.Tensor, of: int, to: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Copy the shape; the host gets zeros."""
        converted = super().convert(source, of, to, options)
        return zeros_for(converted) if to is None else converted


def zeros_for(meta: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU, which take no memory until they are written to."""
    blank = torch.from_numpy(numpy.zeros(geometry_of(meta).nbytes, numpy.uint8))
    return blank.view(meta.dtype).as_strided(meta.shape, meta.stride())
