"""A rank that lends its device, and a machine whose devices are half of this one's, half its.

It is a thread of this process, beside a socket: only tests of processes start some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from launching import ForkServer, Launch, Launched
from ranks import devices_of, lend_from_a_thread
from spread_of_either_class import *  # noqa: F403

from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.init_hosts import Ranks
from tl_devicefix.multihost.peers import Command, Peer
from tl_devicefix.simulation.machine import Machine


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts processes."""
    result = ForkServer()
    yield result
    result.end()


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """This process, and a thread that lends its device until the tests end."""
    return lend_from_a_thread()


@pytest.fixture(scope="module")
def machine(ranks: Ranks) -> Iterator[Machine]:
    """Four devices: sim:0 and sim:1 here, sim:2 and sim:3 of the other rank."""
    with ranks.entered(devices_of(ranks, ["4GiB"] * 4)) as machine:
        yield machine


@pytest.fixture
def far(machine: Machine) -> FarDevices:
    """What becomes of operations on them."""
    assert isinstance(machine.executor, FarDevices)
    return machine.executor


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Every command that is given."""
    given_commands: list[Command] = []
    append = Peer.append

    def and_note(peer: Peer, command: Command) -> None:
        given_commands.append(command)
        append(peer, command)

    monkeypatch.setattr(Peer, "append", and_note)
    return given_commands


@pytest.fixture(scope="module")
def load_over(machine: Machine, load_over_entered: Callable[..., Any]) -> Callable[..., Any]:
    """Load over four devices of the machine, of the newest class that there is."""
    return load_over_entered


@pytest.fixture(scope="module")
def load_over_entered(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The same for who enters machines of its own: over the one that is entered by then."""
    if has_hooked_transformer():
        from_pretrained = request.getfixturevalue("from_pretrained")
        return lambda name, **where: from_pretrained(name, **(where or {"n_devices": 4}))
    from transformer_lens.model_bridge import TransformerBridge

    checkpoints = request.getfixturevalue("checkpoints")
    boot = TransformerBridge.boot_transformers
    return lambda name, **where: boot(str(checkpoints(name)), **(where or {"n_devices": 4}))


@pytest.fixture
def launch(server: ForkServer, tmp_path: Path) -> Iterator[Launch]:
    """`launch("forwards", 3)`: the script on three ranks, of which none is left at the end."""
    with ExitStack() as stack:

        def launch(what: str, world_size: int = 3, **options: Any) -> Launched:
            directory = tmp_path / f"{what}-{time.monotonic_ns()}"
            directory.mkdir()
            result = Launched(server, directory, what, world_size, **options)
            stack.callback(result.kill)
            return result

        yield launch
