"""A Ray cluster of two nodes on this machine, for one session, with a token."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

WITHIN = 120.0
"""Seconds for what takes a few on a quiet machine."""
os.environ |= {  # Ray reads its token when it is imported, here as in the nodes
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as 15, the default, starves workers beside other tests
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
SMALL = ["--num-cpus=0", "--num-gpus=0", "--object-store-memory=80000000"]
QUIET = ["--include-log-monitor=false", "--disable-usage-stats", "--block"]
_NETWORK = socket.getaddrinfo, socket.socket.connect
"""As they are before other tests refuse what asks the network."""


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """Let Ray find out which addresses this machine has."""
    monkeypatch.setattr(socket, "getaddrinfo", _NETWORK[0])
    monkeypatch.setattr(socket.socket, "connect", _NETWORK[1])


class Node:
    """A node, whose processes are children of one that this process has started."""

    def __init__(self, *options):
        self._directory = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # a short path
        log = Path(self._directory.name, "log")
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *SMALL, *QUIET]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [*start, f"--temp-dir={self._directory.name}"],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + WITHIN
        while "Ray runtime started" not in (said := log.read_text()):
            if self._process.poll() is not None or time.monotonic() > until:
                self.end()
                raise RuntimeError(f"the node does not start:\n{said}")
            time.sleep(0.1)

    def processes(self, name):
        """Processes of the node of which the command line begins so."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if name in " ".join(process.cmdline()[:1]):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def is_running(self):
        return self._process.poll() is None and bool(self.processes("raylet/raylet"))

    def workers(self):
        return self.processes("ray::WorkerActor")

    def end(self):
        if self._process.poll() is None:
            processes = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for process in processes:
                if process.is_running():
                    process.kill()
        self._process.wait()
        self._directory.cleanup()


class Cluster:
    """A head at `address`, where this process is at home, and `other`, another node."""

    def __init__(self):
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        self._nodes = [Node("--head", f"--port={port}", "--include-dashboard=false")]

    def add_node(self):
        """Start the other node, as two at once might not start in time."""
        self.other = Node(f"--address={self.address}")
        self._nodes.append(self.other)

    def end(self):
        for node in reversed(self._nodes):
            node.end()


@pytest.fixture(scope="session")
def cluster():
    """The cluster of this session; this process is not connected to it yet."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    cluster = Cluster()
    try:
        cluster.add_node()
        yield cluster
    finally:
        cluster.end()


def _free_port():
    """One that Ray's workers do not take, which have 10002 to 19999."""
    for port in range(20100, 20200):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("ports 20100 to 20199 are all in use")
