"""Where ranks meet: by torch's store they tell each other who they are, and connect by TCP.

Nobody uses the store once all are connected.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from tl_devicefix.multihost.signing import SAME_TOKEN, SIGNATURE, Signer, WronglySigned
from tl_devicefix.multihost.transport import Connection, Transport, said_by

_log = logging.getLogger(__name__)
_REFUSING = timedelta(seconds=10)
"""How long rank 0, which has the store, waits until all others have read in it why they end."""
_LOOKING = 0.5
"""Seconds, at most, between two looks for who is missing."""
_LONG = 10.0
"""Seconds after which rank 0 warns that it waits: a notebook shows nothing less."""
_CONNECTING = 10.0
"""Seconds in which a host answers that can be reached."""
_DATA, _SIGNS_OF_LIFE = "data", "signs of life"


class Rendezvous:
    """The store where ranks meet, and a port of this rank's own, to which others connect.

    Args:
        master: where rank 0 listens, "host:port".
        rank: which one this is.
        world_size: how many there are.
        wait: seconds that ranks wait for each other.
        tell: is told what this rank waits for.
        signer: signs what ranks say.
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
        self._wait, self._tell, self.signer = wait, tell, signer
        self._is_awaited = False
        host, _, port = master.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f'master must be "host:port", as "head:29500", but is {master!r}')
        self._host, self._port = host, int(port)
        # A launcher may have its own store there, also when it starts all ranks again.
        elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = self._rank == 0 and not elsewhere
        self._own_address = "" if is_master else self._wait_until_it_listens()
        try:
            store = dist.TCPStore(
                "127.0.0.1" if is_master else host,
                self._port,
                world_size,
                is_master=is_master,
                timeout=timedelta(seconds=max(wait, _CONNECTING)),
                wait_for_workers=False,
                multi_tenant=True,  # a group of the user's may meet there too
            )
        except RuntimeError as error:  # DistError is one
            if not is_master:
                raise self._rank_0_is_missing(error) from None
            raise RuntimeError(
                f"rank 0 cannot listen at {master}: choose another port, or end the process "
                "that has it"
            ) from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: Any = dist.PrefixStore(f"tl_devicefix {attempt}", store)
        has_both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if has_both else socket.AF_INET,
            backlog=2 * world_size + 16,  # all connect before any is accepted
            dualstack_ipv6=has_both,
        )

    def _wait_until_it_listens(self) -> str:
        """Wait for rank 0; returns by which address it may reach this rank, "" if by its own."""
        start, is_told = time.monotonic(), False
        while True:
            try:
                return self._address_for_master()
            except OSError as error:
                if time.monotonic() - start > self._wait:
                    raise self._rank_0_is_missing(error) from None
            if not is_told:
                self._tell(f"{self._named} waits for rank 0 at {self._master}")
                is_told = True
            time.sleep(_LOOKING)

    def _address_for_master(self) -> str:
        with socket.create_connection((self._host, self._port), timeout=_LOOKING) as connection:
            own = connection.getsockname()
            if own == connection.getpeername():  # as TCP may, on one host
                raise OSError("it reaches itself")
        is_local = ipaddress.ip_address(own[0].partition("%")[0]).is_loopback
        return "" if is_local else str(own[0])

    def _rank_0_is_missing(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"rank 0 did not come to {self._master} within {self._wait:g} s: start "
            f"it, and see that this port can be reached from here ({str(error).splitlines()[0]})"
        )

    @property
    def _named(self) -> str:
        return f"rank {self._rank} of {self._world_size}"

    def meet(self, hello: dict[str, Any]) -> list[Any]:
        """Wait until all ranks have come; returns what each says of itself."""
        own = str(self._world_size)
        first = self.store.compare_set("world size", "", own).decode()
        if first != own:
            raise RuntimeError(
                f"rank {self._rank} came to {self._master} as one of {own} ranks, but the "
                f"first rank to come said {first}: give all the same world_size"
            )
        if self.store.add(f"is here {self._rank}", 1) > 1:
            raise RuntimeError(
                f"another process came to {self._master} as rank {self._rank}: give each "
                "process a rank of its own"
            )
        self._is_awaited = True
        address = self._own_address, self._listener.getsockname()[1]
        return self.gathered("hello", lambda: {**hello, "address": address})

    def connect(self, hellos: list[Any]) -> Transport:
        """Connect each rank with each, and rank 0 twice, for signs of life."""
        signer = self.signer.of_session(hellos)
        kinds = [(rank, _DATA) for rank in range(self._world_size) if rank != self._rank]
        lives = range(1, self._world_size) if not self._rank else (0,)
        kinds += [(rank, _SIGNS_OF_LIFE) for rank in lives]
        sockets = {}

        def connect() -> None:
            for rank, kind in kinds:
                if rank < self._rank:
                    sockets[rank, kind] = self._connected(hellos, rank, kind, signer)

        self.gathered("is connected", connect)
        while len(sockets) < len(kinds):
            sockets |= self._accepted(signer)
        self._listener.close()
        connections: dict[str, dict[int, Connection]] = {_DATA: {}, _SIGNS_OF_LIFE: {}}
        for (rank, kind), sock in sockets.items():
            own, other = f"{kind} {self._rank} {rank}", f"{kind} {rank} {self._rank}"
            connections[kind][rank] = Connection(sock, signer, own, other)
        return Transport(connections[_DATA], connections[_SIGNS_OF_LIFE])

    def _connected(self, hellos: list[Any], rank: int, kind: str, signer: Signer) -> socket.socket:
        host, port = hellos[rank]["address"]
        try:
            # One without an address of its own is where the store is.
            sock = socket.create_connection((host or self._host, port), timeout=_CONNECTING)
            Connection(sock, signer, f"claim to {rank}", "").send((self._rank, kind))
        except OSError as error:
            own, other = hellos[self._rank]["host"], hellos[rank]["host"]
            raise RuntimeError(
                f"rank {self._rank} ({own}) cannot reach rank {rank} ({other}; "
                f"{said_by(error)}): see that no firewall is between their hosts"
            ) from None
        return sock

    def _accepted(self, signer: Signer) -> dict[tuple[int, str], socket.socket]:
        """The next connection; none if it is a stranger's."""
        sock, _ = self._listener.accept()
        connection = Connection(sock, signer, "", f"claim to {self._rank}")
        sock.settimeout(_CONNECTING)
        with contextlib.suppress(OSError, WronglySigned, MemoryError, OverflowError):
            return {connection.receive(): sock}
        sock.close()
        return {}

    def gathered(self, what: str, find: Callable[[], Any]) -> list[Any]:
        """Say something, as JSON has it, and wait until all ranks have.

        Raises:
            RuntimeError: that of the first rank on which `find` raised one, on all ranks.
        """
        keys = [f"{what} {rank}" for rank in range(self._world_size)]
        try:
            value, why = find(), None
        except RuntimeError as error:  # all others wait for this rank
            value, why = None, str(error)
        own, message = keys[self._rank], json.dumps([value, why]).encode()
        try:
            self.store.set(own, self.signer.signature(message, own) + message)
            missing = self._wait_for(keys)
            signed = [self.store.get(key) for key in keys] if not missing else []
        except RuntimeError:  # DistError is one, which shows torch's own stack
            raise RuntimeError(
                f"rank 0 ended before all {self._world_size} ranks had come to {self._master}: see "
                "what it says, and start all again"
            ) from None
        if missing:
            raise RuntimeError(
                f"{_listed(missing)} of {self._world_size} did not come to {self._master} "
                f"within {self._wait:g} s: start each, with a rank of its own, and see that "
                "this port can be reached from its host"
            )
        self._is_awaited = False
        said = [self._checked(*numbered) for numbered in enumerate(zip(keys, signed))]
        for _, why in said:
            if why is not None:
                self.refuse(RuntimeError(why))
        return [value for value, _ in said]

    def _checked(self, rank: int, entry: tuple[str, bytes]) -> Any:
        """What a rank said of itself, if it has the token that this one has."""
        key, signed = entry
        try:
            self.signer.check(signed[:SIGNATURE], signed[SIGNATURE:], key)
        except WronglySigned:
            self.refuse(
                RuntimeError(
                    f"rank {rank} has another token than rank {self._rank}, which has that of "
                    f"{self.signer.source}: {SAME_TOKEN}"
                )
            )
        return json.loads(signed[SIGNATURE:])

    def _wait_for(self, keys: list[str]) -> list[int]:
        """Look for all ranks again and again; returns who is missing when the time is over."""
        start, last_text, is_warned = time.monotonic(), "", bool(self._rank)
        pause = 0.02
        while True:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            waited = time.monotonic() - start
            if not missing or waited > self._wait:
                return missing
            text = f"{self._named} waits at {self._master} for {_listed(missing)}"
            if text != last_text and waited > _LOOKING:
                self._tell(text)
                last_text = text
            if waited > _LONG and not is_warned:
                _log.warning(text)
                is_warned = True
            time.sleep(pause)
            pause = min(1.2 * pause, _LOOKING)

    def leave(self) -> None:
        """Be as if this rank had not come, so that it may come again, and where it listened."""
        with contextlib.suppress(RuntimeError):  # rank 0 has ended
            for what in ("hello", "is here") if self._is_awaited else ():
                self.store.delete_key(f"{what} {self._rank}")
        self._listener.close()
        self.store = None  # an error's traceback may hold this

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what all ranks raise, once all have read why."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"refuses {self._rank}", "")
            if not self._rank:
                keys = [f"refuses {rank}" for rank in range(self._world_size)]
                self.store.wait(keys, _REFUSING)
        raise error


def _listed(ranks: list[int]) -> str:
    """ "rank 1", "ranks 1, 2"."""
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")
    return f"rank{'s' if ranks[1:] else ''} {numbers}"
