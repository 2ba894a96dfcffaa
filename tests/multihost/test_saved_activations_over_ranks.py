"""A harvest's shards are written by the ranks that computed them, to the bytes of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import N_LAYERS
from ranks import devices_of
from written_by_hand import files

import tl_devicefix
from tl_devicefix import load_activations, save_activations
from tl_devicefix.multihost import commands
from tl_devicefix.multihost.files import OtherHost, other_host
from tl_devicefix.multihost.init_hosts import Ranks

STOP = N_LAYERS - 1  # after the last one, a Bridge goes on to what is behind the blocks
NEAR, FAR = "blocks.0.hook_resid_post", f"blocks.{STOP - 1}.hook_resid_post"
SIZE = 6000
"""Of a shard: two to three examples of two activations, where a batch has two."""

CASES: dict[str, dict[str, Any]] = {
    "two": {"names_filter": [NEAR, FAR], "stop_at_layer": STOP},
    "all": {"shard_size": 60000},
    "of tokens that are kept": {"names_filter": FAR, "token_mask": lambda tokens: tokens % 3 != 0},
    "none of a shard's tokens are kept": {
        "names_filter": [NEAR, FAR],
        "token_mask": lambda tokens: (tokens == tokens[0, 0]) & (tokens[0, 0] % 2 == 0),
    },
    "reduced": {"names_filter": lambda name: "resid" in name, "transform": lambda a: a.mean(1)},
    "of two dtypes": {"names_filter": [NEAR, FAR], "transform": {NEAR: lambda a: a.half()}},
    "shared by all batches": {
        "names_filter": [NEAR, FAR],
        "transform": {FAR: lambda a: a.new_tensor([1.0, 2.0, 3.0])},
    },
    "at home": {"names_filter": [NEAR, FAR], "transform": {FAR: lambda a: a.cpu()}},
}


@pytest.fixture(scope="module")
def batches(tokens: torch.Tensor) -> list[torch.Tensor]:
    return [tokens.roll(shift, 1) for shift in range(5)]


@pytest.fixture(scope="module")
def load(
    ranks: Ranks, load_over_entered: Any, batches: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path]]:
    """A model over four devices of two processes, and where one process has written each case."""
    directory = tmp_path_factory.mktemp("in_one_process")
    with tl_devicefix.simulate(4):
        model = load_over_entered("llama")
        for name, options in CASES.items():
            run(model, batches, directory / name, **options)
    with ranks.entered(devices_of(ranks, ["4GiB"] * 4)):
        yield load_over_entered("llama"), directory


def run(model: Any, batches: Any, to: Path, **options: Any) -> Any:
    return save_activations(
        model, batches, directory=to, progress=False, **{"shard_size": SIZE, **options}
    )


@pytest.fixture
def model(load: tuple[Any, Path]) -> Any:
    return load[0]


@pytest.fixture
def expected(load: tuple[Any, Path]) -> Callable[[str], dict[str, bytes]]:
    """What one process has written of a case."""
    return lambda case: files(load[1] / case)


def of(told: list[Any], kind: type) -> list[Any]:
    return [each for each in told if type(each) is kind]


@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes(
    case: str, model: Any, batches: Any, told: list[Any], expected: Any, tmp_path: Path
) -> None:
    found = run(model, batches, tmp_path, **CASES[case])

    assert files(tmp_path) == expected(case)
    assert len(found.index.shards) > 1
    assert found.verify() == []
    assert of(told, commands.Write) or case in ("shared by all batches", "at home")


def test_nothing_comes_home(model: Any, batches: Any, told: list[Any], tmp_path: Path) -> None:
    """The residual stream goes to the other rank, once a batch."""
    run(model, batches, tmp_path, **CASES["two"])

    stream = (*batches[0].shape, model.cfg.d_model)
    assert of(told, commands.Read) == []
    put = [tuple(each.shape) for each in of(told, commands.Put)]  # of a Bridge, masks too
    assert put.count(stream) == len(batches)


def test_memory_there_is_bounded(model: Any, batches: Any, told: list[Any], tmp_path: Path) -> None:
    """However long a harvest is: buffers that are used again, and a rank that is waited for."""
    found = run(model, batches * 4, tmp_path, max_in_flight=1, names_filter=FAR, stop_at_layer=STOP)

    made = [each for each in of(told, commands.Make) if each.device is None]
    batch = 2 * 9 * model.cfg.d_model * 4
    assert sum(each.geometry.nbytes for each in made) <= (
        2 * found.index.examples_per_shard * batch // 2 + 4 * batch
    )
    assert len(of(told, commands.Synchronize)) == 4 * len(batches)


def host_of(device: str) -> OtherHost:
    found = other_host(torch.device(device))
    assert found is not None
    return found


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("path", "nbytes", "kind", "why"),
    [
        ("/dev/full", 0, OSError, "No space left on device"),
        ("nowhere", 8, FileNotFoundError, "No such file or directory"),
        ("other", 8, OSError, "Not the file of rank 0, as it has 5 bytes here and 8 there"),
    ],
)
def test_what_cannot_be_written_there(
    path: str, nbytes: int, kind: type[OSError], why: str, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"other")
    host = host_of("sim:3")
    values = host.empty(8)

    write = host.write(tmp_path / path, nbytes, 0, [[values]])

    with pytest.raises(kind, match=rf"{why}, on rank 1 \(.*: '.*{path}'"):
        write()
    assert torch.ones(2, device="sim:3").sum().item() == 2


@pytest.mark.usefixtures("model")
def test_a_rank_computes_while_it_writes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for who reads
    host = host_of("sim:3")
    values = host.empty(8)

    write = host.write(tmp_path / "pipe", 0, 0, [[values]])

    assert torch.ones(2, device="sim:3").sum().item() == 2
    reader = os.open(tmp_path / "pipe", os.O_RDONLY)
    with pytest.raises(OSError, match="seek"):
        write()
    os.close(reader)


def test_a_disk_that_is_full_there(
    model: Any, batches: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OtherHost.write

    def full(host: OtherHost, path: Path, nbytes: int, *rest: Any) -> Any:
        is_third = path.name.startswith("shard-00002")
        return write(host, *((Path("/dev/full"), 0) if is_third else (path, nbytes)), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(OtherHost, "write", full)
        message = r"disk of \S+ is full: \d examples.*\(No space left on device, on rank 1 \("
        with pytest.raises(OSError, match=message):
            run(model, batches, tmp_path, **CASES["two"])
    assert len(load_activations(tmp_path).index.shards) == 2
    assert load_activations(tmp_path).verify() == []

    run(model, batches, tmp_path, resume=True, **CASES["two"])
    assert files(tmp_path) == expected("two")


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="there is no /proc")
def test_a_directory_that_another_rank_does_not_see(
    model: Any,
    batches: Any,
    told: list[Any],
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the other rank is elsewhere

    with pytest.warns(
        UserWarning, match=r"^rank 1 \(.*\) cannot write to .*comes to rank 0"
    ) as all:
        run(model, batches, Path("/proc/self/cwd/out"), **CASES["two"])

    (told_once,) = (each for each in all if "cannot write to" in str(each.message))
    assert told_once.filename == __file__
    assert files(tmp_path / "out") == expected("two")
    assert of(told, commands.Write) == []
