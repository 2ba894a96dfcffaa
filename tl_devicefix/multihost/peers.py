"""The other ranks, as rank 0 speaks to them.

A thread for each of them sends, and another receives. A command is one object, which one call of C
appends to a deque: no interrupt divides it. The thread that sends takes it from there, and knows
who waits for which answer.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, cast
from weakref import ref

import torch

from tl_devicefix.multihost import commands
from tl_devicefix.multihost.transport import HostLost, Transport
from tl_devicefix.simulation.backward import raise_or_keep

_SHORTEST, _LONGEST = 16, 2048
"""Operations of a message that is sent though nobody waits: each of twice as many as before."""
_OPERATIONS = {"call": 16, "record": 16, "backward": 16}
"""For how many operations a command counts, if it is not for one."""
_MOST_MESSAGES = 64
"""That may wait to be sent."""
_TURN, _PATIENCE = 2e-5, 2e-3
"""Seconds that it is waited until a first message is sent: at once, and in all."""
_numbers = itertools.count()
"""Of storages, blocks and graphs, of all machines of a process."""


Answer = Future[Any]


class Command(NamedTuple):
    """A command in the queue of a rank.

    Attributes:
        name: of the worker's method.
        arguments: of that method.
        values: are sent behind it.
        answer: of whoever waits for one.
        settings: of torch, which hold for it.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    values: torch.Tensor | None = None
    answer: Answer | None = None
    settings: list[Any] | None = None


_SEND = Command("flush")
"""All commands before it are sent now."""
_END = Command("end")


