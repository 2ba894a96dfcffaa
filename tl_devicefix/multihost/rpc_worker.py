"""What a rank does that lends its devices: one command after the other, until it is told to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tl_devicefix.attention.kv_cache import CacheOfBlock
from tl_devicefix.multihost import commands
from tl_devicefix.multihost.built_blocks import Arguments, Built, Graph, Trial
from tl_devicefix.multihost.checkpoint_files import File, InFile, differences, read
from tl_devicefix.multihost.commands import (
    Failure,
    NewStorage,
    RemoteTensor,
    ValuesFollow,
    exchanged,
    operation_named,
)
from tl_devicefix.multihost.transport import HostLost, Transport
from tl_devicefix.simulation.geometry import Geometry, geometry_of, tensors_in

_NEVER = "its inputs were never computed, as an earlier operation failed"
_ANSWERED = {"ask", "try_out", "read", "compare", "synchronize"}
_CALLED = {
    **dict.fromkeys(("try_out", "call", "record"), "a block"),
    "backward": "a backward through a block",
}
"""What errors call a command, if not by its name or that of its operation."""


class _NeverComputed(RuntimeError):
    """Something failed before, and what it should have given is needed now."""


class Worker:
    """The tensors of a rank, and the commands that rank 0 may give it: `_run`, `_make`, ..."""

    def __init__(self, name: str, devices: list[torch.device], transport: Transport) -> None:
        self._name, self._devices, self._transport = name, devices, transport
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._built: dict[int, Built] = {}
        self._graphs: dict[int, Graph] = {}
        self._failed: Failure | None = None

    @torch.no_grad()
    def lend(self) -> None:
        """Do what rank 0 says, until it says to end."""
        while True:
            for name, arguments in self._transport.receive(0):
                if name == "end":
                    return
                answer = self._try(getattr(self, f"_{name}"), name, arguments)
                if name in _ANSWERED:
                    self._answer(answer)

    def _answer(self, answer: Any) -> None:
        """Send rank 0 an answer, or what failed since the last one."""
        if self._failed is not None:
            answer, self._failed = self._failed, None
        if not isinstance(answer, torch.Tensor):
            self._transport.send(0, answer)
            return
        self._transport.send(0, ValuesFollow(tuple(answer.shape), answer.dtype))
        self._transport.send_values(0, answer)

    def _try(self, do: Callable[..., Any], name: str, arguments: Sequence[Any]) -> Any:
        try:
            return do(*arguments)
        except HostLost:
            raise
        except Exception as error:  # noqa: BLE001  # it is raised where rank 0 waits
            if self._failed is None:  # the first; others are of what it did not give
                where = arguments[0] if name in ("run", "ask") else _CALLED.get(name, name)
                message = f"{error} (in {where}, on {self._name})"
                is_consequence = isinstance(error, _NeverComputed)
                self._failed = Failure(type(error).__name__, message, is_consequence)
            return None

    # Commands: operations

    def _run(
        self, operation: str, args: Any, kwargs: Any, outputs: Sequence[NewStorage | None]
    ) -> None:
        """Run an operation; each tensor that it gives becomes a storage, but for arguments."""
        result = operation_named(operation)(*self._resolved(args), **self._resolved(kwargs))
        self._keep_all(tensors_in(result), outputs)

    def _ask(self, operation: str, args: Any, kwargs: Any, numbers: list[int]) -> Any:
        """Run an operation whose results rank 0 cannot foresee, and describe them."""
        result = operation_named(operation)(*self._resolved(args), **self._resolved(kwargs))
        storages = iter(numbers)

        def describe(made: torch.Tensor) -> NewStorage:
            made = made.resolve_conj().resolve_neg().clone()
            storage = NewStorage(next(storages), geometry_of(made))
            self._storages[storage.number] = made.untyped_storage()
            return storage

        return exchanged(result, describe)

    def _settings(self, values: list[Any]) -> None:
        commands.set_as(values)

    # Commands: blocks

    def _build(self, number: int, description: bytes, device: int) -> None:
        self._built[number] = Built(description, self._devices[device])

    def _try_out(
        self, block: int, arguments: Arguments, cache: CacheOfBlock | None
    ) -> tuple[Trial | None, bool]:
        return self._built[block].try_out(self._resolved(arguments), cache)

    def _call(
        self,
        block: int,
        arguments: Arguments,
        cache: CacheOfBlock | None,
        outputs: Sequence[NewStorage],
    ) -> None:
        """Run a block without a graph."""
        self._keep_all(self._built[block].run(self._resolved(arguments), cache), outputs)

    def _record(
        self,
        block: int,
        arguments: Arguments,
        cache: CacheOfBlock | None,
        graph: int,
        which: tuple[int, ...],
        outputs: Sequence[NewStorage],
    ) -> None:
        """Run a block, and hold its graph for gradients of some of its arguments' tensors."""
        recorded = Graph(self._built[block], self._resolved(arguments), cache, which)
        self._graphs[graph] = recorded
        self._keep_all(recorded.outputs, outputs)

    def _backward(
        self,
        graph: int,
        gradients: Sequence[RemoteTensor | None],
        which: tuple[int, ...],
        keeps: bool,
        outputs: Sequence[NewStorage],
    ) -> None:
        """Run a backward through a graph, to some of those tensors."""
        if graph not in self._graphs:
            raise _NeverComputed(_NEVER)
        made = self._graphs[graph].backward(self._resolved(gradients), which, keeps)
        self._keep_all(made, outputs)

    # Commands: memory

    def _make(self, storage: int, geometry: Geometry, device: int) -> None:
        made = torch.empty(geometry.nbytes, dtype=torch.uint8, device=self._devices[device])
        self._storages[storage] = made.untyped_storage()

    def _free(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            for table in (self._storages, self._built, self._graphs):
                table.pop(number, None)  # type: ignore[attr-defined]

    # Commands: values

    def _put(self, target: RemoteTensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Write the next values that come from rank 0."""
        values = self._transport.receive_values(0, shape, dtype)
        self._tensor(target).copy_(values)

    def _load(self, target: RemoteTensor, where: InFile, *geometry: Any) -> None:
        """Write values of this rank's own file."""
        self._tensor(target).copy_(read(where, *geometry))

    def _copy(self, target: RemoteTensor, source: RemoteTensor) -> None:
        self._tensor(target).copy_(self._tensor(source))

    def _read(self, source: RemoteTensor) -> torch.Tensor:
        return self._tensor(source).to("cpu").contiguous()

    def _send(self, source: RemoteTensor, rank: int) -> None:
        """Send values to another rank, or word that there are none."""
        values = self._try(self._read, "send", (source,))
        self._transport.send(rank, values is not None)
        if values is not None:
            self._transport.send_values(rank, values)

    def _receive(
        self, target: RemoteTensor, shape: tuple[int, ...], dtype: torch.dtype, rank: int
    ) -> None:
        """Write values that come from another rank."""
        if not self._transport.receive(rank):
            raise _NeverComputed(f"rank {rank} had nothing to send")
        values = self._transport.receive_values(rank, shape, dtype)
        self._tensor(target).copy_(values)

    def _compare(self, files: Sequence[File]) -> dict[str, str]:
        return differences(files)

    def _synchronize(self) -> None:
        """Tell when all before it is done."""
        for device in self._devices:
            if device.type != "cpu":
                torch.get_device_module(device.type).synchronize(device)

    # Tensors

    def _keep_all(self, made: Sequence[torch.Tensor], outputs: Sequence[NewStorage | None]) -> None:
        for tensor, output in zip(made, outputs, strict=True):
            if output is not None:
                self._keep(tensor, *output)

    def _keep(self, made: torch.Tensor, number: int, geometry: Geometry) -> None:
        """Keep a result as rank 0 knows it, which nobody else has."""
        made = made.resolve_conj().resolve_neg()
        if made.shape != geometry.shape:
            raise RuntimeError(
                f"the result has shape {tuple(made.shape)}, but rank 0 expects "
                f"{tuple(geometry.shape)}"
            )
        if geometry_of(made) != geometry or made.storage_offset():
            copied = geometry.empty(made.device)
            # A kernel may leave out what nobody reads, as batch norm the mean of an evaluation.
            made = copied.copy_(made) if made.numel() else copied
        self._storages[number] = made.untyped_storage()

    def _resolved(self, value: Any) -> Any:
        if type(value) is RemoteTensor:
            return self._tensor(value)
        if type(value) is dict:
            return {name: self._resolved(item) for name, item in value.items()}
        return [self._resolved(item) for item in value] if type(value) is list else value

    def _tensor(self, stored: RemoteTensor) -> torch.Tensor:
        """A tensor of this rank; its storage grows as that of rank 0 has, by `resize_`."""
        if stored.storage not in self._storages:
            raise _NeverComputed(_NEVER)
        storage = self._storages[stored.storage]
        tensor = torch.empty(0, dtype=stored.dtype, device=storage.device)
        return tensor.set_(storage, stored.offset, stored.shape, stored.stride)  # type: ignore[call-overload]
