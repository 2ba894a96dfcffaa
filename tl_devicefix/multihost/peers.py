"""The other ranks, as rank 0 speaks to them, and rank 0, as each of them does.

On rank 0, a thread for each other rank sends, and another receives, so that nobody waits for a rank
that is lost. What is told is one object, a `Told`, which one call of C appends to a deque: no
interrupt divides it. The thread that sends takes it from there, and knows whose answer comes when.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import ref

import torch

from tl_devicefix.multihost import commands
from tl_devicefix.multihost.transport import (
    ANSWERS,
    COMMANDS,
    PROGRESS,
    VALUES,
    Connection,
    Queue,
    as_bytes,
    said_by_gloo,
)

_NOTHING = -1
_INLINE = 1 << 16
"""Bytes below which values go with their command: gloo takes longer to begin than a queue."""
_AHEAD = 32
"""Messages, after which a rank says that it has begun with them; twice as many may wait."""
_SHORTEST, _LONGEST = 16, 2048
"""Operations of a message that is sent though nobody waits: each of twice as many as before."""
_OPERATIONS: dict[type, int] = dict.fromkeys(
    (commands.Call, commands.Record, commands.Backward), 16
)
"""For how many a command counts, if it is not for one."""
_MOST_MESSAGES = 64
"""That may wait to be sent."""
_TURN, _PATIENCE = 2e-5, 2e-3
"""Seconds that it is waited until a first message is sent: at once, and in all."""
_numbers = itertools.count()
"""Of storages, blocks and graphs, of all machines of a process."""


class HostLost(RuntimeError):
    """A rank is lost, and with it the part of a model that its devices held.

    Attributes:
        rank: which one.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Answer:
    """What a rank will have answered."""

    __slots__ = ("_is_here", "_result")

    def __init__(self) -> None:
        self._result: Any = None
        self._is_here = threading.Lock()
        self._is_here.acquire()

    def give(self, result: Any) -> None:
        """It is here: something, or an error."""
        self._result = result
        self._is_here.release()

    def result(self) -> Any:
        """Wait for it; if it is an error, raise it."""
        with self._is_here:
            pass
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Told(NamedTuple):
    """A command with what goes with it: values, who waits for its answer, and torch's settings."""

    command: Any
    values: torch.Tensor | None = None
    answer: Answer | None = None
    settings: list[Any] | None = None


_SEND = Told(None)
"""All that was told before is sent now."""
_END = Told(commands.End())


