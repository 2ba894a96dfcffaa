"""A cluster of two nodes: a model over both, and each fault, which is told in a sentence."""

import os
import re
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import tl_devicefix
from tl_devicefix.multihost.hosts import HostLost, joined_hosts
from tl_devicefix.multihost.init_hosts import leave_hosts

pytestmark = pytest.mark.once

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

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")


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
                self.close()
                raise RuntimeError(f"the node does not start:\n{said}")
            time.sleep(0.1)

    def workers(self):
        """The processes of workers, by their command lines."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if "ray::WorkerActor" in " ".join(process.cmdline()[:1]):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def close(self):
        if self._process.poll() is None:
            processes = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for process in processes:
                if process.is_running():
                    process.kill()
        self._process.wait()
        self._directory.cleanup()


def _free_port():
    """One that Ray's workers do not take, which have 10002 to 19999."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture(scope="module")
def cluster():
    """A head at `address`, where this process is at home, and `other`, a node that a test ends."""
    port = _free_port()
    address = f"127.0.0.1:{port}"
    head = Node("--head", f"--port={port}", "--include-dashboard=false")
    # One after the other: two at once might not start in time.
    with closing(head), closing(Node(f"--address={address}")) as other:
        yield SimpleNamespace(address=address, other=other)


@pytest.fixture(scope="module")
def leaving():
    yield
    leave_hosts()
    ray.shutdown()


@pytest.fixture
def worker(cluster, leaving):
    """The other node, whose worker has been started anew if it was lost."""
    tl_devicefix.init_hosts(cluster.address)
    return joined_hosts()[0]


def eventually(holds):
    until = time.monotonic() + WITHIN
    while not holds() and time.monotonic() < until:
        time.sleep(0.1)
    return bool(holds())


def asking(worker):
    """A thread that asks until an error is raised; a function checks that it is told of a loss."""
    errors = []

    def ask():
        try:
            while True:
                worker.call("free_memory", 0)
        except HostLost as error:
            errors.append(error)

    def is_told():
        asks.join(WITHIN)
        assert str(errors[0]).startswith("host1 is lost: its process or its node ended; call tl_")

    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    return is_told


def load(checkpoints, **elsewhere):
    """A model with block 2 on the other node; or all of it here."""
    from transformer_lens import HookedTransformer

    device_map = {"": "cpu", **(elsewhere or {"blocks.2": "host1/cpu"})}
    return HookedTransformer.from_pretrained(str(checkpoints("llama")), device_map=device_map)


@pytest.mark.full("it starts another worker, which takes ten seconds")
def test_workers_that_do_not_start_in_time_end(cluster, leaving):
    started_none = r"host1 has started no worker, .* for 0\.01 s: `ray status`"
    with pytest.raises(RuntimeError, match=started_none):
        tl_devicefix.init_hosts(cluster.address, wait=0.01)
    assert joined_hosts() == ()
    assert eventually(lambda: not cluster.other.workers())


def test_model_over_two_nodes_gives_what_one_process_gives(worker, checkpoints):
    spread = load(checkpoints)
    alone = load(checkpoints, **{"blocks.2": "cpu"})
    tokens = torch.randint(1, alone.cfg.d_vocab, (2, 9))
    edit = [("blocks.2.hook_resid_post", lambda x, hook: x.mul_(2))]

    def ran(model):
        loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=edit)
        (gradient,) = torch.autograd.grad(loss, model.embed.W_E)
        with torch.no_grad():
            logits, cache = model.run_with_cache(tokens)
        return [loss, gradient, logits, *cache.values(), model.W_Q]

    for one, other in zip(ran(spread), ran(alone), strict=True):
        torch.testing.assert_close(one, other)


def test_workers_error_is_raised_with_its_traceback(worker):
    with pytest.raises(IndexError) as raised:
        worker.call("free_memory", 7)
    assert "in free_memory" in str(raised.value.__cause__)  # the worker's traceback
    assert worker.call("free_memory", 0) > 0


def test_interrupt_ends_a_call_that_waits(worker, cluster):
    (process,) = cluster.other.workers()
    process.suspend()  # so that the call waits
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt.start() or worker.call("free_memory", 0)
    finally:
        signal.signal(signal.SIGINT, handler)
        process.resume()

    assert worker.call("free_memory", 0) > 0


EXAMPLE = str(Path(tl_devicefix.__file__).parents[1] / "examples" / "several_hosts.py")


def test_the_example_has_half_of_its_blocks_on_the_other_node(worker, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [EXAMPLE])
    runpy.run_path(EXAMPLE, run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"^host1/cpu +blocks\.4-7 ", printed, re.MULTILINE), printed


DRIVER = """
import sys, tl_devicefix
tl_devicefix.init_hosts()
print("joined", flush=True)
sys.stdin.read()
"""


@pytest.mark.full("it starts another worker, which takes ten seconds")
def test_a_worker_ends_with_its_driver(cluster):
    before, environment = cluster.other.workers(), {**os.environ, "RAY_ADDRESS": cluster.address}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], env=environment, text=True, **pipes)
    assert "joined\n" in iter(driver.stdout.readline, "")
    (process,) = set(cluster.other.workers()) - set(before)
    driver.kill()
    driver.wait(WITHIN)
    assert eventually(lambda: not process.is_running())


@pytest.mark.full("it starts another worker, which takes ten seconds")
def test_a_worker_is_replaced_after_a_killed_one(worker, cluster, checkpoints):
    is_told = asking(worker)
    (process,) = cluster.other.workers()
    process.kill()
    is_told()
    tl_devicefix.init_hosts(cluster.address)
    load(checkpoints)(torch.ones(1, 2, dtype=torch.long))


def test_killed_node_is_reported_and_no_longer_joined(worker, cluster, checkpoints):
    is_told, model = asking(worker), load(checkpoints)
    cluster.other.close()
    is_told()
    with pytest.raises(HostLost, match="host1 is lost"):
        model(torch.ones(1, 2, dtype=torch.long))
    assert eventually(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
    tl_devicefix.init_hosts(cluster.address)
    assert joined_hosts() == ()
    ray.shutdown()
    with pytest.raises(HostLost, match=r"ray\.shutdown\(\) was called"):
        worker.call("free_memory", 0)
    assert not ray.is_initialized()
