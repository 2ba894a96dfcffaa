"""What goes between ranks: the residual stream, and what is read."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from hf_models import N_LAYERS

import tl_devicefix
from tl_devicefix import pipeline_map
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.init_hosts import Ranks


def names(commands: list[Any]) -> list[str]:
    return [command.name for command in commands]


def far_blocks(model: Any) -> list[Any]:
    return [item for item in model.blocks if item.mlp.W_in.device.index >= 2]


def messages_for(n_blocks: int) -> int:
    """Each is of twice as many blocks as the one before."""
    return (n_blocks + 1).bit_length()


def test_a_forward_is_a_few_messages(
    model: Any, tokens: torch.Tensor, ranks: Ranks, commands: list[Any]
) -> None:
    with torch.no_grad():
        model(tokens)
        commands.clear()
        before = ranks.peers[1].messages
        model(tokens)

    n_far = len(far_blocks(model))
    assert ranks.peers[1].messages - before == messages_for(n_far)
    assert names(commands).count("put") == names(commands).count("read") == 1
    assert names(commands).count("call") == n_far


def test_a_rank_begins_while_rank_0_still_tells(
    model: Any, tokens: torch.Tensor, ranks: Ranks, commands: list[Any]
) -> None:
    def until_it_begins(value: torch.Tensor, hook: Any) -> None:
        until = time.monotonic() + 30
        while ranks.peers[1].messages == before and time.monotonic() < until:
            time.sleep(0.001)
        assert ranks.peers[1].messages == before + 1
        assert names(commands).count("call") == 1

    with torch.no_grad():
        model(tokens)
        commands.clear()
        before = ranks.peers[1].messages
        second = model.cfg.n_layers - len(far_blocks(model)) + 1
        name = f"blocks.{second}.hook_resid_pre"
        model.run_with_hooks(tokens, fwd_hooks=[(name, until_it_begins)])


def test_messages_have_an_end(machine: Any, ranks: Ranks) -> None:
    added = torch.ones(3, device="sim:3")
    added.sum().item()
    before = ranks.peers[1].messages

    for _ in range(8 * 2048):
        added += 1

    assert added.sum().item() == 3 * (8 * 2048 + 1)
    assert 8 <= ranks.peers[1].messages - before <= 8 + 8


def test_a_hook_brings_its_activation_home_and_back(
    model: Any, tokens: torch.Tensor, commands: list[Any]
) -> None:
    def through_numpy(value: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.from_numpy(value.detach().cpu().numpy() * 2).to(value.device)

    name = f"blocks.{N_LAYERS - 1}.hook_resid_pre"
    with torch.no_grad():
        model(tokens)
        commands.clear()
        model.run_with_hooks(tokens, fwd_hooks=[(name, through_numpy)])

    stream = (*tokens.shape, model.cfg.d_model)
    read = [command.arguments[0].shape for command in commands if command.name == "read"]
    put = [command.arguments[1] for command in commands if command.name == "put"]
    assert read == put == [stream, stream]  # to the hook, and home


def test_what_is_let_go_is_let_go_there(model: Any, tokens: torch.Tensor, ranks: Ranks) -> None:
    def run() -> int:
        model(tokens, return_type="loss").backward()
        model.zero_grad()
        torch.get_device_module("sim").synchronize("sim:3")
        return len(ranks.peers[1]._owned)

    first = run()

    assert run() == run() == first


BOX = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    "values",
    [
        *(BOX, BOX.permute(2, 0, 1), BOX.mT, BOX[:, :, ::2].mT, BOX[:1].mT, BOX[0, 0, 0]),
        *(BOX[:, :1].expand(2, 3, 4), BOX[:0].mT, BOX[1:, 1:2, 1:2].transpose(0, 2)),
        *(torch.arange(8)[5::4][:1], torch.tensor(True), torch.randn(3, 40_000).T),
    ],
)
def test_values_lie_as_on_one_cpu_when_they_are_back(values: torch.Tensor, machine: Any) -> None:
    """Or products with them would round otherwise."""
    far = values.to("sim:3")

    for back in (far.cpu(), copy.deepcopy(far), values.to("sim:0").to("sim:3").to("sim:0")):
        assert back.stride() == values.clone().stride()
        assert torch.equal(back.cpu(), values)


# --------------------------------------------------------------------------------------------
# Runs in flight: stages of different ranks compute at the same time

FOREVER = 30
"""Seconds, after which nobody waits any more."""
BOTH = threading.Barrier(2)


def meet() -> None:
    BOTH.wait(FOREVER)


class Meeting:
    """A rank that unpickles it waits for rank 0, as if it computed for long."""

    def __reduce__(self) -> Any:
        return meet, ()


def test_a_rank_is_at_one_run_while_rank_0_is_at_the_next(
    model: Any, tokens: torch.Tensor, far: FarDevices
) -> None:
    has_begun = threading.Event()

    def begin(value: torch.Tensor, hook: Any) -> None:
        has_begun.set()

    def meet_there(value: torch.Tensor, hook: Any) -> None:
        far.tell(1, "free", (Meeting(),))

    def meet_here(value: torch.Tensor, hook: Any) -> None:
        meet()

    far_point = f"blocks.{N_LAYERS - 1}.hook_resid_pre"
    hooks = {
        0: [("blocks.0.hook_resid_pre", begin), (far_point, meet_there)],
        1: [("blocks.0.hook_resid_post", meet_here)],
    }

    def run(view: Any, number: int) -> torch.Tensor:
        if number:
            has_begun.wait(FOREVER)  # or it might wait where run 0 has still to come
        with torch.no_grad():
            return view.run_with_hooks(tokens.roll(number, 1), fwd_hooks=hooks.get(number, []))

    result = list(pipeline_map(model, run, range(3)))

    with torch.no_grad():
        for number, logits in enumerate(result):
            assert torch.equal(logits.cpu(), model(tokens.roll(number, 1)).cpu())


def test_blocks_run_whole_in_flight_too_and_are_held_once_for_all_runs(
    model: Any, tokens: torch.Tensor, commands: list[Any]
) -> None:
    def run(view: Any, number: int) -> torch.Tensor:
        with torch.no_grad():
            return view(tokens.roll(number, 1))

    run(model, 0)
    with tl_devicefix.mix_devices():
        list(pipeline_map(model, run, range(3)))

    assert names(commands).count("call") == 4 * len(far_blocks(model))
    assert names(commands).count("build") <= len(far_blocks(model))  # or it was before
    assert names(commands).count("try_out") <= len(far_blocks(model))
