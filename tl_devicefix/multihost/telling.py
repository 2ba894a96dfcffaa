"""What rank 0 tells another rank: each thing by one step, which no interrupt divides.

All that belongs together is one object, a `Told`, and one call of C appends it to a deque. Nothing
else is to be done with it where it is told: a thread of rank 0's takes it from there, in order,
sends it, and knows whose answer comes when. So an interrupt falls before it or behind it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from tl_devicefix.multihost import commands
from tl_devicefix.simulation.when_gone import Gone

_SHORTEST, _LONGEST = 16, 2048
"""Operations of a message that is sent though nobody waits: each of twice as many as before."""
_OPERATIONS: dict[type, int] = dict.fromkeys(
    (commands.Call, commands.CallCached, commands.Record, commands.Backward), 16
)
"""For how many a command counts, if it is not for one."""
_MOST_MESSAGES = 64
"""That may wait to be sent."""
_TURN, _PATIENCE = 2e-5, 2e-3
"""Seconds that it is waited until a first message is sent: at once, and in all."""
_numbers = itertools.count()
"""Of storages, blocks and graphs, of all machines of a process."""


class Answer:
    """What a rank will have answered."""

    __slots__ = ("_found", "_until_then")

    def __init__(self) -> None:
        self._found: Any = None
        self._until_then = threading.Lock()
        self._until_then.acquire()

    def give(self, found: Any) -> None:
        """It is here: something, or an error."""
        self._found = found
        self._until_then.release()

    def result(self) -> Any:
        """Wait for it.

        Raises:
            Exception: the error, if it is one.
        """
        with self._until_then:
            pass
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


class Told(NamedTuple):
    """A command with what goes with it."""

    command: Any
    values: torch.Tensor | None = None
    """That come with it."""
    answer: Answer | None = None
    """If it is answered."""
    settings: list[Any] | None = None
    """Of torch's, with which it is to be done; None if these are no matter."""


_SEND = Told(None)
"""All that was told before is sent now."""
_END = Told(commands.End())


class Owner:
    """Has what a rank holds by a number: a storage, a block, or a graph.

    When it is gone, the rank lets that go: after all that was told before, and before what is told
    from then on.
    """

    __slots__ = ("__weakref__", "number", "rank")

    def __init__(self, rank: int, number: int) -> None:
        self.rank = rank
        self.number = number


class Message(NamedTuple):
    """What is sent at once."""

    commands: list[Any]
    values: list[torch.Tensor]
    asked: list[Told]
    """Those of them that are answered, in order."""


class Telling:
    """What is told to a rank, until it is sent. Any thread tells, and one takes and sends.

    Args:
        rank: to which.

    Attributes:
        owned: numbers by what is left of owners that are not gone, or of which the rank was not
            told.
        n_sent: how many messages were, which whoever sends them counts.
    """

    def __init__(self, rank: int) -> None:
        self.owned: dict[Gone, int] = {}
        self.n_sent = 0
        self._rank = rank
        self._told: deque[Told | Gone] = deque()
        self._wanted: SimpleQueue[None] = SimpleQueue()
        self._taken: list[Told | Gone] = []
        self._operations, self._length = 0, _SHORTEST
        self._settings: list[Any] | None = None  # as the rank was told last

    def owner(self) -> Owner:
        """Who has what the rank is about to be told to hold."""
        owner = Owner(self._rank, next(_numbers))
        self.owned[Gone(owner, self._told.append)] = owner.number
        return owner

    def tell(self, told: Told) -> None:
        """Tell something, which is sent when someone waits, or there is enough of it."""
        self._told.append(told)
        self._operations += _OPERATIONS.get(type(told.command), 1)
        if self._operations >= self._length:
            is_first = self._length == _SHORTEST
            self._length = min(2 * self._length, _LONGEST)
            before = self.n_sent
            self.send()
            if is_first:
                self._let_it_be_sent(before)

    def _let_it_be_sent(self, before: int) -> None:
        """Give the thread that sends the interpreter, as the rank has nothing to do until then.

        Args:
            before: how many messages had been sent.
        """
        until = time.monotonic() + _PATIENCE
        while self.n_sent == before and time.monotonic() < until:
            time.sleep(_TURN)

    def send(self) -> None:
        """Have all that was told be sent."""
        self._operations = 0
        self._told.append(_SEND)
        self._wanted.put(None)

    def wait(self) -> None:
        """Have all that was told be sent, as someone waits; what is next may be short again."""
        if self._told or self._operations:
            self.send()
        self._length = _SHORTEST

    def end(self) -> None:
        """Tell it to end."""
        self._told.append(_END)
        self._wanted.put(None)

    @property
    def is_full(self) -> bool:
        """Whether the rank is so far behind that no more should be told."""
        return self._wanted.qsize() > _MOST_MESSAGES

    # By the thread that sends

    def until_wanted(self) -> None:
        """Wait until something is to be sent."""
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

    def _message(self, taken: list[Told | Gone]) -> Message:
        message = Message([], [], [])
        for are_gone, several in itertools.groupby(taken, lambda each: type(each) is Gone):
            if are_gone:
                # Of one that an interrupt left without an owner, the rank was told nothing.
                numbers: Any = (self.owned.pop(each, None) for each in several)  # type: ignore[arg-type]
                message.commands.append(commands.Free(tuple(n for n in numbers if n is not None)))
                continue
            for told in several:
                assert type(told) is Told
                if told.settings not in (None, self._settings):
                    self._settings = told.settings
                    message.commands.append(commands.Settings(told.settings))
                message.commands.append(told.command)
                if told.values is not None:
                    message.values.append(told.values)
                if told.answer is not None:
                    message.asked.append(told)
        return message

    def _next(self) -> Told | Gone | None:
        try:
            return self._told.popleft()
        except IndexError:
            return None

    def never(self) -> list[Answer]:
        """The answers of what is never sent, as the rank is lost."""
        found = []
        while (told := self._next()) is not None:
            if type(told) is Told and told.answer is not None:
                found.append(told.answer)
        return found
