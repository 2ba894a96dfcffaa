"""A rank that is lost is named to whoever waits, and no process stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from ranks import free_port

FOREVER = 100_000
SCRIPT = Path(__file__).with_name("a_script.py")


class Launched:
    """The script on several ranks, as a launcher starts it.

    Args:
        world_size: how many ranks.
        n_forwards: how long it goes on.
        hosts: network namespaces that ranks are in, and the address of the first; by default all
            are on this host.
    """

    def __init__(
        self, world_size: int, n_forwards: int, hosts: tuple[list[str], str] | None = None
    ) -> None:
        address = hosts[1] if hosts else "127.0.0.1"
        launcher = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
        launcher |= {"WORLD_SIZE": str(world_size), "SECONDS_TO_LOSE": "4", "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [
                    *(["ip", "netns", "exec", hosts[0][rank]] if hosts else []),
                    *(sys.executable, str(SCRIPT), str(n_forwards)),
                ],
                env={**os.environ, **launcher, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else None,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world_size)
        ]

    @property
    def said(self) -> IO[str]:
        assert self.ranks[0].stdout is not None
        return self.ranks[0].stdout

    def wait_until_ready(self) -> None:
        assert any(line == "ready\n" for line in self.said)

    def kill(self) -> None:
        for each in self.ranks:
            each.kill()
            each.wait()

    def ends(self, but: int | None = None) -> list[int]:
        """With what each rank ends, within half a minute."""
        until = time.monotonic() + 30
        waited = (each for rank, each in enumerate(self.ranks) if rank != but)
        return [each.wait(until - time.monotonic()) for each in waited]


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[Launched]:
    found = Launched(*request.param)
    yield found
    found.kill()


OTHERS = pytest.mark.full(reason="it starts processes; by default, one that is killed")


@OTHERS
@pytest.mark.parametrize("launched", [(2, 3)], indirect=True)
def test_a_script_that_ends_well(launched: Launched) -> None:
    assert launched.ends() == [0, 0]


@pytest.mark.parametrize("launched", [(3, FOREVER)], indirect=True)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "Connection"),
        # As of a host that is cut off.
        pytest.param(signal.SIGSTOP, "it gave no sign of life for 4 s", marks=OTHERS),
    ],
)
def test_a_rank_that_lends(how: signal.Signals, why: str, launched: Launched) -> None:
    launched.wait_until_ready()

    launched.ranks[1].send_signal(how)

    at = time.time()
    when, _, error = launched.said.readline().partition(" ")
    assert error.startswith("RankLost: rank 1 (")
    assert f"is lost: {why}" in error
    assert float(when) - at < 15
    assert launched.ends(but=1) == [3, 1]


@OTHERS
@pytest.mark.parametrize("launched", [(3, FOREVER)], indirect=True)
def test_rank_0(launched: Launched) -> None:
    launched.wait_until_ready()

    launched.ranks[0].kill()

    assert launched.ends() == [-signal.SIGKILL, 1, 1]


@OTHERS
@pytest.mark.parametrize("launched", [(2, FOREVER)], indirect=True)
def test_an_interrupt_of_all(launched: Launched) -> None:
    launched.wait_until_ready()

    for each in launched.ranks:  # as a terminal does
        each.send_signal(signal.SIGINT)

    assert launched.ends() == [3, 0]


@pytest.fixture
def two_hosts() -> Iterator[tuple[list[str], str]]:
    """Two network namespaces with a cable between them."""
    names = [f"rank{rank}-{os.getpid()}" for rank in range(2)]

    def run(*command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True)

    for name in names:
        run("netns", "add", name)
    try:
        run("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1",
            "netns", names[1])  # fmt: skip
        for rank, name in enumerate(names):
            run("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"cable{rank}")
            for link in (f"cable{rank}", "lo"):
                run("-n", name, "link", "set", link, "up")
        yield names, "10.77.0.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@OTHERS
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root, and ip"
)
def test_a_host_that_is_cut_off(two_hosts: tuple[list[str], str]) -> None:
    launched = Launched(2, FOREVER, two_hosts)
    try:
        launched.wait_until_ready()
        unplug = ["ip", "-n", two_hosts[0][1], "link", "set", "cable1", "down"]
        subprocess.run(unplug, check=True)
        at = time.time()
        when, _, error = launched.said.readline().partition(" ")

        assert "is lost: it gave no sign of life for 4 s" in error
        assert float(when) - at < 15
        assert launched.ends() == [3, 1]
    finally:
        launched.kill()
