"""What is launched on several ranks; one that is lost is named to whoever waits, and none stays."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from launching import WITHIN, Launch, Launched
from ranks import free_port

OF_LAUNCHER = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Ranks meet at a store that is not rank 0's."""


def store_of_a_launcher(launch: Launch) -> Launched:
    """Where ranks with `OF_LAUNCHER` meet."""
    store = launch("be_store", 1)
    assert store.says() == ["ready", store.port]
    return store


def wait_for(key: str, port: int) -> None:
    """Until ranks have said so in the store where they meet."""
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.PrefixStore("tl_devicefix 0", store).wait([key])


WHERE = ["in_load", "in_backward", "idle"]


@pytest.mark.parametrize("where", WHERE)
def test_a_rank_that_is_killed(where: str, launch: Launch) -> None:
    launched = launch(where)
    launched.until_ready()

    launched.signal(1, signal.SIGKILL)

    if where == "idle":  # rank 0 asks nobody, and waits for nobody
        assert launched.ends(2) == [1]
    since = launched.go_on()
    if where == "idle":
        assert "a process joins once: restart this one" in launched.says()[1]
    error = launched.error(since)
    assert error.startswith("HostLost: rank 1 (host1/cpu:0, on ")
    assert re.search(r"\), which holds blocks\.\d-\d, is lost: ", error)
    assert set(launched.ends()) == {3, 1, -signal.SIGKILL} - ({1} if where == "idle" else set())


def test_ranks_that_say_nothing(launch: Launch) -> None:
    """Rank 1, rank 0 of a worker, and all ranks for a while, at the same time."""
    without_1, paused, without_0 = (
        launch("for_ever"),
        launch("in_forward"),
        launch("for_ever", 2, started=[0]),
    )
    at = ["--master", f"127.0.0.1:{without_0.port}", "--rank", "1", "--world-size", "2"]
    worker = launch("", 2, started=[1], command=["-m", "tl_devicefix", "worker", *at])
    for launched in (paused, without_1, without_0):
        launched.until_ready()

    without_0.signal(0, signal.SIGSTOP)
    for rank in paused.pids:
        paused.signal(rank, signal.SIGSTOP)
    error = without_1.error(since=without_1.signal(1, signal.SIGSTOP))

    assert re.search(r"holds blocks\.\d-\d, is lost: it gave no sign of life for 3 s$", error)
    assert without_1.ends(0, 2) == [3, 1]
    assert "ends: rank 1 (" in without_1.text("stderr", 2)
    assert worker.ends() == [1]
    assert " for 3 s\n" in worker.text("stderr", 1)
    time.sleep(0.5)  # all have stood still for longer than a lost rank is given
    for rank in paused.pids:
        paused.signal(rank, signal.SIGCONT)
    paused.go_on()
    assert paused.ends() == [0, 0, 0]


def test_rank_0_killed_and_started_again(launch: Launch) -> None:
    launched = launch("for_ever")
    launched.until_ready()

    launched.signal(0, signal.SIGKILL)

    assert launched.ends() == [-signal.SIGKILL, 1, 1]
    assert "ends: rank 0 is lost: " in launched.text("stderr", 1)
    assert launch("forwards", 2, port=launched.port).ends() == [0, 0]


def test_a_process_that_rank_0_forks(launch: Launch) -> None:
    launched = launch("forked")
    launched.until_ready()

    error = launched.error(since=time.time())
    assert error.startswith("HostLost: this process was forked from rank 0, and has no connection")
    assert launched.says() == ["the child ends", 3]
    assert launched.says() == ["the same", True]
    assert launched.ends() == [0, 0, 0]


def test_a_launcher_whose_store_ends_once_all_have_met(launch: Launch) -> None:
    store = store_of_a_launcher(launch)
    launched = launch("in_forward", port=store.port, environment=OF_LAUNCHER)
    launched.until_ready()

    store.signal(0, signal.SIGKILL)

    launched.go_on()
    assert launched.ends() == [0, 0, 0]


