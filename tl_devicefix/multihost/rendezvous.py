"""The store where ranks meet, and their signs of life in it: who is lost is told to rank 0."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from tl_devicefix.multihost.transport import SAME_TOKEN, Signer, WronglySigned

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
SHORTEST_TIMEOUT = 2.0
"""Seconds; a busy machine may have no time for a sign of life for one."""
_REFUSING = timedelta(seconds=10)
"""How long rank 0, which has the store, waits until all others have read in it why they end."""
_OVER = "over"
_LOOKING = 0.5
"""Seconds, at most, between two looks for who is not here yet."""
_LONG = 10.0
"""Seconds after which rank 0 warns that it waits: nobody else is to be seen in a notebook."""
_CONNECTING = timedelta(seconds=10)
"""For who listens to answer."""
_ANSWERING = 2.0
"""Seconds that the store may take when a rank is lost."""
_LOOPBACK = "127.0.0.1"
_EVERY = 0.5
"""Seconds between two signs of life."""


class Late:
    """How long something has been the same, in seconds, by looks at it again and again.

    While this process, or its whole machine, stands still, so may who is to say something: that
    time is not counted.
    """

    def __init__(self) -> None:
        self._seen: Any = None
        self._looked = time.monotonic()
        self._seconds = 0.0

    def look(self, seen: Any) -> float:
        """Look at it; returns for how long it has been that."""
        now = time.monotonic()
        passed = min(now - self._looked, 1.5 * _EVERY)
        self._seconds = self._seconds + passed if seen == self._seen else 0.0
        self._seen, self._looked = seen, now
        return self._seconds


class Unanswered(RuntimeError):
    """Nobody answered in time."""


def within(seconds: float, do: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Do something in a thread, as nobody but Python hears of an interrupt, and wait for it."""
    done: futures.Future[_Result] = futures.Future()

    def work() -> None:
        try:
            done.set_result(do(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # it is raised by who waits
            done.set_exception(error)

    name = getattr(do, "__name__", "asks")
    threading.Thread(target=work, daemon=True, name=name).start()
    try:
        return done.result(seconds)
    except futures.TimeoutError:
        raise Unanswered(f"no answer within {seconds:g} s") from None


def _address_of(master: str) -> tuple[str, int]:
    address, _, port = master.rpartition(":")
    if not address or not port.isdecimal():
        raise ValueError(f'master={master!r} is no address: give "host:port", as "head:29500"')
    return address, int(port)


def _why_not_reached(address: str, port: int) -> OSError | None:
    try:
        with socket.create_connection((address, port), timeout=_LOOKING) as found:
            if found.getsockname() == found.getpeername():
                return OSError("it reaches itself")  # as TCP may, of one host
    except OSError as error:
        return error
    return None


def _in_time(ask: Callable[[], Any]) -> bool:
    """Ask the store something; whether it answers, within `_ANSWERING` seconds."""
    try:
        within(_ANSWERING, ask)
    except RuntimeError:  # also the store's: then it is gone
        return False
    return True


def _listed(ranks: list[int]) -> str:
    """ "rank 1", "ranks 1, 2"."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")
    return f"rank{'s' if ranks[1:] else ''} {shown}"


class Watch:
    """Signs of life of all ranks, by the store where they met.

    Attributes:
        store: where they met.
        wait: as it was given.
        patience: seconds within which what they wait for has come, or never does.
    """

    def __init__(
        self,
        master: str,
        rank: int,
        world_size: int,
        wait: float,
        tell: Callable[[str], None],
        signer: Signer,
    ) -> None:
        self._master, self._rank, self._world_size = master, rank, world_size
        self.signer = signer
        self._tell_user, self._is_awaited = tell, False
        self.wait = timedelta(seconds=wait)
        self.patience = (self.wait + _CONNECTING).total_seconds()
        self.store: Any = self._opened()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._beat = 0

    def _opened(self) -> Any:
        address, port = _address_of(self._master)
        # A launcher may have its own store there, also when it starts all ranks again.
        elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = self._rank == 0 and not elsewhere
        wait = self.wait
        if not is_master:
            wait = max(wait - self._wait_until_it_listens(address, port), _CONNECTING)
        try:
            store = within(
                self.patience,
                dist.TCPStore,
                _LOOPBACK if is_master else address,  # as nothing interrupts what is not reached
                port,
                self._world_size,
                is_master=is_master,
                timeout=wait,
                wait_for_workers=False,
                multi_tenant=True,  # a group of the user's may meet there too
            )
        except RuntimeError as error:  # DistError is one
            if not is_master:
                raise self._rank_0_is_missing(error) from None
            raise RuntimeError(
                f"rank 0 cannot listen at {self._master}: choose another port, or end what has it"
            ) from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"tl_devicefix {attempt}", store)

    def _wait_until_it_listens(self, address: str, port: int) -> timedelta:
        """Wait for rank 0, as torch does that nothing interrupts; returns how long it took."""
        start, is_told = time.monotonic(), False
        while True:
            error = _why_not_reached(address, port)
            waited = time.monotonic() - start
            if error is None:
                return timedelta(seconds=waited)
            if waited > self.wait.total_seconds():
                raise self._rank_0_is_missing(error)
            if not is_told:
                self._tell_user(f"{self._named} waits for rank 0 at {self._master}")
                is_told = True
            time.sleep(_LOOKING)

    def _rank_0_is_missing(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"rank 0 did not come to {self._master} within {self.wait.total_seconds():g} s: start "
            f"it, and see that this port can be reached from here ({str(error).splitlines()[0]})"
        )

    @property
    def _named(self) -> str:
        return f"rank {self._rank} of {self._world_size}"

    def agree(self) -> None:
        """Find out whether all are told the same number of ranks, before any waits for another."""
        own = str(self._world_size)
        found = self.asked(lambda: self.store.compare_set("world size", "", own)).decode()
        if found != own:
            raise RuntimeError(
                f"rank {self._rank} came to {self._master} as one of {own} ranks, but they are "
                f"{found} by who came first: give all the same world size"
            )

    def meet(self, hello: Any) -> list[Any]:
        """Wait until all ranks are here."""
        if self.asked(lambda: self.store.add(f"is here {self._rank}", 1)) > 1:
            raise RuntimeError(
                f"another process came to {self._master} as rank {self._rank}: each needs a rank "
                "of its own"
            )
        self._is_awaited = True
        return self.gathered("hello", hello)

    def wait_until_connected(self) -> None:
        """Wait until all ranks have all their connections to the store.

        For each that it gets, torch's store asks for a name, in which it answers nobody: seconds,
        where the network's name service is slow. So none is made once ranks are watched.
        """
        self.gathered("is connected", None)

    def gathered(self, what: str, said: Any) -> list[Any]:
        """Say something, as JSON has it, and wait until all ranks have."""
        keys = [f"{what} {rank}" for rank in range(self._world_size)]

        def gather() -> list[bytes]:
            own = keys[self._rank]
            self.store.set(own, self.signer.signed(json.dumps(said).encode(), own))
            try:
                self._wait_for(keys)
                return [self.store.get(key) for key in keys]
            except RuntimeError:  # DistError is one, which shows torch's own stack
                raise RuntimeError(self._why_not_all_came(keys)) from None

        signed = self.asked(gather)
        self._is_awaited = False
        return [self._checked(*each) for each in enumerate(zip(keys, signed))]

    def _checked(self, rank: int, said: tuple[str, bytes]) -> Any:
        """What a rank said of itself, if it has the token that this one has."""
        key, signed = said
        try:
            return json.loads(self.signer.checked(signed, key))
        except WronglySigned:
            pass
        self.refuse(
            RuntimeError(
                f"rank {rank} has another token than rank {self._rank}, which has that of "
                f"{self.signer.source}: {SAME_TOKEN}"
            )
        )

    def _wait_for(self, keys: list[str]) -> None:
        """Look for all ranks again and again: what waits in the store, nothing interrupts."""
        start, told, is_warned = time.monotonic(), "", bool(self._rank)
        for look in itertools.count():
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if not missing:
                return
            waited = time.monotonic() - start
            if waited > self.wait.total_seconds():
                raise RuntimeError("not all came")
            shown = f"{self._named} waits at {self._master} for {_listed(missing)}"
            if shown != told and waited > _LOOKING:
                self._tell_user(shown)
                told = shown
            if waited > _LONG and not is_warned:
                _log.warning(shown)
                is_warned = True
            time.sleep(min(0.02 * 1.2 ** min(look, 99), _LOOKING))

    def asked(self, ask: Callable[[], _Result]) -> _Result:
        """Ask the store what takes as long as ranks wait for each other, if it answers."""
        try:
            return within(self.patience, ask)
        except Unanswered:
            raise RuntimeError(f"{self._silent} for {self.patience:g} s") from None

    def leave(self) -> None:
        """Be as if this rank had not come, so that it may come again, and where it listened."""
        for what in ("hello", "is here") if self._is_awaited else ():
            if not _in_time(functools.partial(self.store.delete_key, f"{what} {self._rank}")):
                break  # rank 0 is gone
        self.store = None  # what shows an error's traceback may hold this

    def _why_not_all_came(self, keys: list[str]) -> str:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return (
                f"rank 0 ended before all {self._world_size} ranks had come to {self._master}: see "
                "what it says, and start all again"
            )
        return (
            f"{_listed(missing)} of {self._world_size} did not come to "
            f"{self._master} within {self.wait.total_seconds():g} s: start each, with a rank of "
            "its own, and see that this port can be reached from its host"
        )

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what all ranks raise, once all have read what it is of."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"refuses {self._rank}", "")
            if not self._rank:
                keys = [f"refuses {rank}" for rank in range(self._world_size)]
                self.store.wait(keys, _REFUSING)
        raise error

    def begin(
        self, others: list[int], lose: Callable[[int | None, str], None], timeout: float
    ) -> None:
        """Watch other ranks from now on."""
        # It was last seen up to a beat before it was lost, and is looked for once a beat.
        self._limit = timeout - 2 * _EVERY
        for work in (self._watch, self._watch_the_watch):
            name = work.__name__
            thread = threading.Thread(target=work, args=(others, lose), daemon=True, name=name)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def rest(self) -> None:
        """Wait until no thread is within the store: none must come back from there as Python ends.

        If the store does not answer, as of a host that is cut off, nothing comes back.
        """
        until = time.monotonic() + _ANSWERING
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def has_store(self) -> bool:
        """Whether the store can be reached; that of a launcher may be gone before rank 0 is."""
        return _in_time(lambda: self.store.check([_OVER]))

    @property
    def no_store(self) -> str:
        """Why all is lost, if it cannot."""
        return f"the store at {self._master}, where they met, cannot be reached"

    @property
    def _silent(self) -> str:
        return f"the store at {self._master}, where they met, has not answered"

    def tell_all(self, why: str) -> None:
        """Tell all ranks that it is over."""
        _in_time(lambda: self.store.set(_OVER, why))

    def _watch(self, others: list[int], lose: Callable[[int | None, str], None]) -> None:
        late = {rank: Late() for rank in others}
        while True:
            self._beat += 1
            if self._ended.wait(_EVERY):
                return
            try:
                self.store.set(f"alive {self._rank}", str(self._beat))
                said = {rank: self._said(f"alive {rank}") for rank in others}
                over = self._said(_OVER)
            except RuntimeError:  # the store is gone, and rank 0 with it
                return self._tell(lose, 0, self.no_store)
            if over and self._rank:
                return self._tell(lose, None, over)
            for rank in others:
                if late[rank].look(said[rank]) > self._limit:
                    why = f"it gave no sign of life for {self._limit:g} s"
                    return self._tell(lose, rank, why)

    def _watch_the_watch(self, others: list[int], lose: Callable[[int | None, str], None]) -> None:
        """Give up if the store does not answer: of a host that is cut off, it says nothing."""
        late = Late()
        while not self._ended.wait(_EVERY):
            if late.look(self._beat) > self._limit:
                return self._tell(lose, 0, f"{self._silent} for {self._limit:g} s")

    def _tell(self, lose: Callable[[int | None, str], None], rank: int | None, why: str) -> None:
        if not self._ended.is_set():
            lose(rank, why)

    def _said(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""
