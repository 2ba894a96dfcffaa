"""What a rank does that lends its devices: one command after the other, until it is told to end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tl_devicefix.multihost import commands
from tl_devicefix.multihost.blocks import Built, Graph
from tl_devicefix.multihost.checkpoint_files import differences, read
from tl_devicefix.multihost.commands import (
    Failed,
    Given,
    New,
    Stored,
    exchanged,
    operation_named,
    tensors_in,
)
from tl_devicefix.multihost.transport import HostLost, Transport
from tl_devicefix.simulation.geometry import Geometry, geometry_of

_NEVER = "what it needs was never computed, as something failed before"

_ANSWERED = commands.Ask, commands.Read, commands.Compare, commands.Synchronize


class _NeverComputed(RuntimeError):
    """Something failed before, and what it should have given is needed now."""


class Lender:
    """The tensors of a rank, and what is done to them."""

    def __init__(self, name: str, devices: list[torch.device], transport: Transport) -> None:
        self._name, self._devices, self._transport = name, devices, transport
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._built: dict[int, Built] = {}
        self._graphs: dict[int, Graph] = {}
        self._failed: Failed | None = None

    @torch.no_grad()
    def lend(self) -> None:
        """Do what rank 0 says, until it says to end."""
        while True:
            for command in self._transport.receive(0):
                if isinstance(command, commands.End):
                    return
                answer = self._try(command, getattr(self, f"_{type(command).__name__.lower()}"))
                if isinstance(command, _ANSWERED):
                    self._answer(answer)

    def _answer(self, answer: Any) -> None:
        """Send rank 0 an answer, or what failed since the last one."""
        if self._failed is not None:
            answer, self._failed = self._failed, None
        if not isinstance(answer, torch.Tensor):
            self._transport.send(0, answer)
            return
        self._transport.send(0, commands.Values(tuple(answer.shape), answer.dtype))
        self._transport.send_values(0, answer)

    def _try(self, command: Any, do: Callable[[Any], Any]) -> Any:
        try:
            return do(command)
        except HostLost:
            raise
        except Exception as error:  # noqa: BLE001  # it is raised where rank 0 waits
            self._fail(error, command)
            return None

    def _fail(self, error: Exception, command: Any) -> None:
        if self._failed is None:  # the first; others are of what it did not give
            at = getattr(command, "operation", type(command).__name__.lower())
            message = f"{error} (in {at}, on {self._name})"
            self._failed = Failed(type(error).__name__, message, isinstance(error, _NeverComputed))

    # Commands

    def _run(self, command: commands.Run) -> None:
        args, kwargs = self._arguments(command)
        result = operation_named(command.operation)(*args, **kwargs)
        for made, storage in zip(tensors_in(result), command.gives, strict=True):
            if storage is not None:
                self._keep(made, *storage)

    def _settings(self, command: commands.Settings) -> None:
        commands.set_as(command.values)

    def _hold(self, command: commands.Hold) -> None:
        recipe = pickle.loads(command.recipe)
        self._built[command.number] = Built(recipe, self._devices[command.device])

    def _call(self, command: commands.Call) -> None:
        entry = None
        if command.entry is not None:
            cls, keys, values, is_frozen = command.entry
            entry = cls, self._tensor(keys), self._tensor(values), is_frozen
        tensors = list(map(self._tensor, command.tensors))
        made = self._built[command.block].run(tensors, self._named(command), entry)
        self._keep_all(made, command)

    def _record(self, command: commands.Record) -> None:
        tensors = list(map(self._tensor, command.tensors))
        built = self._built[command.block]
        graph = Graph(built, tensors, self._named(command), command.keys)
        self._graphs[command.number] = graph
        self._keep_all([graph.output], command)

    def _backward(self, command: commands.Backward) -> None:
        if command.graph not in self._graphs:
            raise _NeverComputed(_NEVER)
        graph, gradient = self._graphs[command.graph], self._tensor(command.gradient)
        self._keep_all(graph.backward(gradient, command.which, command.keeps), command)

    def _keep_all(self, made: Sequence[Any], command: Any) -> None:
        for tensor, storage in zip(made, command.gives, strict=True):
            self._keep(tensor, *storage)

    def _keep(self, made: torch.Tensor, number: int, geometry: Geometry) -> None:
        """Keep a result as rank 0 knows it, which nobody else has."""
        made = made.resolve_conj().resolve_neg()
        if made.shape != geometry.shape:
            raise RuntimeError(f"it gave {tuple(made.shape)}, not {tuple(geometry.shape)}")
        if geometry_of(made) != geometry or made.storage_offset():
            copied = torch.empty_strided(
                geometry.shape, geometry.stride, dtype=geometry.dtype, device=made.device
            )
            # A kernel may leave out what nobody reads, as batch norm the mean of an evaluation.
            made = copied.copy_(made) if made.numel() else copied
        self._storages[number] = made.untyped_storage()

    def _ask(self, command: commands.Ask) -> Any:
        args, kwargs = self._arguments(command)
        tensors = list(tensors_in((args, list(kwargs.values()))))
        result = operation_named(command.operation)(*args, **kwargs)
        numbers = iter(command.numbers)

        def tell(made: torch.Tensor) -> Any:
            number = next(numbers)
            for index, tensor in enumerate(tensors):
                if tensor is made:
                    return Given(index)
            made = made.resolve_conj().resolve_neg().clone()
            self._storages[number] = made.untyped_storage()
            return New(number, geometry_of(made))

        return exchanged(result, tell)

    def _make(self, command: commands.Make) -> None:
        nbytes, device = command.geometry.nbytes, self._devices[command.device]
        made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storages[command.storage] = made.untyped_storage()

    def _grow(self, command: commands.Grow) -> None:
        self._storages[command.storage].resize_(command.nbytes)

    def _free(self, command: commands.Free) -> None:
        for number in command.numbers:
            for table in (self._storages, self._built, self._graphs):
                table.pop(number, None)  # type: ignore[attr-defined]

    def _put(self, command: commands.Put) -> None:
        values = self._transport.receive_values(0, command.shape, command.dtype)
        self._tensor(command.target).copy_(values)

    def _load(self, command: commands.Load) -> None:
        values = read(command.where, command.shape, command.stride, command.dtype)
        self._tensor(command.target).copy_(values)

    def _copy(self, command: commands.Copy) -> None:
        self._tensor(command.target).copy_(self._tensor(command.source))

    def _read(self, command: commands.Read) -> torch.Tensor:
        return self._on_cpu(command.source)

    def _send(self, command: commands.Send) -> None:
        values = self._try(command, lambda command: self._on_cpu(command.source))
        self._transport.send(command.rank, values is not None)
        if values is not None:
            self._transport.send_values(command.rank, values)

    def _receive(self, command: commands.Receive) -> None:
        if not self._transport.receive(command.rank):
            raise _NeverComputed(f"rank {command.rank} had nothing to send")
        values = self._transport.receive_values(command.rank, command.shape, command.dtype)
        self._tensor(command.target).copy_(values)

    def _compare(self, command: commands.Compare) -> dict[str, str]:
        return differences(command.files, command.checksums)

    def _synchronize(self, command: commands.Synchronize) -> None:
        for device in self._devices:
            if device.type != "cpu":
                torch.get_device_module(device.type).synchronize(device)

    # Tensors

    def _arguments(self, command: commands.Run | commands.Ask) -> tuple[list[Any], dict[str, Any]]:
        return [self._resolved(value) for value in command.args], self._named(command)

    def _named(self, command: Any) -> dict[str, Any]:
        return {name: self._resolved(value) for name, value in command.kwargs.items()}

    def _resolved(self, value: Any) -> Any:
        if type(value) is Stored:
            return self._tensor(value)
        if type(value) is list:
            return [self._resolved(item) for item in value]
        return value

    def _tensor(self, stored: Stored) -> torch.Tensor:
        if stored.storage not in self._storages:
            raise _NeverComputed(_NEVER)
        storage = self._storages[stored.storage]
        tensor = torch.empty(0, dtype=stored.dtype, device=storage.device)
        return tensor.set_(storage, stored.offset, stored.shape, stored.stride)  # type: ignore[call-overload]

    def _on_cpu(self, stored: Stored) -> torch.Tensor:
        return self._tensor(stored).to("cpu").contiguous()