class Owner:
    """Has what a rank holds by a number: a storage, a block, or a graph.

    When it is gone, the rank lets that go: after all that was told before, and before what is told
    from then on.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)


class Peer:
    """Another rank, as rank 0 speaks to it: any thread tells, and one of its own sends.

    Attributes:
        messages: how many were sent to it.
        lost: why it is lost, if it is.
        queue: what it is told, until that is sent.
    """

    def __init__(
        self, rank: int, name: str, transport: Transport, lose: Callable[[int, str], None]
    ) -> None:
        self.rank, self.name, self._transport, self._lose = rank, name, transport, lose
        self.messages, self.lost = 0, cast("HostLost | None", None)
        self.queue: deque[Command | ref[Owner]] = deque()
        self._owned: dict[ref[Owner], int] = {}  # of those whose end it was not told of
        self._to_send: SimpleQueue[None] = SimpleQueue()
        self._taken: list[Command | ref[Owner]] = []
        self._operations, self._length = 0, _SHORTEST
        self._settings: list[Any] | None = None  # as it was told last
        self._waiting: deque[Answer] = deque()
        self._lock = threading.Lock()  # of threads of its own: an interrupt finds nobody with it
        self._threads = [
            threading.Thread(target=self._keep, args=(work,), daemon=True, name=f"rank {rank}")
            for work in (self._send_next, self._receive_next)
        ]

    def begin(self) -> None:
        """Send and receive from now on: to lose it may lose all."""
        for thread in self._threads:
            thread.start()

    def owner(self) -> Owner:
        """Who has what it is about to be told to hold."""
        owner = Owner()
        self._owned[ref(owner, self.queue.append)] = owner.number
        return owner

    def tell(
        self,
        name: str,
        *arguments: Any,
        values: torch.Tensor | None = None,
        answer: Answer | None = None,
    ) -> None:
        """Give it a command, with the values that come with it.

        The command is sent when someone waits, or there are enough of them.
        """
        if self.raise_if_lost():
            if answer is not None:
                answer.set_exception(self.lost)
            return
        self.append(Command(name, arguments, values, answer, commands.settings()))
        self._operations += _OPERATIONS.get(name, 1)
        if self._operations >= self._length:
            is_first, messages = self._length == _SHORTEST, self.messages
            self._length = min(2 * self._length, _LONGEST)
            self.send()
            # The thread that sends gets the interpreter, as the rank has nothing to do until then.
            until = time.monotonic() + _PATIENCE
            while is_first and self.messages == messages and time.monotonic() < until:
                time.sleep(_TURN)

    def append(self, command: Command) -> None:
        """Put a command in the queue."""
        self.queue.append(command)

    def ask(self, name: str, *arguments: Any) -> Answer:
        """Give it a command that is answered, and send all."""
        answer = Answer()
        self.tell(name, *arguments, answer=answer)
        self.wait()
        if self.lost is not None:  # or nobody might answer
            self.give_up()
        return answer

    def send(self) -> None:
        """Have all that was told be sent."""
        self._operations = 0
        self.queue.append(_SEND)
        self._to_send.put(None)

    def wait(self) -> None:
        """Have all that was told be sent, as someone waits; what is next may be short again."""
        if self.queue or self._operations:
            self.send()
        self._length = _SHORTEST

    def wait_for_room(self) -> None:
        """Wait while it is too far behind."""
        while self._to_send.qsize() > _MOST_MESSAGES and self.lost is None:
            time.sleep(0.005)  # it has much to do until then

    def end(self) -> None:
        """Tell it to end, unless it is lost."""
        if self.lost is None:
            self.queue.append(_END)
            self._to_send.put(None)

    def rest(self, until: float) -> None:
        """Wait until it has ended, which closes its connection."""
        if self.lost is None:
            self._threads[-1].join(max(until - time.monotonic(), 0))

    def give_up(self) -> None:
        """Give whoever waits for it why it is lost, which is set before."""
        assert self.lost is not None
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        with contextlib.suppress(IndexError):
            while True:
                queued = self.queue.popleft()
                if type(queued) is Command and queued.answer is not None:
                    waiting.append(queued.answer)
        for answer in waiting:
            answer.set_exception(self.lost)

    def raise_if_lost(self) -> bool:
        """Raise a HostLost if it, or another rank, is lost; in a backward, keep it and say so."""
        if self.lost is not None:
            raise_or_keep(HostLost(str(self.lost), self.lost.rank))
        return self.lost is not None

    def _keep(self, work: Callable[[], None]) -> None:
        try:
            while self.lost is None:
                work()
        except Exception as error:  # noqa: BLE001  # nobody waits for ever
            self._lose(self.rank, str(error))

    def _send_next(self) -> None:
        message = self._next_message()
        with self._lock:
            self._waiting += [queued.answer for queued in message if queued.answer is not None]
        if self.lost is not None:
            self.give_up()
            return
        self.messages += 1  # first, as an answer may come at once
        self._transport.send(self.rank, [queued[:2] for queued in message])
        for queued in message:
            if queued.values is not None:
                self._transport.send_values(self.rank, queued.values)

    def _next_message(self) -> list[Command]:
        """Wait for what is to be sent at once."""
        while True:
            try:
                queued = self.queue.popleft()
            except IndexError:
                self._to_send.get()
                continue
            if queued is not _SEND:
                self._taken.append(queued)
            if (queued is _SEND or queued is _END) and self._taken:
                taken, self._taken = self._taken, []
                return list(self._with_frees(taken))

    def _with_frees(self, taken: list[Command | ref[Owner]]) -> Iterator[Command]:
        """In the place of owners that are gone, what their rank is to let go; and new settings."""
        for are_commands, several in itertools.groupby(taken, lambda item: type(item) is Command):
            if not are_commands:  # of one that an interrupt left without a number, nothing was told
                numbers: Any = (self._owned.pop(owner, None) for owner in several)  # type: ignore[arg-type]
                yield Command("free", (tuple(n for n in numbers if n is not None),))
                continue
            for queued in several:
                assert type(queued) is Command
                if queued.settings not in (None, self._settings):
                    self._settings = queued.settings
                    yield Command("settings", (queued.settings,))
                yield queued

    def _receive_next(self) -> None:
        result = self._transport.receive(self.rank)
        if isinstance(result, commands.ValuesFollow):
            try:
                result = self._transport.receive_values(self.rank, result.shape, result.dtype)
            except MemoryError as error:
                result = torch.OutOfMemoryError(str(error))
        with self._lock:
            if self._waiting:
                answer = self._waiting.popleft()
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)


def tell_both(peers: tuple[Peer, Peer], pair: tuple[Command, Command]) -> None:
    """Give two ranks a command each, with no interrupt in between."""
    if any(peer.raise_if_lost() for peer in peers):
        return
    now = commands.settings()
    queues = [peer.queue for peer in peers]
    deque(map(deque.append, queues, [command._replace(settings=now) for command in pair]), 0)
