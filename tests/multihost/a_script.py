"""What a user runs on every rank. Where it is told to, it says so and waits for a file to go on.

It says with which error it ends, and when; what else there is to say, a line each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interrupting import Interrupting

import tl_devicefix
from tl_devicefix.demo.demo import load_checkpoint
from tl_devicefix.multihost import init_hosts as joining
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
    there: list[None] = []

    def hook(value: torch.Tensor, hook: Any) -> None:
        if not there:
            there.append(None)
            pause()

    return hook


def load() -> Model:
    return load_checkpoint(torch.get_device_module("sim").device_count())


def logits(model: Model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).cpu()


def first_gradient(model: Model) -> torch.Tensor:
    """The sum of one that comes last: at home, through all blocks."""
    return next(each.grad for each in model.parameters() if each.grad is not None).sum()


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

    def and_pause(*given: Any) -> None:
        if next(weights, None) == 10:
            pause()
        put(*given)

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


def backwards_for_ever() -> None:
    model = load()
    say("ready")
    while True:
        model(TOKENS, return_type="loss").backward()
        first_gradient(model).item()


def interrupted_anywhere() -> None:
    """At a line of telling after the other; after each, all is as it was."""
    model = load()
    n_devices = torch.get_device_module("sim").device_count()
    far = [f"sim:{index}" for index in range(n_devices - 2, n_devices)]
    interrupting, stream = Interrupting(), torch.randn(8, 16)

    def use() -> list[Any]:
        """Each kind of what ranks are told: blocks, graphs, operations, questions, values."""
        there = stream.to(far[0])
        added = [there + 1, there[stream[:, 0] > 0] * 2]
        there.resize_(16, 16)[8:] = 1
        there.add_(there.to(far[1]).to(far[0]))
        model(TOKENS, return_type="loss").backward()
        gradient = first_gradient(model).item()
        model.zero_grad()
        return [logits(model), gradient, there.cpu(), *(each.cpu() for each in added)]

    def held() -> list[int]:
        gc.collect()
        for index in range(n_devices):
            torch.get_device_module("sim").synchronize(index)
        peers = model.W_E._allocation.machine.asynchronous._peers.values()
        return [peer.n_held for peer in peers]

    use()
    expected, before = use(), held()
    in_use = [torch.get_device_module("sim").memory_allocated(each) for each in range(n_devices)]
    interrupting.run(use)
    n_lines, n_raised = interrupting.lines, 0
    for at in range(1, n_lines, n_lines // 12):
        n_raised += interrupting.run(use, at)
        model.zero_grad()
        assert torch.equal(logits(model), expected[0])
    torch.testing.assert_close(use(), expected, rtol=0, atol=0)
    assert held() == before
    for each in range(n_devices):
        assert torch.get_device_module("sim").memory_allocated(each) == in_use[each]
    say("interrupted", n_raised, n_lines)


def without_memory() -> None:
    """A forward for which a rank has no room, and one for which it has."""
    model = load()
    expected = logits(model)
    pause()
    try:
        logits(model, TOKENS.repeat(5_000, 1))
    except Exception as error:  # noqa: BLE001
        say(type(error).__name__, str(error))
    say("the same", torch.equal(logits(model), expected))


def generated(model: Model, n_tokens: int) -> torch.Tensor:
    return model.generate(TOKENS.to(model.cfg.device), max_new_tokens=n_tokens, **GREEDY)


def all_of(model: Model) -> dict[str, list[torch.Tensor]]:
    """What a model is asked for, at home and far from it."""
    values, cache = model.run_with_cache(TOKENS)
    model(TOKENS, return_type="loss").backward()
    weights = [*model.blocks[0].parameters(), *model.blocks[-1].attn.parameters()]
    return {
        "logits": [logits(model), values],
        "cache": [cache[name] for name in ("blocks.0.hook_mlp_out", FAR, "blocks.7.hook_mlp_out")],
        "gradients": [each.grad for each in weights if each.requires_grad],
        "tokens": [generated(model, 3)],
    }


def as_one_process() -> None:
    """How many values differ from those that the CPU gives alone, of what is asked for."""
    model = load()
    pause()
    found, expected = all_of(model), all_of(load_checkpoint(1, torch.device("cpu")))
    say({name: n_different(values, expected[name]) for name, values in found.items()})


def n_different(values: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """How many values are; each device is asked once."""
    counts: dict[torch.device, Any] = defaultdict(int)
    for one, other in zip(values, expected, strict=True):
        counts[one.device] += (one != other.to(one.device)).sum()
    return sum(int(each) for each in counts.values())


def timed() -> None:
    """Seconds that it takes to read a value of another rank, and to generate a token."""
    model, there = load(), torch.ones(1, device="sim:1")

    def seconds(do: Callable[[], object]) -> float:
        start = time.monotonic()
        do()
        return time.monotonic() - start

    def seconds_of(n_tokens: int) -> float:
        return seconds(lambda: generated(model, n_tokens))

    seconds_of(2)
    say(
        min(seconds(there.item) for _ in range(3)),
        min((seconds_of(4) - seconds_of(1)) / 3 for _ in range(2)),
    )


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


def see_one_gpu() -> None:
    """The same one as the other ranks on this host, as far as they know."""
    joining.visible_devices = lambda n_devices: [("cuda:0", "GPU-0")]


def see_a_full_gpu() -> None:
    """Rank 1's, of which it cannot even be asked how full it is."""

    def full(devices: Any, everyone: Any, rank: int) -> list[int]:
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    if os.environ["RANK"] == "1":
        joining.free_memory = full


BEFORE_ALL_JOIN = {
    "be_store": be_store,
    "beside_a_group": have_a_group,
    "see_one_gpu": see_one_gpu,
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