class Owner:
    """Has what a rank holds by a number: a storage, a block, or a graph.

    When it is gone, the rank lets that go: after all that was told before, and before what is told
    from then on.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)


Message = tuple[list[Any], list[torch.Tensor], list[Told]]
"""What is sent at once: commands, their values, and those that are answered, in order."""


class _Values(tuple[Any, ...]):
    """Shape, dtype, and bytes of values; None if these come next by gloo."""


def _inline(values: torch.Tensor) -> bytes | None:
    """The bytes of small values, which go with what is said of them; None if they go alone."""
    return bytes(as_bytes(values).numpy()) if values.nbytes <= _INLINE else None


def _outlined(inline: bytes, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not inline:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(inline), dtype=torch.uint8).view(dtype).view(tuple(shape))


class Outbox:
    """What is told to a rank, until it is sent. Any thread tells, and one takes and sends.

    Attributes:
        owned: numbers by references to owners whose end the rank was not told of.
        n_sent: how many messages were sent.
    """

    def __init__(self) -> None:
        self.owned: dict[ref[Owner], int] = {}
        self.n_sent = 0
        self.told: deque[Told | ref[Owner]] = deque()
        self._wanted: SimpleQueue[None] = SimpleQueue()
        self._taken: list[Told | ref[Owner]] = []
        self._operations, self._length = 0, _SHORTEST
        self._settings: list[Any] | None = None  # as the rank was told last

    def owner(self) -> Owner:
        """Who has what the rank is about to be told to hold."""
        owner = Owner()
        self.owned[ref(owner, self.told.append)] = owner.number
        return owner

    def tell(self, told: Told) -> None:
        """Tell something, which is sent when someone waits, or there is enough of it."""
        self.told.append(told)
        self._operations += _OPERATIONS.get(type(told.command), 1)
        if self._operations >= self._length:
            is_first, n_sent = self._length == _SHORTEST, self.n_sent
            self._length = min(2 * self._length, _LONGEST)
            self.send()
            # The thread that sends gets the interpreter, as the rank has nothing to do until then.
            until = time.monotonic() + _PATIENCE
            while is_first and self.n_sent == n_sent and time.monotonic() < until:
                time.sleep(_TURN)

    def send(self) -> None:
        """Have all that was told be sent."""
        self._operations = 0
        self.told.append(_SEND)
        self._wanted.put(None)

    def wait(self) -> None:
        """Have all that was told be sent, as someone waits; what is next may be short again."""
        if self.told or self._operations:
            self.send()
        self._length = _SHORTEST

    def end(self) -> None:
        """Tell it to end."""
        self.told.append(_END)
        self._wanted.put(None)

    @property
    def is_full(self) -> bool:
        """Whether the rank is so far behind that no more should be told."""
        return self._wanted.qsize() > _MOST_MESSAGES

    def until_wanted(self) -> None:
        """In the thread that sends: wait until something is to be sent."""
        self._wanted.get()

    def next_message(self) -> Message | None:
        """What is sent next; None if nothing is to be sent now."""
        while (told := self._next()) is not None:
            if told is not _SEND:
                self._taken.append(told)
            if (told is _SEND or told is _END) and self._taken:
                taken, self._taken = self._taken, []
                return self._message(taken)
        return None

    def _message(self, taken: list[Told | ref[Owner]]) -> Message:
        said: list[Any] = []
        for is_told, several in itertools.groupby(taken, lambda each: type(each) is Told):
            if not is_told:  # of one that an interrupt left without a number, nothing was told
                numbers: Any = (self.owned.pop(each, None) for each in several)  # type: ignore[arg-type]
                said.append(commands.Free(tuple(n for n in numbers if n is not None)))
                continue
            for told in several:
                assert type(told) is Told
                if told.settings not in (None, self._settings):
                    self._settings = told.settings
                    said.append(commands.Settings(told.settings))
                said.append(told.command)
        told_all = [each for each in taken if type(each) is Told]
        values = [each.values for each in told_all if each.values is not None]
        return said, values, [each for each in told_all if each.answer is not None]

    def _next(self) -> Told | ref[Owner] | None:
        try:
            return self.told.popleft()
        except IndexError:
            return None

    def never(self) -> list[Answer]:
        """The answers of what is never sent, as the rank is lost."""
        unsent = iter(self._next, None)
        return [each.answer for each in unsent if type(each) is Told and each.answer is not None]


class Peer:
    """Another rank, as rank 0 speaks to it.

    Attributes:
        messages: how many were sent to it.
        lost: why it is not there any more, if it is not.
    """

    def __init__(self, rank: int, name: str, by: Connection, lose: Callable[[str], None]) -> None:
        self.rank, self.name, self._by = rank, name, by
        self.messages = 0
        self._lose = lose
        self.lost: HostLost | None = None
        self.outbox = Outbox()
        self._expected: SimpleQueue[None] = SimpleQueue()
        self._asked: SimpleQueue[Answer] = SimpleQueue()
        self._waiting: set[Answer] = set()
        self._lock = threading.Lock()  # of threads of its own: an interrupt finds nobody with it
        self._has_sent_all = threading.Event()
        self._within_gloo: set[str] = set()
        self._has_ended = False
        self._begun = 0
        self._commands = Queue(by, rank, rank, COMMANDS)
        self._answers = Queue(by, rank, rank, ANSWERS, self.raise_if_lost)
        self._progress = Queue(by, rank, rank, PROGRESS, self.raise_if_lost)

    def begin(self) -> None:
        """Send and receive from now on: to lose it may lose all."""
        for work in (self._send_next, self._receive_next, self._notice_loss):
            name = f"rank {self.rank}: {work.__name__}"
            threading.Thread(target=self._keep, args=(work,), daemon=True, name=name).start()

    @property
    def n_held(self) -> int:
        """How many storages, blocks and graphs it was told to hold, and was not told to let go."""
        return len(self.outbox.owned)

    def tell(self, command: Any, values: torch.Tensor | None = None) -> None:
        """Give it a command, with the values that come with it; it raises if a rank is lost."""
        self.raise_if_lost()
        self.outbox.tell(Told(command, values, settings=commands.settings()))

    def ask(self, command: Any) -> Answer:
        """Give it a command that is answered, and send all; it raises if a rank is lost."""
        answer = Answer()
        self.raise_if_lost()
        self.outbox.tell(Told(command, answer=answer, settings=commands.settings()))
        self.outbox.wait()
        self.raise_if_lost()  # or nobody might answer
        return answer

    def wait_for_room(self) -> None:
        """Wait while it is too far behind; it raises if a rank is lost."""
        while self.outbox.is_full:
            self.raise_if_lost()
            time.sleep(0.005)  # it has much to do until then

    def end(self) -> None:
        """Tell it to end, unless it is lost."""
        if self.lost is None:
            self._has_ended = True
            self.outbox.end()

    def rest(self, until: float) -> None:
        """Wait until no thread is within gloo, from where it must not come back as Python ends."""
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
            waiting.update(self.outbox.never())
        self._has_sent_all.set()
        for answer in waiting:
            answer.give(self.lost)
        # Beside, as a store may never answer; if it is gone, who waits for it knows.
        threading.Thread(target=self._wake, daemon=True, name=f"rank {self.rank}: wakes").start()

    def _wake(self) -> None:
        with self._in_gloo("waking"), contextlib.suppress(RuntimeError):
            self._commands.wake(self._answers)
            self._commands.wake(self._progress)

    def raise_if_lost(self) -> None:
        """Raise a HostLost if it, or another rank, is lost."""
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
        self.outbox.until_wanted()
        while (message := self.outbox.next_message()) is not None:
            said, values, asked = message
            self._expect(asked)
            if self.lost is None:
                with self._in_gloo("sending"):
                    self._send(said, values)

    def _expect(self, asked: list[Told]) -> None:
        """Be told by the thread that sends whose answers come, in which order."""
        for told in asked:
            assert told.answer is not None
            with self._lock:
                if self.lost is not None:
                    told.answer.give(self.lost)
                    continue
                self._waiting.add(told.answer)
            self._asked.put(told.answer)
            self._expected.put(None)

    def _send(self, said: list[Any], values: list[torch.Tensor]) -> None:
        inline = list(map(_inline, values))
        self.messages += 1  # first, as an answer may be here at once
        self._commands.push((said, inline))
        self.outbox.n_sent += 1
        for each, small in zip(values, inline):
            if small is None:
                self._by.send(each, self.rank, COMMANDS)
        is_end = isinstance(said[-1], commands.End)
        while self._begun < (self.messages if is_end else self.messages - 2 * _AHEAD):
            self._begun = self._progress.pop()
        if is_end:
            self._has_sent_all.set()

    def _receive_next(self) -> None:
        self._expected.get()
        with self._in_gloo("receiving"):
            result = self._answers.pop()
            if isinstance(result, _Values):
                result = self._received(result)
        answer = self._asked.get()
        with self._lock:
            if answer in self._waiting:
                self._waiting.remove(answer)
                answer.give(result)

    def _received(self, values: _Values) -> Any:
        """The values, or why there is no room for them."""
        try:
            shape, dtype, inline = values
            if inline is not None:
                return _outlined(inline, shape, dtype)
            return self._by.receive(shape, dtype, self.rank, ANSWERS)
        except MemoryError as error:
            return torch.OutOfMemoryError(str(error))


def tell_both(peers: tuple[Peer, Peer], told: tuple[Any, Any]) -> None:
    """Give two ranks a command each, with no interrupt in between; it raises if a rank is lost."""
    for peer in peers:
        peer.raise_if_lost()
    now = commands.settings()
    queues, pair = [peer.outbox.told for peer in peers], [Told(each, settings=now) for each in told]
    deque(map(deque.append, queues, pair), 0)  # one call of C


class Wire:
    """Rank 0, and the others, as a rank that lends speaks to them."""

    def __init__(self, rank: int, by: Connection) -> None:
        self.has_ended = False
        self._by = by
        self._commands = Queue(by, rank, 0, COMMANDS)
        self._answers = Queue(by, rank, 0, ANSWERS)
        self._progress = Queue(by, rank, 0, PROGRESS)
        self._begun = 0
        self._answering = threading.Lock()

    def receive_commands(self) -> tuple[list[Any], Callable[..., torch.Tensor]]:
        """The next commands, and what gives the values that come with them, in order."""
        told, all_inline = self._commands.pop()
        self._begun += 1
        self.has_ended = isinstance(told[-1], commands.End)
        if self.has_ended or not self._begun % _AHEAD:
            self._progress.push(self._begun)
        remaining = iter(all_inline)

        def values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            inline = next(remaining)
            if inline is None:
                return self._by.receive(shape, dtype, 0, COMMANDS)
            return _outlined(inline, shape, dtype)

        return told, values

    def begin(self, lose: Callable[[str], None]) -> None:
        """Notice it from now on when the connection to rank 0 is lost, and call this with why."""
        threading.Thread(target=self._notice_loss, args=(lose,), daemon=True, name="rank 0").start()

    def _notice_loss(self, lose: Callable[[str], None]) -> None:
        try:
            self._by.wait_for_loss(0)
        except RuntimeError as error:  # gloo's
            if not self.has_ended:
                lose(said_by_gloo(error))

    def answer(self, result: Any) -> None:
        """Answer rank 0. Several threads may."""
        with self._answering:
            if not isinstance(result, torch.Tensor):
                self._answers.push(result)
                return
            inline = _inline(result)
            self._answers.push(_Values((tuple(result.shape), result.dtype, inline)))
            if inline is None:
                self._by.send(result, 0, ANSWERS)

    def send_values(self, values: torch.Tensor | None, rank: int) -> None:
        """Send values to another rank, or that there are none."""
        with _losing(rank):
            self._by.give(torch.tensor([_NOTHING if values is None else 0]), rank, VALUES)
            if values is not None:
                self._by.send(values, rank, VALUES)

    def receive_values(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int
    ) -> torch.Tensor | None:
        """Receive values from another rank; None if it has none."""
        header = torch.empty(1, dtype=torch.int64)
        with _losing(rank):
            self._by.get(header, rank, VALUES)
            if int(header) == _NOTHING:
                return None
            return self._by.receive(shape, dtype, rank, VALUES)


@contextlib.contextmanager
def _losing(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's
        raise HostLost(f"rank {rank} cannot be reached: {said_by_gloo(error)}", rank) from error
