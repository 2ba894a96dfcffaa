"""How commands and values get from one rank to another: what is small by queues of the store where
they met, what is large by gloo's point-to-point.

On rank 0, a thread for each other rank sends, and another receives, so that nobody waits for a rank
that is lost. All that is sent is bytes: gloo knows few dtypes. Whatever is unpickled is signed with
the ranks' token; the bytes of large values, which nobody unpickles, are not.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from tl_devicefix.multihost import commands
from tl_devicefix.multihost.links import LINKS
from tl_devicefix.multihost.settings import settings
from tl_devicefix.multihost.signing import SIGNATURE, Signer
from tl_devicefix.multihost.telling import Answer, Message, Owner, Telling, Told

_COMMANDS, _ANSWERS, _PROGRESS, _VALUES, _NEVER_SENT = range(5)
"""Tags."""
_FOREVER = timedelta(days=365)
"""Nobody knows how long a rank computes, so no operation times out by itself. A wait ends with its
rank: gloo raises when a connection closes; where a host is cut off and none does, `Watch` notices
within `init_hosts(timeout=...)`, whereupon rank 0 pushes what wakes its threads, and a lender, of
which nothing could wake a thread within gloo, ends its process."""
_NOTHING = -1
_PART = 1 << 24
"""Bytes that are sent at once."""
_INLINE = 1 << 16
"""Bytes below which values go with their command: gloo takes longer to begin than a queue."""
_SMALL = 1 << 20
"""Bytes that a queue takes at once; the store's limit is 8 MiB."""
_AHEAD = 32
"""Messages, after which a rank says that it has begun with them; twice as many may wait."""
_LOOK = b""
"""What wakes who waits, to look whether a rank is lost."""


