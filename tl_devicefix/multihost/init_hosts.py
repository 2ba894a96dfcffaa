"""How ranks find each other: `init_hosts`, after which the script runs on rank 0 alone."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from tl_devicefix.multihost.blocks import run_by_command
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.handshake import (
    Place,
    called,
    free_memory,
    held_by,
    hello,
    lending,
    other_versions,
    places,
    shared,
    sites_of,
    visible_devices,
)
from tl_devicefix.multihost.peers import Peer
from tl_devicefix.multihost.rendezvous import Rendezvous
from tl_devicefix.multihost.rpc_worker import Worker
from tl_devicefix.multihost.signing import signer
from tl_devicefix.multihost.transport import HostLost, Transport
from tl_devicefix.simulation.machine import Machine
from tl_devicefix.simulation.session import devices_of

_log = logging.getLogger(__name__)
_ENDING = 8.0
"""Seconds that rank 0 waits at its end, until the others have ended."""
_SHORTEST_TIMEOUT = 2.0
"""Seconds; a busy machine may have no time for a sign of life for one."""
_joined: Ranks | None = None
_for_good = ExitStack()


def init_hosts(
    master: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    n_devices: int | None = None,
    memory: int | str | None = None,
    timeout: float = 15.0,
    wait: float = 600.0,
    whole_blocks: bool = True,
) -> None:
    """Have the devices of all ranks in this process, if it is rank 0; lend them to it otherwise.

    On rank 0 it returns, and the script goes on with the devices of all ranks. On any other rank it
    does not: the process lends its devices until rank 0 ends, and ends then. Without a launcher
    (torchrun, srun, or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) it does
    nothing.

    Args:
        master: where rank 0 listens, "host:port"; by default as the launcher says.
        rank: which one this is; by default as the launcher says.
        world_size: how many ranks there are; by default as the launcher says.
        n_devices: how many devices this rank lends, at most its equal part of those that torch sees
            on its host; by default that part, or the CPU. On the CPU there may be several.
        memory: what each of them may hold; by default what is free, of a CPU's memory an equal part
            of that.
        timeout: seconds within which it is known that a rank is lost; that of rank 0 holds for all.
        wait: seconds that ranks wait for each other at first.
        whole_blocks: whether a rank runs a block by itself where it can, which is quicker. False,
            on rank 0, has it told each operation: for functions that you have changed where this
            package does not notice it.

    Raises:
        RuntimeError: if ranks have other versions of what blocks are made of (torch, transformers,
            TransformerLens, this package, numpy, einops, Python), or no token or another one, or
            one does not come; or they are joined, and one is lost.
        ValueError: if there are not so many devices, or two ranks would have the same one; or a
            launcher has not said where ranks meet.
    """
    global _joined
    if world_size is None:
        if (master, rank) != (None, None) and "WORLD_SIZE" not in os.environ:
            raise ValueError(
                "init_hosts() needs world_size too, the number of ranks: call "
                'init_hosts(master="host:port", rank=..., world_size=...)'
            )
        world_size = int(os.environ.get("WORLD_SIZE", 1))
    if _joined is not None:
        _joined.raise_if_lost()
        return
    if world_size < 2:
        return
    if master is None:
        master = f"{_launched('MASTER_ADDR')}:{_launched('MASTER_PORT')}"
    rank = int(_launched("RANK")) if rank is None else rank
    ranks = meet(master, rank, world_size, n_devices, memory, timeout, wait)
    _for_good.enter_context(ranks.entered(whole_blocks=whole_blocks))
    _joined = ranks


def _launched(name: str) -> str:
    """What a launcher says."""
    if name not in os.environ:
        raise ValueError(
            f"init_hosts() needs {name}, which is not set: launch with torchrun, set it, or call "
            'init_hosts(master="host:port", rank=..., world_size=...)'
        )
    return os.environ[name]


class Ranks:
    """All ranks, as rank 0 knows them.

    Attributes:
        places: where their devices are.
        peers: the other ones.
    """

    def __init__(self, hellos: list[dict[str, Any]], transport: Transport, store: Any) -> None:
        self.places = places(hellos)
        self._transport, self._losing = transport, threading.Lock()
        self._store = store  # lives on, as others may still read it
        self.peers = {
            rank: Peer(rank, called(hellos, rank), transport, self.lose)
            for rank in range(1, len(hellos))
        }
        for peer in self.peers.values():
            peer.begin()
        transport.watch(self.lose, hellos[0]["timeout"])
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._be_forked)

    @contextmanager
    def entered(
        self, chosen: list[Place] | None = None, whole_blocks: bool = True
    ) -> Iterator[Machine]:
        """Have their devices, or those of these places."""
        far = FarDevices(chosen or self.places, self.peers)
        far.run_block = functools.partial(run_by_command, far) if whole_blocks else None
        memory = [place.memory for place in far.places]
        with devices_of(far, memory, sites_of(far.places)) as machine:
            yield machine

    def raise_if_lost(self) -> None:
        """Raise if one is lost, as a process joins once."""
        for peer in self.peers.values():
            if peer.lost is not None:
                raise HostLost(
                    f"{peer.lost}; a process joins once: restart this one, or the kernel, "
                    "and all ranks with it",
                    peer.lost.rank,
                )

    def lose(self, rank: int | None, why: str) -> None:
        """Give up: whoever waits for any rank is told which one is lost, and all others end."""
        assert rank is not None  # rank 0 says itself which one is lost
        if self._transport.has_ended or not self._losing.acquire(blocking=False):
            return  # others end by this, and are not what is lost
        error = HostLost(f"{self.peers[rank].name}{held_by(rank)} is lost: {why}", rank)
        for peer in self.peers.values():
            peer.lost = error
        self._transport.tell_loss(str(error))
        for peer in self.peers.values():
            peer.give_up()

    def _be_forked(self) -> None:
        """In a process that was forked: connections and threads are its parent's."""
        atexit.unregister(self._leave)
        self._transport.close()
        for peer in self.peers.values():
            peer.lost = peer.lost or HostLost(
                f"this process was forked from rank 0, and has no connection to {peer.name}: start "
                'processes by "spawn", and give them what is at home, as by .cpu()',
                peer.rank,
            )

    def _leave(self) -> None:
        self._transport.has_ended = True
        for peer in self.peers.values():
            peer.end()
        until = time.monotonic() + _ENDING
        for peer in self.peers.values():
            peer.rest(until)


