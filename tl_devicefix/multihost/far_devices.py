"""What becomes of an operation on a device of another rank: a command, and a tensor without values.

Rank 0 knows what an operation will give, and goes on. Commands are kept until someone waits for a
value, or a rank for another one's, or there is enough of them: a message to a rank holds all that
it does until then. The first is short, and each is twice as long as the one before, so that a rank
begins early, and has few of them. Devices of rank 0 itself compute at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tl_devicefix.multihost.checkpoint_files import File, current_file, files_of, in_file
from tl_devicefix.multihost.commands import Failure, NewStorage, RemoteTensor, exchanged
from tl_devicefix.multihost.handshake import Place, held_by, parts_of
from tl_devicefix.multihost.peers import Answer, Command, Owner, Peer, tell_both
from tl_devicefix.placement.in_use import use
from tl_devicefix.placement.placement import Placement
from tl_devicefix.simulation.backward import raise_or_keep
from tl_devicefix.simulation.executor import Executor
from tl_devicefix.simulation.geometry import (
    Geometry,
    call_without_values,
    depends_on_values,
    geometry_of,
    is_view,
    tensors_in,
    written,
)

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


class FarDevices(Executor):
    """The devices of all ranks, as a machine of `tl_devicefix.simulation` has them.

    Tensors here are those behind the machine's: of rank 0, real ones; of others, without values.
    """

    def __init__(self, places: list[Place], peers: dict[int, Peer]) -> None:
        self.places = places
        self.run_block: Callable[..., torch.Tensor | None] | None = None
        self._peers = peers
        #: Blocks that ranks have built, and their trials, by device and description.
        self.built: dict[tuple[int, bytes], tuple[Any, dict[Any, Any]]] = {}
        self._same: dict[tuple[int, File], bool] = {}  # whether a rank has a file of rank 0's
        self._between_ranks = threading.Lock()

    # Operations

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Run an operation, or tell its rank to; return what it will have given."""
        rank = self.places[device].rank
        if not rank or is_view(func):
            return func(*args, **kwargs)
        if _draws(func, args, kwargs):
            return self._at_home(func, args, kwargs, device)
        if depends_on_values(func, args):
            return self._ask(func, args, kwargs, rank)
        blanks: Any = exchanged([args, kwargs], _blank)
        try:
            result = call_without_values(func, *blanks)
        except Exception:  # noqa: BLE001  # wrong, or unknown here: its kernel tells
            return self._ask(func, args, kwargs, rank)
        outputs = tuple(self._new_storage(tensor, rank) for tensor in tensors_in(result))
        self.wait_for_room(rank)
        self.tell(rank, "run", func.name(), *self.named([args, kwargs]), outputs)
        return result

    def _new_storage(self, made: torch.Tensor, rank: int) -> NewStorage | None:
        """The storage of what an operation gives; None if it is one of its arguments'."""
        if _owner_of(made) is not None:
            return None
        owner = self.owner(rank)
        _give_owner(made, owner)
        return NewStorage(owner.number, geometry_of(made))

    def _ask(self, func: Any, args: Any, kwargs: dict[str, Any], rank: int) -> Any:
        """Have an operation run whose result is not known before, and wait for it."""
        owners = {owner.number: owner for owner in (self.owner(rank) for _ in func._schema.returns)}
        command = "ask", func.name(), *self.named([args, kwargs]), list(owners)
        answer = self.answer(rank, command, lambda: _of_zeros(func, args, kwargs))

        def make(part: Any) -> Any:
            if isinstance(part, NewStorage):
                return self.promise(part.geometry, rank, owners[part.number])
            if isinstance(part, torch.Tensor):  # of zeros, after an error
                return self.promise(geometry_of(part), rank)
            return [make(one) for one in part] if type(part) in (list, tuple) else part

        result = make(answer)
        return tuple(result) if type(result) is list else result

    def _at_home(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Draw random numbers here, where they are those of one process."""
        tensors = tensors_in((args, list(kwargs.values())))
        read = {
            id(tensor): self.read(tensor, device) if tensor.is_meta else tensor
            for tensor in tensors
        }
        args, kwargs = exchanged([args, kwargs], lambda tensor: read[id(tensor)])
        result = func(*args, **kwargs)
        back = {id(read[id(tensor)]): tensor for tensor in tensors}

        def upload(made: torch.Tensor) -> torch.Tensor:
            if id(made) in back:
                self.copy(back[id(made)], made, device, None)
                return back[id(made)]
            return self.upload(made, device)

        for tensor in written(func, args, kwargs):
            upload(tensor)  # also what it does not give, as RReLU its noise
        result = exchanged(result, upload)
        return tuple(result) if type(result) is list else result

    # Blocks

    def owner(self, rank: int) -> Owner:
        """Who has what a rank is about to be told to hold; when that is gone, it lets it go."""
        return self._peers[rank].owner()

    def promise(self, geometry: Geometry, rank: int, owner: Owner | None = None) -> torch.Tensor:
        """A tensor that a rank is about to be told to make, or has made for this owner."""
        made = geometry.empty("meta")
        _give_owner(made, self.owner(rank) if owner is None else owner)
        return made

    def wait_for_room(self, rank: int) -> None:
        """Wait while a rank is too far behind to be told more."""
        if rank:
            self._peers[rank].wait_for_room()

    def storages_of(self, promised: list[torch.Tensor]) -> tuple[NewStorage, ...]:
        """The storages that a rank is to make of promised tensors."""
        return tuple(NewStorage(self.stored(made).storage, geometry_of(made)) for made in promised)

    # Copies

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
    ) -> None:
        """Copy between any two devices, or the host (None) and one."""
        giving, taking = self._rank_of(of), self._rank_of(to)
        for rank in (giving, taking):
            self.wait_for_room(rank)
        if not giving and not taking:
            target.copy_(source)
        elif not giving:
            self._put(target, source, taking)
        elif not taking:
            assert of is not None
            target.copy_(self.read(source, of))
        elif giving == taking:
            self.tell(giving, "copy", self.stored(target), self.stored(source))
        else:
            self._between(giving, taking, target, source)

    def _between(
        self, giving: int, taking: int, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Tell one rank to send and another to receive, in one order for all ranks."""
        send = Command("send", (self.stored(source), taking))
        shape, dtype = tuple(source.shape), source.dtype
        receive = Command("receive", (self.stored(target), shape, dtype, giving))
        peers = self._peers[giving], self._peers[taking]
        with self._between_ranks:
            tell_both(peers, (send, receive))
        for peer in peers:  # while rank 0 says what comes next
            peer.send()

    def _put(self, target: torch.Tensor, source: torch.Tensor, rank: int) -> None:
        where = in_file(source) if source.device.type == "cpu" else None
        if where is not None and self._has(rank, where.file):
            shape, stride = tuple(source.shape), source.stride()
            self.tell(rank, "load", self.stored(target), where, shape, stride, source.dtype)
            return
        values = source.detach().to("cpu").contiguous()
        if values.untyped_storage()._cdata == source.untyped_storage()._cdata:
            values = values.clone()  # as rank 0 goes on, and may change it
        values = values.resolve_conj().resolve_neg()
        shape = tuple(values.shape)
        self.tell(rank, "put", self.stored(target), shape, values.dtype, values=values)
        if values.nbytes > _LARGE:
            self._peers[rank].send()

    def _has(self, rank: int, file: File) -> bool:
        if (rank, file) not in self._same:
            self.differences([file], [rank])
        return self._same[rank, file]

    def differences(self, files: list[File], ranks: list[int]) -> dict[int, dict[str, str]]:
        """Which files of rank 0's other ranks have not, or have others of, and why."""
        asked = {rank: self._wait_for(rank, "compare", tuple(files)) for rank in ranks}
        reasons: dict[int, dict[str, str]] = {}
        for rank, answer in asked.items():
            reasons[rank] = self._of(rank, answer)
            self._same |= {(rank, file): file.path not in reasons[rank] for file in files}
        return reasons

    # Models

    def check_checkpoint(self, model_name: str, placement: Placement, **kwargs: Any) -> None:
        """See `OtherHosts`."""
        use(placement)  # by which errors say what a rank is to hold
        ranks = _ranks_of(placement)
        paths = files_of(model_name, kwargs) if ranks else {}
        for rank, wrong in self.differences([current_file(path) for path in paths], ranks).items():
            if wrong:
                path, why = next(iter(wrong.items()))
                who = f"{self._peers[rank].name}{held_by(rank)}"
                more = f" (and of {len(wrong) - 1} more files)" if wrong.keys() - {path} else ""
                raise ValueError(
                    f"rank 0 loads {paths[path]}, but {who} {why}{more}: put the same checkpoint "
                    "at the same path on each host, or load it on rank 0 into memory and give it "
                    "as hf_model, whose weights are sent"
                )

    def wait_for(self, placement: Placement) -> None:
        """See `OtherHosts`."""
        for rank in _ranks_of(placement):
            self.answer(rank, ("synchronize",), lambda: None)

    def contents(self, device: int) -> str:
        """What the rank of a device holds of models, as a sentence: " Rank 1 holds blocks.3."."""
        rank = self.places[device].rank
        parts = parts_of(rank)
        return f" Rank {rank} holds {parts}." if parts else ""

    def convert(
        self, source: torch.Tensor, of: int, to: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """``.to``: a copy on another device, or the host (None), also of another dtype."""
        options.pop("non_blocking", None)
        options.pop("pin_memory", None)
        if any(option is not None for option in options.values()):
            converted = self.run(aten._to_copy.default, [source], options, of)
            if of == to:
                return converted  # type: ignore[no-any-return]
            return self.convert(converted, of, to, {})
        if to is None and self.places[of].rank:
            return self.read(source, of)
        geometry = geometry_of(aten._to_copy.default(source.to("meta")))
        result = geometry.empty("cpu") if to is None else self.allocate(geometry, to)
        self.copy(result, source, to, of)
        return result

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Values that no one else has, put on a device."""
        values = values.resolve_conj().resolve_neg()
        uploaded = self.allocate(geometry_of(values), device)
        self.copy(uploaded, values, device, None)
        return uploaded

    def resolve(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """A copy of a conjugated or negated view, as values."""
        if not self.places[device].rank:
            return tensor.resolve_conj().resolve_neg()
        if tensor.is_conj():
            tensor = self.run(aten._conj_physical.default, [tensor.conj()], {}, device)
        if tensor.is_neg():
            tensor = self.run(aten.neg.default, [torch._neg_view(tensor)], {}, device)
        return tensor

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """The tensor with its values, on the CPU if it is of another rank.

        It lies there as `.cpu()` of one process has it: a product rounds by how its factors lie.
        """
        rank = self.places[device].rank
        if not rank:
            return tensor
        shape, stride, dtype = geometry_of(aten._to_copy.default(tensor))
        # Values come in the order of memory, whichever of the dimensions that is.
        order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
        values: torch.Tensor = self.answer(
            rank,
            ("read", self.stored(tensor.permute(order))),
            lambda: torch.zeros(shape, dtype=dtype),
        )
        return values.as_strided(shape, stride)

    # Memory

    def allocate(self, geometry: Geometry, device: int) -> torch.Tensor:
        """A tensor in memory of a device, without values of its own."""
        place = self.places[device]
        if not place.rank:
            return geometry.empty(place.device)
        made = self.promise(geometry, place.rank)
        self.wait_for_room(place.rank)
        self.tell(place.rank, "make", self.stored(made).storage, geometry, place.number)
        return made

    # Waiting

    def synchronize(self, device: int) -> None:
        """Wait for all that was given to a device."""
        rank = self.places[device].rank
        if rank:
            self.answer(rank, ("synchronize",), lambda: None)

    def answer(self, rank: int, command: Any, otherwise: Callable[[], Any]) -> Any:
        """What a rank answers; in a backward, something else after an error, which is kept."""
        try:
            return self._of(rank, self._wait_for(rank, *command))
        except Exception as error:  # noqa: BLE001  # as the engine ends the process at any
            raise_or_keep(error)
            return otherwise()

    def _wait_for(self, rank: int, name: str, *arguments: Any) -> Answer:
        """Send all that was kept, and a command that is answered."""
        answer = self._peers[rank].ask(name, *arguments)
        for peer in self._peers.values():
            peer.wait()
        return answer

    def _of(self, rank: int, answer: Answer) -> Any:
        """The answer, once it is there."""
        result = answer.result()
        if isinstance(result, Failure):
            raise self._error(rank, result)
        return result

    def _error(self, rank: int, failed: Failure) -> Exception:
        """What failed first, which may be another rank's; from here on, all goes on."""
        asked = {
            other: self._wait_for(other, "synchronize") for other in self._peers if other != rank
        }
        failures = {rank: failed}
        failures |= {other: answer.result() for other, answer in asked.items()}
        reports = [
            (other, failure) for other, failure in failures.items() if isinstance(failure, Failure)
        ]
        of, first = next((report for report in reports if not report[1].is_consequence), reports[0])
        kind = _ERRORS.get(first.kind, RuntimeError)
        if "can't allocate memory" in first.message:  # the CPU's has no type of its own
            kind = torch.OutOfMemoryError
        return kind(f"{first.message}{held_by(of)}".rstrip(","))

    def tell(
        self, rank: int, name: str, *arguments: Any, values: torch.Tensor | None = None
    ) -> None:
        """Give a rank a command, with the values that come with it."""
        self._peers[rank].tell(name, *arguments, values=values)

    # Tensors

    def _rank_of(self, device: int | None) -> int:
        return 0 if device is None else self.places[device].rank

    def stored(self, tensor: torch.Tensor) -> RemoteTensor:
        """How a tensor without values lies in a rank's storage."""
        owner = _owner_of(tensor)
        assert owner is not None
        offset = tensor.storage_offset()
        return RemoteTensor(
            owner.number, tuple(tensor.shape), tensor.stride(), int(offset), tensor.dtype
        )

    def named(self, arguments: Any) -> Any:
        """Arguments as a command names them; CPU tensors are copied into it."""
        return exchanged(
            arguments, lambda item: self.stored(item) if item.is_meta else item.detach().clone()
        )


_LARGE = 1 << 20
"""Bytes from which values are sent at once."""
_ERRORS: dict[str, type[Exception]] = {
    **{error.__name__: error for error in (ValueError, IndexError, TypeError, NotImplementedError)},
    "OutOfMemoryError": torch.OutOfMemoryError,
    "_LinAlgError": torch.linalg.LinAlgError,
}


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers."""
    if func is _ATTENTION:
        return bool(kwargs.get("dropout_p", args[3] if len(args) > 3 else 0.0))
    return torch.Tag.nondeterministic_seeded in func.tags


def _of_zeros(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives of zeros, for a backward that has failed to go on with."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    args, kwargs = exchanged([args, kwargs], zeros)
    return func(*args, **kwargs)


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Without values, but for CPU scalars."""
    return tensor if tensor.is_meta or tensor.dim() == 0 else tensor.to("meta")


def _ranks_of(placement: Placement) -> list[int]:
    """Ranks that a placement uses, but for rank 0."""
    used = {site.host for site in placement.sites if site.torch_device in placement.devices}
    return sorted(used - {0})


def _owner_of(tensor: torch.Tensor) -> Owner | None:
    """Who has the storage of a tensor without values: it lives as long as this does here."""
    return getattr(tensor.untyped_storage(), _OWNER, None)


def _give_owner(tensor: torch.Tensor, owner: Owner) -> None:
    setattr(tensor.untyped_storage(), _OWNER, owner)


_OWNER = "tl_devicefix_owner"
