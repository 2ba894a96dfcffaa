"""A line between two networks, on which what is sent takes its time, and some of it is lost.

That is what netem does, which not every kernel has. Here each end is a TUN device: what a host
sends by it is read by this process, which hands it to the other one later, or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from random import Random

_SET_UP = 0x400454CA
"""TUNSETIFF."""
_AS_IP = 0x1001
"""IFF_TUN | IFF_NO_PI: packets of IP, and nothing before them."""
_LONGEST = 1 << 16
"""Bytes of a packet."""


class TunDevice:
    """A network device whose other side is a file.

    Attributes:
        name: what the kernel calls it.
        file: gives what is sent by the device, and takes what it receives, a packet at a time;
            wherever the device is moved to.
    """

    def __init__(self) -> None:
        self.file = os.open("/dev/net/tun", os.O_RDWR)
        asked = struct.pack("16sH22x", b"line%d", _AS_IP)
        self.name = fcntl.ioctl(self.file, _SET_UP, asked)[:16].rstrip(b"\0").decode()


class SlowLine:
    """Carries packets from each of two files to the other one.

    Args:
        files: of the devices at its ends.
        seed: of which packets are lost.

    Attributes:
        delay: seconds that a packet takes; may be changed at any time, as may `loss`.
        loss: which part of all packets never arrives.
        n_lost: how many did not.
    """

    def __init__(self, files: tuple[int, int], seed: int = 0) -> None:
        self.delay = self.loss = 0.0
        self.n_lost = 0
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._carry, args=(*ends, Random(seed)), daemon=True)
            for ends in (files, files[::-1])
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Carry nothing any more."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _carry(self, source: int, target: int, random: Random) -> None:
        under_way: deque[tuple[float, bytes]] = deque()
        while not self._is_over.is_set():
            left = under_way[0][0] - time.monotonic() if under_way else 1.0
            if select.select([source], [], [], min(max(left, 0), 0.1))[0]:
                packet = os.read(source, _LONGEST)
                if random.random() < self.loss:
                    self.n_lost += 1
                else:
                    under_way.append((time.monotonic() + self.delay, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # the device at the other end is not up
                    os.write(target, under_way.popleft()[1])
