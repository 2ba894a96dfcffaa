"""What an estimate says goes from host to host is what goes from rank to rank, to the byte."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from packaging.version import Version

from tl_devicefix import Estimate, estimate
from tl_devicefix.monkeypatch.versions import has_hooked_transformer, installed
from tl_devicefix.multihost.init_hosts import Ranks
from tl_devicefix.multihost.peers import Command, Peer
from tl_devicefix.multihost.transport import Connection
from tl_devicefix.planning.usage import Job

DEVICE_MAP = {"": "host0/0", "blocks.2": "host0/1", "blocks.3": "host1/0", "blocks.4": "host1/1"}
THERE, BACK = ("host0", "host1"), ("host1", "host0")


class Wire:
    """What is sent from here, and comes: values that commands say, and all bytes."""

    def __init__(self, patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
        self.values: dict[tuple[str, str], int] = defaultdict(int)
        self.bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.commands = 0
        append, send, receive = Peer.append, Connection._send, Connection._receive_into

        def and_note(peer: Peer, command: Command) -> None:
            self.commands += 1
            if command.name in ("put", "read"):
                tensor = command.arguments[0]
                way = THERE if command.name == "put" else BACK
                self.values[way] += prod(tensor.shape) * tensor.dtype.itemsize
            append(peer, command)

        own = ranks._transport._data[1]  # as the other end is in this process too

        def and_count_sent(connection: Connection, data: Any, **options: Any) -> None:
            self.bytes[THERE] += len(data) * (connection is own)
            send(connection, data, **options)

        def and_count_received(connection: Connection, data: memoryview) -> None:
            self.bytes[BACK] += len(data) * (connection is own)
            receive(connection, data)

        patch.setattr(Peer, "append", and_note)
        patch.setattr(Connection, "_send", and_count_sent)
        patch.setattr(Connection, "_receive_into", and_count_received)

    def during(self, run: Callable[[], Any]) -> dict[tuple[str, str], int]:
        """Bytes of values that went over it meanwhile; all else were commands of some bytes."""
        self.values.clear()
        self.bytes.clear()
        self.commands = 0
        run()
        for pair, size in self.bytes.items():
            assert self.values[pair] <= size <= self.values[pair] + 2000 * (1 + self.commands)
        return dict(self.values)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Wire:
    return Wire(monkeypatch, ranks)


@pytest.fixture(scope="module")
def over_ranks(machine: Any, load_over: Any) -> Any:
    """A model over two devices of each of two ranks."""
    return load_over("llama", device_map=DEVICE_MAP)


@pytest.fixture(scope="module")
def predicted(checkpoints: Any, tokens: torch.Tensor) -> Callable[..., Estimate]:
    batch, ctx = tokens.shape

    def of(**job: Any) -> Estimate:
        return estimate(
            checkpoints("llama"),
            4,
            hosts=2,
            device_map=DEVICE_MAP,
            batch_size=batch,
            seq_len=ctx,
            **job,
        )

    return of


def forward(model: Any, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(tokens).cpu()


def cache_read(model: Any, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=Job(cache="mlp_out").keeps)
    return [item.cpu() for item in cache.values()]


def gradients(model: Any, tokens: torch.Tensor) -> Any:
    return model(tokens, return_type="loss").backward()


def generated(model: Any, tokens: torch.Tensor) -> Any:
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False}
    return model.generate(tokens.to("sim:0"), max_new_tokens=2, **options)


JOBS = [
    pytest.param(forward, {}, id="forward"),
    pytest.param(cache_read, {"cache": "mlp_out"}, id="cache_read"),
    pytest.param(gradients, {"gradients": True}, id="gradients"),
    pytest.param(
        *(generated, {"max_new_tokens": 1}),  # beside the one of the prompt
        marks=pytest.mark.skipif(
            installed() < Version("3"), reason="this one has no mask, where nothing is padded"
        ),
        id="generated",
    ),
]


@pytest.mark.parametrize(("run", "job"), JOBS)
def test_to_the_byte(
    run: Any,
    job: dict[str, Any],
    over_ranks: Any,
    wire: Wire,
    predicted: Callable[..., Estimate],
    tokens: torch.Tensor,
) -> None:
    run(over_ranks, tokens)  # from now on the rank has copies of its blocks

    sent = wire.during(lambda: run(over_ranks, tokens))

    parts = predicted(**job).between_hosts.values()
    assert sent == {pair: sum(part.get(pair, 0) for part in parts) for pair in (THERE, BACK)}
    assert min(sent.values()) > 0


@pytest.mark.skipif(not has_hooked_transformer(), reason="a Bridge's masks cross too")
def test_weights_of_an_offloaded_block_visit_its_host(
    load_over: Any, wire: Wire, tokens: torch.Tensor
) -> None:
    model = load_over("llama", device_map={**DEVICE_MAP, "blocks.4": "cpu"})
    forward(model, tokens)

    sent = wire.during(lambda: forward(model, tokens))

    block = next(item for item in model.placement.components if item.name == "blocks.4")
    assert block.offloaded
    assert sent == model.placement.between_hosts(*tokens.shape)
    assert sent[THERE] == sent[BACK] + block.weights
