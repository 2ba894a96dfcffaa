"""A cluster of two nodes: a model over both, and each fault, which is told in a sentence."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import WITHIN

import tl_devicefix
from tl_devicefix.multihost.init_hosts import leave_hosts
from tl_devicefix.placement.devices import HostLost, joined_hosts

pytestmark = pytest.mark.once

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

DRIVER = """
import sys
import tl_devicefix
from tl_devicefix.placement.devices import joined_hosts
try:
    tl_devicefix.init_hosts(*sys.argv[1:])
    print(len(joined_hosts()), flush=True)
    sys.stdin.read()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def drive(*arguments, **environment):
    """Start a process that joins, says how many hosts there are, and waits."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = [sys.executable, "-c", DRIVER, *arguments]
    return subprocess.Popen(command, env=os.environ | environment, text=True, **pipes)


@pytest.fixture(scope="module")
def leaving():
    yield
    leave_hosts()
    ray.shutdown()


@pytest.fixture
def both_nodes(cluster):
    """The other node has been started anew if it was lost."""
    if not cluster.other.is_running():
        cluster.other.end()
        cluster.add_node()


@pytest.fixture
def worker(cluster, both_nodes, leaving):
    """The connection to the other node's worker, which has been started anew if it was lost."""
    tl_devicefix.init_hosts(cluster.address)
    return joined_hosts()[0].connection


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

    def is_told(why="its process or its node ended"):
        asks.join(WITHIN)
        assert re.match(rf"host1 is lost: {why}; call tl_", str(errors[0]))

    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    return is_told


def load(checkpoints, **elsewhere):
    """A model with block 2 on the other node; or all of it here."""
    from transformer_lens import HookedTransformer

    device_map = {"": "cpu", **(elsewhere or {"blocks.2": "host1/0"})}
    return HookedTransformer.from_pretrained(str(checkpoints("llama")), device_map=device_map)


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


def test_killed_worker_is_reported_and_a_new_one_can_join(worker, cluster, checkpoints):
    is_told, model = asking(worker), load(checkpoints)
    (process,) = cluster.other.workers()
    process.kill()
    is_told()
    with pytest.raises(HostLost, match="host1 is lost"):
        model(torch.ones(1, 2, dtype=torch.long))
    tl_devicefix.init_hosts(cluster.address)
    load(checkpoints)(torch.ones(1, 2, dtype=torch.long))


def test_suspended_worker_is_reported_and_ended(worker, cluster):
    is_told = asking(worker)
    (process,) = cluster.other.workers()
    process.suspend()
    try:
        is_told("it gave no sign of life for 15 s")
    finally:
        process.resume()
    assert eventually(lambda: not process.is_running())


def test_killed_node_is_reported_and_no_longer_joined(worker, cluster):
    is_told = asking(worker)
    cluster.other.end()
    is_told()
    assert eventually(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
    tl_devicefix.init_hosts(cluster.address)
    assert joined_hosts() == ()


def test_workers_that_do_not_start_in_time_end(cluster, both_nodes, leaving):
    started_none = r"host1 has started no worker for 0\.01 s: `ray status`"
    with pytest.raises(RuntimeError, match=started_none):
        tl_devicefix.init_hosts(cluster.address, wait=0.01)
    assert joined_hosts() == ()
    assert eventually(lambda: not cluster.other.workers())


def test_ray_shutdown_is_reported_as_a_lost_host(worker):
    ray.shutdown()
    with pytest.raises(HostLost, match=r"ray\.shutdown\(\) was called"):
        worker.call("free_memory", 0)
    assert not ray.is_initialized()


def test_worker_ends_with_its_driver(cluster, both_nodes):
    before = cluster.other.workers()
    driver = drive(cluster.address)
    assert driver.stdout.readline() == "1\n"
    (process,) = set(cluster.other.workers()) - set(before)
    driver.kill()
    driver.wait(WITHIN)
    assert eventually(lambda: not process.is_running())


def test_example_of_several_hosts_runs_on_a_cluster(cluster):
    example = Path(tl_devicefix.__file__).parents[1] / "examples" / "several_hosts.py"
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, str(example)], env=environment, capture_output=True, text=True, check=True
    )
    assert re.search(r"^host1/cpu +blocks\.4-7 ", done.stdout, re.MULTILINE), done.stdout