def meet(
    master: str,
    rank: int,
    world_size: int,
    n_devices: int | None = None,
    memory: int | str | None = None,
    timeout: float = 15.0,
    wait: float = 600.0,
    ignore_interrupts: bool = True,
    tell: Callable[[str], None] = _log.info,
) -> Ranks:
    """Wait for all ranks. On rank 0 it returns; on the others, the process lends its devices.

    While it lends, it ignores interrupts, as one of a terminal is for rank 0 to decide; or one ends
    it. It tells what it waits for, what it lends, and why it ends, a sentence each.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to {world_size - 1}, but is {rank}")
    if timeout < _SHORTEST_TIMEOUT:
        raise ValueError(
            f"timeout must be {_SHORTEST_TIMEOUT:g} seconds or more, but is {timeout:g}"
        )
    own = hello(visible_devices(n_devices), n_devices, memory, timeout)
    rendezvous = Rendezvous(master, rank, world_size, wait, tell, signer())
    try:
        hellos = rendezvous.meet(own)
        if rank and not ignore_interrupts:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        devices = _share(hellos, rank, rendezvous)
        transport = rendezvous.connect(hellos)
    except BaseException:  # an interrupt too
        rendezvous.leave()
        raise
    if not rank:
        return Ranks(hellos, transport, rendezvous.store)
    if ignore_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell(lending(hellos, rank))
    _lend(called(hellos, rank), devices, transport, hellos[0]["timeout"], tell)


def _share(hellos: list[dict[str, Any]], rank: int, rendezvous: Rendezvous) -> list[torch.device]:
    """Find out which devices this rank has; note all ranks' devices and memory in their hellos."""
    wrong = other_versions(hellos)
    if wrong is not None:
        rendezvous.refuse(RuntimeError(wrong))
    try:
        names = shared(hellos)
    except ValueError as error:
        rendezvous.refuse(error)
    devices = [torch.device(name) for name in names[rank]]
    memory = rendezvous.gathered("memory", lambda: free_memory(devices, hellos, rank))
    for greeting, *columns in zip(hellos, names, memory):
        greeting["devices"] = list(zip(*columns))
    return devices


def _lend(
    name: str,
    devices: list[torch.device],
    transport: Transport,
    timeout: float,
    tell: Callable[[str], None],
) -> NoReturn:
    """Lend devices until rank 0 ends, and end then: with 1 if rank 0 was lost, or lost a rank."""

    def lose(rank: int | None, why: str) -> None:
        lost = "" if rank is None else f"rank {rank} is lost: "
        print(f"{name} ends: {lost}{why}", file=sys.stderr)
        _end(1)

    transport.watch(lose, timeout)
    try:
        Worker(name, devices, transport).lend()
    except HostLost as error:
        time.sleep(timeout)  # this process ends meanwhile, as rank 0 names the rank, or is lost
        lose(error.rank, str(error))
    transport.has_ended = True
    tell(f"{name} ends: rank 0 is done")
    _end(0)


def _end(status: int) -> NoReturn:
    """End the process, whatever its main thread computes; what is to be written is flushed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
