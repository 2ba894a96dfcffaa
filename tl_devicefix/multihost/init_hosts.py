"""How ranks find each other: `init_hosts`, after which the script runs on rank 0 alone."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from tl_devicefix.multihost.blocks import run_by_command
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.handshake import (
    Place,
    called,
    free_memory,
    hello,
    lending,
    other_versions,
    places,
    shared,
    sites_of,
    visible_devices,
)
from tl_devicefix.multihost.models import held_by
from tl_devicefix.multihost.peers import HostLost, Peer, Wire
from tl_devicefix.multihost.rendezvous import SHORTEST_TIMEOUT, Watch, within
from tl_devicefix.multihost.rpc_worker import Lender
from tl_devicefix.multihost.transport import Connection, said_by_gloo, signer
from tl_devicefix.simulation.machine import Machine
from tl_devicefix.simulation.session import devices_of

_log = logging.getLogger(__name__)
_ENDING = 8.0
"""Seconds that rank 0 waits at its end, for what is on its way to the others."""
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
        n_devices: how many devices this rank has; by default all that torch sees, of which ranks
            on one host have equal parts, or the CPU. On the CPU there may be several.
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
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
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
            f"several ranks are to join, but {name} is not set: launch with torchrun, set it, or "
            'give init_hosts(master="host:port", rank=..., world_size=...)'
        )
    return os.environ[name]


class Ranks:
    """All ranks, as rank 0 knows them.

    Attributes:
        places: where their devices are.
        peers: the other ones.
    """

    def __init__(self, everyone: list[dict[str, Any]], watch: Watch, by: Connection) -> None:
        self.places = places(everyone)
        self._watch, self._losing = watch, threading.Lock()
        self._timeout = everyone[0]["timeout"]
        self.peers = {
            rank: Peer(rank, called(everyone, rank), by, functools.partial(self.lose, rank))
            for rank in range(1, len(everyone))
        }

    def begin(self) -> None:
        """Speak with them, and watch over them, from now on."""
        for peer in self.peers.values():
            peer.begin()
        self._watch.begin(list(self.peers), self.lose, self._timeout)
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._be_forked)

    @contextmanager
    def entered(
        self, chosen: list[Place] | None = None, whole_blocks: bool = True
    ) -> Iterator[Machine]:
        """Have their devices, or those of these places."""
        far = FarDevices(chosen or self.places, self.peers)
        far.run_module = functools.partial(run_by_command, far) if whole_blocks else None
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
        assert rank is not None  # rank 0 says itself when it is over
        if rank and not self._watch.has_store():  # without it, the others have ended
            rank, why = 0, self._watch.no_store
        if not self._losing.acquire(blocking=False):
            return  # others end by this, and are not what is lost
        who = f"{self.peers[rank].name}{held_by(rank)} is" if rank else "all ranks are"
        error = HostLost(f"{who} lost: {why}", rank)
        self._watch.tell_all(str(error))
        for peer in self.peers.values():  # first, as who is told may end this process at once
            peer.lost = error
        for peer in self.peers.values():
            peer.give_up()

    def _be_forked(self) -> None:
        """In a process that was forked: connections and threads are its parent's."""
        atexit.unregister(self._leave)
        for peer in self.peers.values():
            peer.lost = peer.lost or HostLost(
                f"this process was forked from rank 0, and has no connection to {peer.name}: start "
                'processes by "spawn", and give them what is at home, as by .cpu()',
                peer.rank,
            )

    def _leave(self) -> None:
        self._watch.end()
        for peer in self.peers.values():
            peer.end()
        until = time.monotonic() + _ENDING
        for peer in self.peers.values():
            peer.rest(until)
        self._watch.rest()


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
        raise ValueError(f"rank {rank} is none of {world_size} ranks: they are numbered from 0 on")
    if timeout < SHORTEST_TIMEOUT:
        raise ValueError(f"timeout={timeout:g}: give {SHORTEST_TIMEOUT:g} seconds or more")
    said = hello(visible_devices(n_devices), n_devices, memory, timeout)
    watch = Watch(master, rank, world_size, wait, tell, signer())
    try:
        watch.agree()
        everyone = watch.meet(said)
        if rank and not ignore_interrupts:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        devices = _share(everyone, rank, watch)
        with _by_interface_to(master):
            group = _connect(watch, rank, world_size)
        by = Connection(watch.store, group, watch.signer.of_session(everyone))
        speaks = watch.asked(lambda: Wire(rank, by) if rank else Ranks(everyone, watch, by))
        watch.wait_until_connected()
    except BaseException:  # an interrupt too
        watch.leave()
        raise
    if isinstance(speaks, Ranks):
        speaks.begin()
        return speaks
    if ignore_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell(lending(everyone, rank))
    _lend(speaks, called(everyone, rank), devices, watch, everyone[0]["timeout"], tell)