def test_an_interrupt_of_all(launch: Launch) -> None:
    launched = launch("in_backward")
    launched.until_ready()

    for rank in launched.pids:  # as a terminal does
        launched.signal(rank, signal.SIGINT)

    assert launched.says()[1] == "KeyboardInterrupt"
    assert launched.ends() == [3, 0, 0]


def test_a_rank_without_memory(launch: Launch) -> None:
    launched = launch("without_memory")
    launched.until_ready()
    pid = launched.pids[1]
    in_use = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (in_use + (20 << 20),) * 2)

    launched.go_on()

    kind, error = launched.says()
    assert kind == "OutOfMemoryError"
    assert "on rank 1 (" in error
    assert re.search(r"\), which holds blocks\.\d-\d$", error)
    assert launched.says() == ["the same", True]
    assert launched.ends() == [0, 0, 0]


def test_another_version_on_one_rank(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "tl_devicefix-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: tl_devicefix\nVersion: 9.9\n"
    (tmp_path / "tl_devicefix-9.9.dist-info" / "METADATA").write_text(metadata)

    launched = launch("forwards", of_rank={1: {"PYTHONPATH": str(tmp_path)}})

    assert launched.ends() == [3, 3, 3]
    for rank in range(3):
        text = launched.text("said", rank)
        assert "has tl_devicefix 9.9, and rank 0 (" in text
        assert "install the same on both" in text


def test_another_token_on_one_rank(launch: Launch) -> None:
    launched = launch(
        "forwards", 2, of_rank={1: {"TL_DEVICEFIX_TOKEN": "another that is long enough"}}
    )

    assert launched.ends() == [3, 3]
    for rank in range(2):
        text = launched.text("said", rank)
        assert f"rank {1 - rank} has another token than rank {rank}, which has that of TL_" in text
        assert "set TL_DEVICEFIX_TOKEN to the same on all ranks, as `openssl" in text
        assert "long enough" not in text + launched.text("stderr", rank)


def test_ranks_that_never_come(launch: Launch) -> None:
    alone = launch("forwards", started=[1], wait=1)
    store = store_of_a_launcher(launch)
    options = {"port": store.port, "environment": OF_LAUNCHER}
    rank_1 = launch("forwards", started=[1], **options)
    wait_for("hello 1", store.port)

    rank_0 = launch("forwards", started=[0], wait=1, **options)

    assert rank_0.ends() == [3]
    assert "rank 2 of 3 did not come to 127.0.0.1:" in rank_0.text("said", 0)
    assert "within 1 s" in rank_0.text("said", 0)
    store.signal(0, signal.SIGKILL)
    assert rank_1.ends() == [3]
    assert "rank 0 ended before all 3 ranks had come to 127.0.0.1:" in rank_1.text("said", 1)
    assert alone.ends() == [3]
    assert "rank 0 did not come to 127.0.0.1:" in alone.text("said", 1)


def test_joining_again_after_nobody_came_and_after_an_interrupt(launch: Launch) -> None:
    launched = launch("joined_again", 2, started=[0])
    launched.until_ready()
    assert "rank 1 of 2 did not come to 127.0.0.1:" in launched.error(since=time.time())
    launched.until_ready()
    wait_for("hello 0", launched.port)

    when = launched.signal(0, signal.SIGINT)

    interrupted, kind, _ = launched.says()
    assert (kind, interrupted - when < WITHIN) == ("KeyboardInterrupt", True)
    launched.until_ready()
    assert launch("joined_again", 2, started=[1], port=launched.port).ends() == [0]
    assert launched.ends() == [0]


def test_what_a_lender_says(launch: Launch) -> None:
    port = free_port()
    at = ["--master", f"127.0.0.1:{port}", "--world-size", "3", "--memory", "2GiB"]
    lend = ["-m", "tl_devicefix", "worker", "--rank", "1", *at]
    interrupted = launch("", 3, started=[1], command=lend)
    sentence = f"rank 1 of 3 waits for rank 0 at 127.0.0.1:{port}\n"
    interrupted.until_it_says(sentence, 1)
    rank_0 = launch("forwards", 3, started=[0], port=port)
    waiting = f"rank 1 of 3 waits at 127.0.0.1:{port} for rank 2\n"
    interrupted.until_it_says(waiting, 1)
    interrupted.signal(1, signal.SIGINT)
    assert interrupted.ends() == [-signal.SIGINT]  # as a loop of the shell ends by
    assert interrupted.text("said", 1) == f"{sentence}{waiting}rank 1 ends: it was interrupted\n"

    lending = launch("", 3, started=[1], command=lend)  # in its place
    others = launch("forwards", 3, started=[2], port=port)

    assert [*rank_0.ends(), *lending.ends(), *others.ends()] == [0, 0, 0]
    host = socket.gethostname()
    *_, lends, ends = lending.text("said", 1).splitlines()
    assert lends == (
        f"rank 1 (host1/cpu:0, on {host}) lends its device, with 2.00 GiB, to "
        f"rank 0 (host0/cpu:0, on {host}) until that ends"
    )
    assert ends == f"rank 1 (host1/cpu:0, on {host}) ends: rank 0 is done"


def test_another_number_of_ranks_and_two_processes_of_one_rank(launch: Launch) -> None:
    launched = launch("forwards", started=[0, 1])
    for rank in range(2):  # the first to come is right
        wait_for(f"is here {rank}", launched.port)

    second = launch("forwards", started=[1], port=launched.port)
    of_two = launch("forwards", 2, started=[1], port=launched.port)

    assert second.ends() == of_two.ends() == [3]
    assert "another process came to 127.0.0.1:" in second.text("said", 1)
    numbers = "as one of 2 ranks, but the first rank to come said 3: give all the same world_size"
    assert numbers in of_two.text("said", 1)
    last = launch("forwards", started=[2], port=launched.port)
    assert [*launched.ends(), *last.ends()] == [0, 0, 0]


def test_the_selfcheck(launch: Launch) -> None:
    launched = launch("selfcheck", 2, command=["-m", "tl_devicefix", "selfcheck"])

    assert launched.ends() == [0, 0]
    text = launched.text("said", 0)
    assert (
        "the same versions on all ranks, which have 2 devices:\nsim:0  host0/cpu:0, of rank 0, "
        in text
    )
    for pair in ("cpu -> sim:1", "sim:0 -> sim:1", "sim:1 -> sim:0", "sim:1 -> cpu"):
        assert f"copy {pair}: ok" in text
    assert "parity on sim:0, sim:1: ok" in text
    assert "can be trusted" in text
    assert launched.text("said", 1) == ""


def test_process_groups_of_the_user_s(launch: Launch) -> None:
    launched = launch("beside_a_group", 2)

    assert launched.says() == [1]
    assert launched.ends() == [0, 0]


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, with a cable between them."""
    networks = [f"rank{rank}-{os.getpid()}" for rank in range(2)]
    try:
        for name in networks:
            ip("netns", "add", name)
        cables = "add", "cable0", "netns", networks[0], "type", "veth", "peer", "name", "cable1"
        ip("link", *cables, "netns", networks[1])
        for rank, name in enumerate(networks):
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"cable{rank}")
            for link in (f"cable{rank}", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield networks
    finally:
        for name in networks:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root, and ip"
)
def test_a_host_that_is_cut_off(two_hosts: list[str], launch: Launch) -> None:
    of_rank = {
        rank: {"NETWORK": name, "MASTER_ADDR": "10.77.0.1"} for rank, name in enumerate(two_hosts)
    }
    launched = launch("for_ever", 2, timeout=3, of_rank=of_rank)
    launched.until_ready()

    ip("-n", two_hosts[1], "link", "set", "cable1", "down")

    error = launched.error(since=time.time())
    assert re.search(r", which holds blocks\.\d-7, is lost: it gave no sign of life", error)
    assert launched.ends() == [3, 1]
