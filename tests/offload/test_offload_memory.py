"""Two visiting blocks at a time are on a device, and each is copied once a forward, in time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from kinds import home_of
from offloads import HOST, assert_at_rest, every_kind, every_offload, offloaded_blocks, weights_of
from transformer_lens import HookedTransformer

from tl_devicefix.offload import copying
from tl_devicefix.placement.fitting import working_room
from tl_devicefix.simulation.machine import Machine, Transfer


@pytest.fixture
def transfers_of(machine: Machine) -> Callable[..., list[Transfer]]:
    def transfers_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Transfer]:
        machine.reset_transfers()
        function(*args, **kwargs)
        return [t for t in machine.transfers if t.source == HOST]

    return transfers_of


@every_kind
@every_offload
def test_a_forward_copies_the_weights_of_each_offloaded_block_once(
    offload: str, model: Any, tokens: torch.Tensor, transfers_of: Any
) -> None:
    at_home = tokens.to(home_of(model))
    away = [model.blocks[layer] for layer in offloaded_blocks(model)]

    copied = transfers_of(model, at_home)

    assert sum(t.bytes for t in copied) == sum(weights_of(block) for block in away)
    assert len(copied) == sum(len(list(block.parameters())) for block in away)


def test_a_part_of_a_forward_copies_the_weights_of_its_blocks_only(
    model: Any, tokens: torch.Tensor, transfers_of: Any
) -> None:
    at_home = tokens.to(home_of(model))

    copied = transfers_of(model, at_home, stop_at_layer=2)

    assert sum(t.bytes for t in copied) == weights_of(model.blocks[1])


@pytest.mark.parametrize("offload", ["all of one device"])
def test_the_next_block_is_on_its_way_before_a_block_computes(
    offload: str, model: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    at_home = tokens.to(home_of(model))
    n_layers, n_weights = model.cfg.n_layers, len(list(model.blocks[0].parameters()))
    machine.reset_transfers()
    sent: dict[str, list[int]] = {"resid_pre": [], "resid_post": []}

    def note(activation: torch.Tensor, hook: Any) -> None:
        sent[hook.name.rsplit("hook_")[1]].append(len(machine.transfers) // n_weights)

    names = ("resid_pre", "resid_post")
    hooks = [(lambda name: name.endswith(names), note)]
    model.run_with_hooks(at_home, fwd_hooks=hooks)

    # Before block k computes, k + 1 is sent for; k + 2 is not before k has computed.
    assert sent["resid_pre"] == [min(k + 2, n_layers) for k in range(n_layers)]
    assert sent["resid_post"] == sent["resid_pre"]


@every_kind
@every_offload
def test_two_visiting_blocks_at_a_time_are_on_a_device(
    offload: str, model: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    one_token = tokens[:1, :1].to(home_of(model))  # whose activations are less than any block
    placement = model.placement
    gc.collect()
    before = {device: machine.memory_allocated(device) for device in placement.devices}
    for device in before:
        machine.reset_peak_memory_stats(device)

    with torch.no_grad():
        model(one_token)

    for device, held in before.items():
        runs_here = (placement.device_of(f"blocks.{i}") for i in offloaded_blocks(model))
        block = weights_of(model.blocks[0])
        visiting = min(2, list(runs_here).count(device)) * block
        assert visiting <= machine.max_memory_allocated(device) - held < visiting + block / 2
        assert machine.memory_allocated(device) == held


@pytest.mark.parametrize("offload", ["all of one device"])
def test_a_backward_brings_back_less_than_two_blocks_at_a_time(
    offload: str, model: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    logits = model(tokens[:1, :1].to(home_of(model)))
    held = machine.memory_allocated(0) + sum(
        p.nbytes for p in model.parameters() if p.device != HOST
    )  # their gradients
    machine.reset_peak_memory_stats(0)

    logits.sum().backward()

    block = weights_of(model.blocks[0])
    assert block / 8 < machine.max_memory_allocated(0) - held < 2 * block


def held_on(model: HookedTransformer, device: torch.device) -> int:
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if t.device == device}
    return sum(tensor.nbytes for tensor in tensors.values())


def test_the_plan_knows_what_is_held(model: Any, machine: Machine) -> None:
    placement = model.placement
    visiting = 2 * weights_of(model.blocks[1])
    home = home_of(model)
    assert placement.bytes_on(home) == held_on(model, home) + visiting
    assert placement.bytes_on("cpu") == held_on(model, HOST)


@every_offload
def test_loading_needs_no_more_of_a_device_than_running_and_what_is_being_folded(
    offload: str, load: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    gc.collect()
    for device in machine.devices:
        machine.reset_peak_memory_stats(device)
    before = [machine.memory_allocated(device) for device in machine.devices]

    placement = load("llama", offload).placement

    folding = working_room(placement, torch.float32)
    for device in placement.devices:
        taken = machine.max_memory_allocated(device) - before[device.index]
        assert taken <= placement.bytes_on(device) + folding


@pytest.mark.parametrize("limited", [{0: 0.6}, {0: 0.6, 1: 0.4}])
def test_max_memory_offloads_what_does_not_fit(
    limited: dict[int, float], machine: Machine, from_pretrained: Any, reference: Any,
    tokens: torch.Tensor,
) -> None:  # fmt: skip
    whole = from_pretrained("llama", device_map=3).placement.bytes_on(3)
    max_memory = {device: int(part * whole) for device, part in limited.items()}

    n_devices = len(limited)
    model = from_pretrained("llama", n_devices=n_devices, max_memory={**max_memory, "cpu": "1GiB"})

    assert offloaded_blocks(model)
    for device, limit in max_memory.items():
        assert model.placement.bytes_on(device) <= limit
    assert_at_rest(model)
    assert_agrees(model(tokens), reference(tokens), home_of(model))


# --------------------------------------------------------------------------------------------
# Streams


class Streams:
    """Of a device that has streams, what is asked of them, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running = "computing"
        streams = self

        class Stream:
            def __init__(self, device: torch.device, name: str = "copying") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                streams.events.append(f"{self.name} waits for {other.name}")

            def record_event(self) -> int:
                streams.events.append(f"{self.name} done: {len(streams.events)}")
                return len(streams.events) - 1

            def synchronize(self) -> None:
                streams.events.append(f"the host waits for {self.name}")

            def wait_event(self, event: int) -> None:
                streams.events.append(f"{self.name} waits for {event}")

        self.Stream = Stream
        self.computing = Stream(torch.device("sim", 0), "computing")

    def current_stream(self, device: torch.device) -> Any:
        return self.computing

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.running = stream.name
        yield
        self.running = "computing"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Any:
    """Let the simulated devices have streams, and record what is copied on them."""
    streams, record = Streams(), machine.record_transfer

    def record_transfer(source: torch.device, target: torch.device, copied: torch.Tensor) -> None:
        if source != target:
            streams.events.append(f"{streams.running} copy")
        record(source, target, copied)

    monkeypatch.setattr(machine, "record_transfer", record_transfer)
    monkeypatch.setattr(copying, "module_with_streams", lambda device: streams)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    copying._copy_stream.cache_clear()
    yield streams
    copying._copy_stream.cache_clear()