def _share(everyone: list[dict[str, Any]], rank: int, watch: Watch) -> list[torch.device]:
    """Find out which devices this rank has, and tell everyone's what they may hold."""
    wrong = other_versions(everyone)
    if wrong is not None:
        watch.refuse(RuntimeError(wrong))
    try:
        names = shared(everyone)
    except ValueError as error:
        watch.refuse(error)
    devices = [torch.device(name) for name in names[rank]]
    memory = watch.gathered("memory", _free(devices, everyone, rank))
    for other, found in enumerate(memory):
        if isinstance(found, str):
            who = f"rank {other} ({everyone[other]['host']})"
            watch.refuse(RuntimeError(f"{who} cannot tell how much memory is free: {found}"))
    for each, *its in zip(everyone, names, memory):
        each["devices"] = list(zip(*its))
    return devices


def _free(
    devices: list[torch.device], everyone: list[dict[str, Any]], rank: int
) -> list[int] | str:
    """Bytes that each of a rank's devices may hold, or why that is not known."""
    try:
        return free_memory(devices, everyone, rank)
    except RuntimeError as error:  # of a GPU that others have filled; all wait for this rank
        return str(error).split("\n")[0]


def _connect(watch: Watch, rank: int, world_size: int) -> dist.ProcessGroupGloo:
    """Have gloo connect each rank with each, in a group beside torch's default one."""
    store = dist.PrefixStore("gloo", watch.store)
    try:
        group = within(watch.patience, dist.ProcessGroupGloo, store, rank, world_size, watch.wait)
    except RuntimeError as error:
        raise RuntimeError(
            f"not every rank can reach each other one ({said_by_gloo(error)}): see that no "
            "firewall is between their hosts, and that GLOO_SOCKET_IFNAME, if it is set, is the "
            "network that they have in common"
        ) from None
    # Python must not take it down as it ends: threads that wait within would abort the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


@contextmanager
def _by_interface_to(master: str) -> Iterator[None]:
    """Have gloo use the network by which rank 0 is reached; by itself, it asks for the hostname."""
    name = "GLOO_SOCKET_IFNAME"
    found = None if name in os.environ else _interface_to(master)
    if found is not None:
        os.environ[name] = found
    try:
        yield
    finally:
        if found is not None:
            del os.environ[name]  # processes that are started later may be of other ranks


def _interface_to(master: str) -> str | None:
    address, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, int(port)))  # sends nothing
        except OSError:  # no IPv4
            return None
        own = asked.getsockname()[0]
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(each.address == own for each in addresses)
        ),
        None,
    )


def _lend(
    wire: Wire,
    name: str,
    devices: list[torch.device],
    watch: Watch,
    timeout: float,
    tell: Callable[[str], None],
) -> NoReturn:
    """Lend devices until rank 0 ends, and end then: with 1 if that was no good end."""

    def lose(other: int | None, why: str) -> None:
        lost = "" if other is None else f"rank {other} is lost: "
        print(f"{name} ends: {lost}{why}", file=sys.stderr)
        _end(1)

    watch.begin([0], lose, timeout)
    wire.begin(functools.partial(lose, 0))
    try:
        Lender(name, devices, wire).lend()
    except HostLost as error:
        time.sleep(timeout)  # rank 0 is to name that rank, and not this one: it ends this
        lose(None, str(error))
    except Exception as error:  # noqa: BLE001  # gloo's, mostly; rank 0 sees the connection closed
        watch.end()
        lose(0, said_by_gloo(error))
    watch.end()
    tell(f"{name} ends: rank 0 is done")
    _end(0)


def _end(status: int) -> NoReturn:
    """End the process, whatever its other threads wait for.

    Only `os._exit` does so: threads that wait within gloo, or the store, of a host that is cut off
    hear of no exception, and Python's own end would wait for them, or abort in their C++. What is
    to be written by then is flushed here.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