def said_by_gloo(error: Exception) -> str:
    """What gloo says of a connection, without where in its source, and advice."""
    found = re.search(r"(Connection|Timed out|Broken)[^.\[]*[a-z]", str(error))
    return found[0] if found else f"{type(error).__name__}: {error}"


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a CPU tensor."""
    flat = values.contiguous().view(-1)
    # Of a single value, torch lets any stride pass for contiguous, but not for another dtype.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)


class Connection(NamedTuple):
    """All other ranks, as this one reaches them.

    Attributes:
        store: where they met.
        group: this package's own of gloo, beside which the user may have any.
        signer: signs what is unpickled.
    """

    store: Any
    group: Any
    signer: Signer

    def give(self, values: torch.Tensor, rank: int, tag: int) -> None:
        """Send bytes."""
        if tag == _VALUES:
            LINKS.begin(rank)
        self.group.send([values], rank, tag).wait(_FOREVER)

    def get(self, values: torch.Tensor, rank: int, tag: int) -> None:
        """Receive bytes, as many as there are values."""
        work = self.group.recv([values], rank, tag)
        with LINKS.getting(rank) if tag == _VALUES else contextlib.nullcontext():
            work.wait(_FOREVER)

    def send(self, values: torch.Tensor, rank: int, tag: int) -> None:
        """Send values."""
        for part in as_bytes(values).split(_PART) if values.numel() else ():
            self.give(part, rank, tag)

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int, tag: int
    ) -> torch.Tensor:
        """Receive values.

        Raises:
            MemoryError: if there is no memory for them; they have come then, and are gone.
        """
        try:
            values = torch.empty(tuple(shape), dtype=dtype)
            into = values.view(-1).view(torch.uint8)
        except RuntimeError as error:
            nbytes = math.prod(shape) * dtype.itemsize
            into = torch.empty(min(nbytes, _PART), dtype=torch.uint8)
            for start in range(0, nbytes, _PART):
                self.get(into[: min(_PART, nbytes - start)], rank, tag)
            raise MemoryError(str(error)) from error
        for part in into.split(_PART) if values.numel() else ():
            self.get(part, rank, tag)
        return values

    def wait_for_loss(self, rank: int) -> None:
        """Wait for what a rank never sends.

        Raises:
            RuntimeError: when the connection to it is lost.
        """
        self.get(torch.empty(1, dtype=torch.uint8), rank, _NEVER_SENT)


def _inline(values: torch.Tensor) -> bytes | None:
    """The bytes of small values, which go with what is said of them; None if they go alone."""
    return bytes(as_bytes(values).numpy()) if values.nbytes <= _INLINE else None


def _outlined(told: bytes, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not told:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(told), dtype=torch.uint8).view(dtype).view(tuple(shape))


class _Queue:
    """What one rank says to another: pickled objects, in order, each signed with its number.

    Args:
        by: how ranks are reached; a connection to the store is made.
        lender: the rank that speaks with rank 0.
        other: the rank at the other end: of the lender, 0.
        tag: what is said, also of what is too large for the store.
        look: called when who waits is woken, to raise if nothing will come.
    """

    def __init__(
        self,
        by: Connection,
        lender: int,
        other: int,
        tag: int,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._by, self._store, self._other, self._tag = by, by.store.clone(), other, tag
        self._name = f"said {tag} {lender}"
        self._numbers = itertools.count()
        self._store.set_timeout(_FOREVER)
        self._look = look

    def push(self, found: Any) -> None:
        """Say something."""
        told = pickle.dumps(found, protocol=5)
        if len(told) <= _SMALL:
            self._store.queue_push(self._name, self._signed(told))
            return
        self.push(_Large((len(told),)))
        large = torch.frombuffer(bytearray(self._signed(told)), dtype=torch.uint8)
        self._by.give(large, self._other, self._tag)

    def pop(self) -> Any:
        """Wait for what the other rank says.

        Raises:
            RuntimeError: if the store is gone, or as `look` does; WronglySigned if it is nobody
                with the token who says it.
        """
        found = self._unpickled(self._popped())
        if isinstance(found, _Large):
            told = torch.empty(found[0] + SIGNATURE, dtype=torch.uint8)
            self._by.get(told, self._other, self._tag)
            found = self._unpickled(bytes(told.numpy()))
        return found

    def _signed(self, told: bytes) -> bytes:
        return self._by.signer.signed(told, f"{self._name} {next(self._numbers)}")

    def _unpickled(self, told: bytes) -> Any:
        where = f"{self._name} {next(self._numbers)}"
        return pickle.loads(self._by.signer.checked(told, where))  # a rank's, whose code runs here

    def _popped(self) -> bytes:
        while True:
            told: bytes = self._store.queue_pop(self._name)
            if told != _LOOK:
                return told
            self._look()

    def wake(self, other: _Queue) -> None:
        """Have who waits for another queue look, whose connection is not free."""
        self._store.queue_push(other._name, _LOOK)


class _Large(tuple[int]):
    """Bytes of what comes next by gloo."""


class _Values(tuple[Any, ...]):
    """Shape, dtype, and bytes of values; None if these come next by gloo."""


class HostLost(RuntimeError):
    """A rank is no more there, and with it what its devices held.

    Attributes:
        rank: which one.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Peer:
    """Another rank, as rank 0 speaks to it.

    Args:
        rank: which one.
        name: the same with its host and devices, for errors.
        by: how it is reached.
        lose: called with why, when the connection to it is lost.

    Attributes:
        messages: how many were sent to it.
        lost: why it is not there any more, if it is not.
    """

    def __init__(self, rank: int, name: str, by: Connection, lose: Callable[[str], None]) -> None:
        self.rank, self._by = rank, by
        self.name = name
        self.messages = 0
        self._lose = lose
        self.lost: HostLost | None = None
        self._telling = Telling(rank)
        self._expected: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._asked_beside: dict[int, Answer] = {}
        self._waiting: set[Answer] = set()
        self._lock = threading.Lock()  # of threads of its own: an interrupt finds nobody with it
        self._has_sent_all = threading.Event()
        self._within_gloo: set[str] = set()
        self._has_ended = False
        self._begun = 0
        self._commands = _Queue(by, rank, rank, _COMMANDS)
        self._answers = _Queue(by, rank, rank, _ANSWERS, self._raise_if_lost)
        self._progress = _Queue(by, rank, rank, _PROGRESS, self._raise_if_lost)

    def begin(self) -> None:
        """Send and receive from now on: to lose it may lose all."""
        for work in (self._send_next, self._receive_next, self._notice_loss):
            name = f"rank {self.rank}: {work.__name__}"
            threading.Thread(target=self._keep, args=(work,), daemon=True, name=name).start()

    @property
    def n_held(self) -> int:
        """How many storages, blocks and graphs it was told to hold, and was not told to let go."""
        return len(self._telling.owned)

    def owner(self) -> Owner:
        """Who has what it is about to be told to hold; when that is gone, it lets it go."""
        return self._telling.owner()

    def tell(self, command: Any, values: torch.Tensor | None = None) -> None:
        """Give it a command, with the values that come with it.

        Raises:
            HostLost: if it, or another rank, is lost.
        """
        self._raise_if_lost()
        self._telling.tell(Told(command, values, settings=settings()))

    def ask(self, command: Any) -> Answer:
        """Give it a command that is answered, and send all that it was told.

        Raises:
            HostLost: if it, or another rank, is lost.
        """
        answer = Answer()
        self._raise_if_lost()
        self._telling.tell(Told(command, answer=answer, settings=settings()))
        self._telling.wait()
        self._raise_if_lost()  # or nobody might answer
        return answer

    def send(self) -> None:
        """Send all that it was told."""
        self._telling.send()

    def someone_waits(self) -> None:
        """Send all that it was told: for it, or for what it gives another rank."""
        self._telling.wait()

    def wait_for_room(self) -> None:
        """Wait while it is too far behind.

        Raises:
            HostLost: if it, or another rank, is lost.
        """
        while self._telling.is_full:
            self._raise_if_lost()
            time.sleep(0.005)  # it has much to do until then

    def end(self) -> None:
        """Tell it to end, unless it is lost."""
        if self.lost is None:
            self._has_ended = True
            self._telling.end()

    def rest(self, until: float) -> None:
        """Wait until no thread is within gloo, from where it must not come back as Python ends.

        Args:
            until: by `time.monotonic()`, until when at most.
        """
        # If cut off, it never lets go; nor does a launcher's store, of which "rank 0" is said.
        if self.lost is not None and self.lost.rank in (self.rank, 0):
            until = min(until, time.monotonic() + 2)
        self._has_sent_all.wait(max(until - time.monotonic(), 0))
        while self._within_gloo and time.monotonic() < until:
            time.sleep(0.02)

    def give_up(self) -> None:
        """Give whoever waits for it why it is lost, which is set before; who needs it gets that."""
        assert self.lost is not None
        with self._lock:
            waiting, self._waiting = self._waiting, set()
            waiting.update(self._telling.never())
        self._has_sent_all.set()
        for answer in waiting:
            answer.give(self.lost)
        # Beside, as a store may never answer; if it is gone, who waits for it knows.
        threading.Thread(target=self._wake, daemon=True, name=f"rank {self.rank}: wakes").start()

    def _wake(self) -> None:
        with self._in_gloo("waking"), contextlib.suppress(RuntimeError):
            self._commands.wake(self._answers)
            self._commands.wake(self._progress)

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise HostLost(str(self.lost), self.lost.rank)

    def _keep(self, do: Callable[[], None]) -> None:
        try:
            while True:
                do()
        except Exception as error:  # noqa: BLE001  # gloo's, mostly; nobody waits for ever
            if not self._has_ended and self.lost is None:
                self._lose(said_by_gloo(error))

    @contextlib.contextmanager
    def _in_gloo(self, what: str) -> Iterator[None]:
        self._within_gloo.add(what)
        try:
            yield
        finally:
            self._within_gloo.discard(what)

    def _notice_loss(self) -> None:
        with self._in_gloo("noticing"):
            self._by.wait_for_loss(self.rank)

    def _send_next(self) -> None:
        self._telling.until_wanted()
        while (message := self._telling.next_message()) is not None:
            self._expect(message.asked)
            if self.lost is None:
                with self._in_gloo("sending"):
                    self._send(message)

    def _expect(self, asked: list[Told]) -> None:
        """Be told by the thread that sends whose answers come, in which order."""
        for told in asked:
            assert told.answer is not None
            with self._lock:
                if self.lost is not None:
                    told.answer.give(self.lost)
                    continue
                self._waiting.add(told.answer)
            if isinstance(told.command, commands.Write):
                self._asked_beside[told.command.number] = told.answer
            else:
                self._asked.put(told.answer)
            self._expected.put(None)

    def _send(self, message: Message) -> None:
        inline = [_inline(each) for each in message.values]
        self.messages += 1  # first, as an answer may be here at once
        self._commands.push((message.commands, inline))
        self._telling.n_sent += 1
        for each, there in zip(message.values, inline):
            if there is None:
                self._by.send(each, self.rank, _COMMANDS)
        is_end = isinstance(message.commands[-1], commands.End)
        while self._begun < (self.messages if is_end else self.messages - 2 * _AHEAD):
            self._begun = self._progress.pop()
        if is_end:
            self._has_sent_all.set()

    def _receive_next(self) -> None:
        self._expected.get()
        with self._in_gloo("receiving"):
            found = self._answers.pop()
            if isinstance(found, _Values):
                found = self._received(found)
        if isinstance(found, commands.Beside):
            answer, found = self._asked_beside.pop(found.number), found.answer
        else:
            answer = self._asked.get()
        with self._lock:
            if answer in self._waiting:
                self._waiting.remove(answer)
                answer.give(found)

    def _received(self, there: _Values) -> Any:
        """The values, or why there is no room for them."""
        try:
            shape, dtype, told = there
            if told is not None:
                return _outlined(told, shape, dtype)
            return self._by.receive(shape, dtype, self.rank, _ANSWERS)
        except MemoryError as error:
            return torch.OutOfMemoryError(str(error))


