"""What a user runs on every rank. Where it is told to, it says so and waits for a file to go on.

It says with which error it ends, and when; what else there is to say, a line each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import tl_devicefix
from tl_devicefix.demo.demo import load_checkpoint
from tl_devicefix.multihost.far_devices import FarDevices

TOKENS = torch.arange(4, 20).view(1, 16)
FAR = "blocks.4.hook_resid_pre"
GREEDY = {"do_sample": False, "stop_at_eos": False, "verbose": False}
Model = Any


def say(*what: object) -> None:
    print(json.dumps(what), flush=True)


def pause() -> None:
    """Say "ready"; go on when it is told to."""
    say("ready")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.02)


def pausing_once() -> Any:
    """A hook that pauses, and does nothing."""
    present: list[None] = []

    def hook(value: torch.Tensor, hook: Any) -> None:
        if not present:
            present.append(None)
            pause()

    return hook


def load() -> Model:
    return load_checkpoint(torch.get_device_module("sim").device_count())


def logits(model: Model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).cpu()


def first_gradient(model: Model) -> torch.Tensor:
    """The sum of one that comes last: at home, through all blocks."""
    return next(item.grad for item in model.parameters() if item.grad is not None).sum()


def forwards() -> None:
    model = load()
    expected = logits(model)
    for _ in range(3):
        assert torch.equal(logits(model), expected)


def have_a_group() -> None:
    """All ranks have one of the user's own, where they meet."""
    dist.init_process_group("gloo")


def beside_a_group() -> None:
    """Rank 0 has another one instead."""
    forwards()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    forwards()
    say(dist.get_world_size())


def in_load() -> None:
    put, weights = FarDevices._put, iter(range(20))

    def and_pause(*arguments: Any) -> None:
        if next(weights, None) == 10:
            pause()
        put(*arguments)

    FarDevices._put = and_pause  # type: ignore[assignment, method-assign]
    load()


def in_forward() -> None:
    model = load()
    with torch.no_grad():
        model.run_with_hooks(TOKENS, fwd_hooks=[(FAR, pausing_once())])


def in_backward() -> None:
    model = load()
    with model.hooks(bwd_hooks=[(FAR, pausing_once())]):
        model(TOKENS, return_type="loss").backward()
    first_gradient(model).item()


def forked() -> None:
    """As by a DataLoader with workers: one asks a rank, and ends as any process."""
    model = load()
    expected = logits(model)
    say("ready")
    child = os.fork()
    if not child:
        logits(model)
    say("the child ends", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say("the same", torch.equal(logits(model), expected))


def idle() -> None:
    model = load()
    logits(model)
    pause()
    try:
        tl_devicefix.init_hosts()
    except RuntimeError as error:
        say("joins no more", str(error))
    logits(model)


def for_ever() -> None:
    model = load()
    say("ready")
    while True:
        logits(model)


def without_memory() -> None:
    """A forward for which a rank has no room, and one for which it has."""
    model = load()
    expected = logits(model)
    pause()
    try:
        logits(model, TOKENS.repeat(2_500, 1))
    except Exception as error:  # noqa: BLE001
        say(type(error).__name__, str(error))
    say("the same", torch.equal(logits(model), expected))


def init_hosts(**options: Any) -> None:
    tl_devicefix.init_hosts(
        **{"memory": "8GiB", "timeout": 4, **json.loads(sys.argv[3]), **options}
    )


def be_store() -> None:
    """What ranks meet at, if that is not rank 0's: a launcher's, as torchrun has one."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    say("ready", store.port)
    time.sleep(100)


def joined_again() -> None:
    """Rank 0 had joined before, or tried to: see `try_to_join`."""
    forwards()


def try_to_join() -> None:
    """Nobody comes in time; an interrupt comes; each error is kept, as in a notebook."""
    kept: list[BaseException] = []
    for seconds in (0.5, 60):
        say("ready")
        try:
            init_hosts(wait=seconds)
        except (RuntimeError, KeyboardInterrupt) as error:
            kept.append(error)
            say(time.time(), type(error).__name__, str(error))
    say("ready")


def see_a_full_gpu() -> None:
    """Rank 1's, of which it cannot even be asked how full it is."""

    def full() -> Any:
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    if os.environ["RANK"] == "1":
        psutil.virtual_memory = full


BEFORE_ALL_JOIN = {
    "be_store": be_store,
    "beside_a_group": have_a_group,
    "see_a_full_gpu": see_a_full_gpu,
}
BEFORE_RANK_0_JOINS = {"joined_again": try_to_join}


if __name__ == "__main__":
    try:
        if sys.argv[1] in BEFORE_ALL_JOIN:
            BEFORE_ALL_JOIN[sys.argv[1]]()
        if sys.argv[1] in BEFORE_RANK_0_JOINS and os.environ["RANK"] == "0":
            BEFORE_RANK_0_JOINS[sys.argv[1]]()
        init_hosts()
        globals()[sys.argv[1]]()
    except (RuntimeError, ValueError, KeyboardInterrupt) as error:
        say(time.time(), type(error).__name__, str(error))
        sys.exit(3)
