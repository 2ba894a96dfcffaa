"""Ranks whose network takes its time, loses what is sent, pauses, or carries nothing any more."""

from __future__ import annotations

import re
import signal
import time

import pytest
from a_slow_line import SlowLine
from launching import WITHIN, Launch, Launched
from networks import LINES, on
from ranks import free_port

pytestmark = LINES
AS_IN_ONE_PROCESS = {"logits": 0, "cache": 0, "gradients": 0, "tokens": 0}
"""Values that differ."""
Distant = tuple[list[str], SlowLine]
MORE = pytest.mark.full(reason="it takes some seconds; less delay and loss are by default")


@pytest.mark.parametrize(
    ("delay", "loss"),
    [
        (0.005, 0.02),
        pytest.param(0.02, 0.02, marks=MORE),
        pytest.param(0.005, 0.2, marks=MORE),
    ],
)
def test_a_line_with_delay_and_loss(
    delay: float, loss: float, distant_hosts: Distant, launch: Launch
) -> None:
    names, line = distant_hosts
    line.delay, line.loss = delay, loss

    launched = launch("as_one_process", **on(names), timeout=8)
    launched.until_ready()
    launched.go_on()

    assert launched.says() == [AS_IN_ONE_PROCESS]
    assert launched.ends() == [0, 0]
    assert line.n_lost > 0


@pytest.mark.full(reason="it takes some seconds; a line that stops for good is tested by default")
def test_a_line_that_pauses(distant_hosts: Distant, launch: Launch) -> None:
    names, line = distant_hosts
    launched = launch("as_one_process", **on(names), timeout=8)
    launched.until_ready()

    line.loss = 1
    launched.go_on()
    time.sleep(3)
    n_lost, line.loss = line.n_lost, 0

    assert launched.says() == [AS_IN_ONE_PROCESS]
    assert launched.ends() == [0, 0]
    assert n_lost > 0


@pytest.mark.parametrize(
    "what",
    [
        "for_ever",
        pytest.param(
            "backwards_for_ever",
            marks=pytest.mark.full(reason="it takes some seconds; forwards are by default"),
        ),
    ],
)
def test_a_line_that_stops(what: str, distant_hosts: Distant, launch: Launch) -> None:
    names, line = distant_hosts
    launched = launch(what, **on(names))
    launched.until_ready()

    line.loss = 1

    error = launched.error(since=time.time())
    assert re.match(
        r"HostLost: rank 1 \(host1/cpu:0, on .*\), which holds blocks\.\d-7, is lost: it gave no "
        "sign of life for 3 s$",
        error,
    )
    assert launched.ends() == [3, 1]


def waiting_lender(distant_hosts: Distant, launch: Launch) -> Launched:
    """Rank 1, of which the line stops while it waits for rank 2, and has met rank 0."""
    names, line = distant_hosts
    options = {**on(names), "world_size": 3, "port": free_port()}
    master = f"10.77.0.1:{options['port']}"
    lend = ["-m", "tl_devicefix", "worker", "--master", master, "--rank", "1", "--world-size", "3"]
    launch("forwards", **options, started=[0])
    lender = launch("", **options, started=[1], command=[*lend, "--wait", "10"])
    lender.until_it_says(f"rank 1 of 3 waits at {master} for rank 2\n", 1)

    line.loss = 1

    return lender


@pytest.mark.full(reason="it takes 20 seconds; nobody else waits for what never answers so long")
def test_a_line_that_stops_while_ranks_wait(distant_hosts: Distant, launch: Launch) -> None:
    lender = waiting_lender(distant_hosts, launch)

    assert lender.ends() == [1]
    assert ", where they met, has not answered for 20 s" in lender.text("stderr", 1)


@pytest.mark.full(reason="it takes some seconds; interrupts of who hears all are tested by default")
def test_an_interrupt_while_the_store_says_nothing(distant_hosts: Distant, launch: Launch) -> None:
    lender = waiting_lender(distant_hosts, launch)
    time.sleep(1)  # it looks twice a second

    when = lender.signal(1, signal.SIGINT)

    assert lender.ends() == [-signal.SIGINT]
    assert time.time() - when < WITHIN


@pytest.mark.full(reason="it takes some seconds; messages of a token are counted by default")
def test_a_token_takes_a_few_round_trips(distant_hosts: Distant, launch: Launch) -> None:
    names, line = distant_hosts
    line.delay = 0.05

    reading, token = launch("timed", **on(names), timeout=8).says()

    round_trip = 2 * line.delay
    assert reading >= round_trip  # or the line would not be slow
    # That rank's 4 blocks are 3 messages, each of which is waited for and then taken; if each
    # command were one, it would be 20 round trips.
    assert token < 10 * round_trip