class Wire:
    """Rank 0, and the others, as a rank that lends speaks to them.

    Args:
        rank: the one that lends.
        by: how they are reached.

    Attributes:
        has_ended: whether rank 0 has told to end.
    """

    def __init__(self, rank: int, by: Connection) -> None:
        self.has_ended = False
        self._by = by
        self._commands = _Queue(by, rank, 0, _COMMANDS)
        self._answers = _Queue(by, rank, 0, _ANSWERS)
        self._progress = _Queue(by, rank, 0, _PROGRESS)
        self._begun = 0
        self._answering = threading.Lock()

    def receive_commands(self) -> tuple[list[Any], Callable[..., torch.Tensor]]:
        """The next commands, and what gives the values that come with them, in order."""
        told, inline = self._commands.pop()
        self._begun += 1
        self.has_ended = isinstance(told[-1], commands.End)
        if self.has_ended or not self._begun % _AHEAD:
            self._progress.push(self._begun)
        there = iter(inline)

        def values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            given = next(there)
            if given is None:
                return self._by.receive(shape, dtype, 0, _COMMANDS)
            return _outlined(given, shape, dtype)

        return told, values

    def begin(self, lose: Callable[[str], None]) -> None:
        """Notice it from now on when the connection to rank 0 is lost.

        Args:
            lose: called with why.
        """
        threading.Thread(target=self._notice_loss, args=(lose,), daemon=True, name="rank 0").start()

    def _notice_loss(self, lose: Callable[[str], None]) -> None:
        try:
            self._by.wait_for_loss(0)
        except RuntimeError as error:  # gloo's
            if not self.has_ended:
                lose(said_by_gloo(error))

    def answer(self, found: Any) -> None:
        """Answer rank 0. Several threads may."""
        told = _inline(found) if isinstance(found, torch.Tensor) else None
        with self._answering:
            if not isinstance(found, torch.Tensor):
                self._answers.push(found)
                return
            self._answers.push(_Values((tuple(found.shape), found.dtype, told)))
            if told is None:
                self._by.send(found, 0, _ANSWERS)

    def send_values(self, values: torch.Tensor | None, rank: int) -> None:
        """Send values to another rank, or that there are none.

        Raises:
            HostLost: if it cannot be reached.
        """
        with _losing(rank):
            self._by.give(torch.tensor([_NOTHING if values is None else 0]), rank, _VALUES)
            if values is not None:
                self._by.send(values, rank, _VALUES)

    def receive_values(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int
    ) -> torch.Tensor | None:
        """Receive values from another rank; None if it has none.

        Raises:
            HostLost: if it cannot be reached.
            MemoryError: if there is no memory for them.
        """
        there = torch.empty(1, dtype=torch.int64)
        with _losing(rank):
            self._by.get(there, rank, _VALUES)
            if int(there) == _NOTHING:
                return None
            return self._by.receive(shape, dtype, rank, _VALUES)


@contextlib.contextmanager
def _losing(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's
        raise HostLost(f"rank {rank} cannot be reached: {said_by_gloo(error)}", rank) from error