def test_copies_have_a_stream_of_their_own_and_a_block_waits_for_its_own(
    models: Any, tokens: torch.Tensor, streams: Any
) -> None:
    model = models("llama", "all of one device")
    at_home = tokens.to(home_of(model))
    n_weights = len(list(model.blocks[0].parameters()))
    streams.events.clear()

    with torch.no_grad():
        model(at_home)

    copies = ["copying waits for computing", "copying copy"] * n_weights
    events, position = streams.events, 0
    done: list[str] = []
    expected: list[str] = []
    for step in ["send", "send", *["run", "send"] * 3, "run", "run"]:
        if step == "send":
            position = len(expected) + len(copies)
            done.append(str(position))
            expected += [*copies, f"copying done: {position}"]
        else:
            expected.append(f"computing waits for {done.pop(0)}")
    assert events == [*expected, "the host waits for copying"]


def test_what_was_sent_in_vain_is_waited_for_before_its_memory_is_used(
    models: Any, tokens: torch.Tensor, streams: Any
) -> None:
    model = models("llama", "all of one device")

    def fail(activation: torch.Tensor, hook: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_mid", fail)])

    done = [event.split()[-1] for event in streams.events if " done: " in event]
    waited = [e.split()[-1] for e in streams.events if e.startswith("computing waits for ")]
    assert waited == done
