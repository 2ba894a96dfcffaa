"""`load_activations`: what is read of what is on disk, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.utils.logging as hf_logging
from safetensors.torch import load_file
from written_by_hand import D_MODEL, N_EXAMPLES, REDUCED, RESID, WIDTH, write_by_hand

import tl_devicefix
from tl_devicefix.__main__ import main
from tl_devicefix.activation_store.format import INDEX, _checksum_of_fields
from tl_devicefix.activation_store.reader import SavedActivations


@pytest.fixture
def written(tmp_path: Path) -> SavedActivations:
    return write_by_hand(tmp_path / "written")


@pytest.fixture
def all_of_it() -> torch.Tensor:
    numbers = torch.arange(N_EXAMPLES * WIDTH).view(N_EXAMPLES, WIDTH, 1)
    return numbers.bfloat16().repeat(1, 1, D_MODEL)


INDICES: Any = [
    *(3, -1, slice(3, 7), slice(None), slice(5, 2), slice(-3, None), slice(None, None, -1)),
    *(slice(1, 11, 4), [5, 1, 10], [-1, 5, 5], [], torch.tensor([2, 9]), np.array([7, 0])),
    torch.tensor(4),
]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_indices_are_those_of_the_tensor(
    index: Any, written: SavedActivations, all_of_it: torch.Tensor
) -> None:
    if isinstance(index, slice) and index.step == -1:
        expected = all_of_it.flip(0)
    else:
        expected = all_of_it[index if isinstance(index, slice) else torch.as_tensor(index).long()]
    actual = written[RESID][index]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)
    assert len(written) == len(written[RESID]) == N_EXAMPLES
    assert written[RESID].shape == tuple(all_of_it.shape)


def test_iterating_ends_with_the_last_example(written: SavedActivations) -> None:
    assert [int(each) for each in written[REDUCED]] == list(range(N_EXAMPLES))


def test_changes_to_a_tensor_stay_in_it(written: SavedActivations) -> None:
    written[RESID][3].zero_()
    written.activations(RESID, 4, shuffle=False)
    assert written[RESID][3].any()


def test_safetensors_alone_reads_it(written: SavedActivations, all_of_it: torch.Tensor) -> None:
    index = json.loads((written.directory / INDEX).read_text())
    shards = [load_file(written.directory / shard["file"]) for shard in index["shards"]]
    assert torch.equal(torch.cat([shard[RESID] for shard in shards]), all_of_it)
    assert torch.equal(torch.cat([shard["tokens"] for shard in shards]), written.tokens[:])


def test_a_directory_without_activations_and_indices_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there are no saved activations in"):
        tl_devicefix.load_activations(tmp_path)
    (tmp_path / INDEX).write_text('{"version": 99}')
    with pytest.raises(ValueError, match=r"version 99 of the format.* reads version 2"):
        tl_devicefix.load_activations(tmp_path)
    for damaged in ("{", "[]", '{"version": 2}', "[" * 100_000):
        (tmp_path / INDEX).write_text(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            tl_devicefix.load_activations(tmp_path)


def first(part: str, **fields: Any) -> Callable[[Any], Any]:
    """Changes fields of the first entry or shard; of those of RESID."""
    return lambda index: index[part][2 if part == "entries" else 0].update(fields)


INDICES_THAT_LIE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another dtype": (first("entries", dtype="int32"), ""),
    "a dtype of as many bytes": (first("entries", dtype="float16"), ""),
    "another shape": (first("entries", shape=[WIDTH * D_MODEL]), ""),
    "a shape that is huge": (first("entries", shape=[10**12]), "is smaller than its tensors"),
    "a shape that torch cannot count": (first("entries", shape=[10**30]), "cannot be bfloat16"),
    "an axis that is none": (first("entries", axis="tokn"), "cannot be bfloat16 .* by tokn"),
    "another axis": (first("entries", axis="shared"), ""),
    "a field that is none": (first("entries", axes="token"), "unexpected keyword argument 'axes'"),
    "the same as none": (first("entries", same_as="blocks.9"), "is not the same as blocks.9"),
    "an entry dropped": (lambda index: index["entries"].pop(), ""),
    "tokens dropped": (lambda index: index["entries"].pop(0), "it has no tokens"),
    "an entry twice": (
        lambda index: index["entries"].append(index["entries"][2]), "a name is in it twice",
    ),
    "a shard twice": (lambda index: index["shards"].insert(1, index["shards"][0]), "is no shard 1"),
    "a gap": (lambda index: index["shards"].pop(0), "is no shard 0"),
    "an overlap": (
        lambda index: index["shards"][1].update(start=3), "cannot have the examples 3 to 8",
    ),
    "fewer examples": (first("shards", stop=3), "cannot have the examples 0 to 3"),
    "no number": (first("shards", tokens=True), "is no shard 0"),
    "another directory's": (first("shards", file="../shard-00000.safetensors"), "is no shard 0"),
    "an absolute name": (first("shards", file="/shard-00000.safetensors"), "is no shard 0"),
}  # fmt: skip


@pytest.mark.parametrize("lie", INDICES_THAT_LIE)
def test_an_index_that_is_not_as_it_was_written_is_not_believed(
    lie: str, written: SavedActivations
) -> None:
    change, message = INDICES_THAT_LIE[lie]
    path = written.directory / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is damaged: its checksum is not that"):
        tl_devicefix.load_activations(written.directory)

    # Also by whoever knows how its checksum is made: what shards say of themselves decides.
    index.pop("xxh3_128")
    path.write_text(json.dumps({**index, "xxh3_128": _checksum_of_fields(index)}))
    if message:
        with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
            tl_devicefix.load_activations(written.directory)
        return
    opened = tl_devicefix.load_activations(written.directory)
    with pytest.raises(ValueError, match="does not begin as it was written"):
        opened.tokens[0]
    assert len(opened.verify()) == len(opened.index.shards)


@pytest.fixture
def bars_as_before() -> Iterator[None]:
    """The command shows no progress bars of transformers."""
    were_on = hf_logging.is_progress_bar_enabled()
    yield
    if were_on:
        hf_logging.enable_progress_bar()


@pytest.mark.usefixtures("bars_as_before")
def test_the_command_lists_activations_and_checks_shards(
    written: SavedActivations, capsys: Any
) -> None:
    directory = str(written.directory)
    assert main(["activations", "info", directory]) == 0
    said = capsys.readouterr().out
    assert "11 examples of none" in said
    assert f"{RESID}: bfloat16 [11, 6, 4]" in said
    assert main(["activations", "verify", directory]) == 0
    assert "every shard is as it was written" in capsys.readouterr().out

    first, second, third = (written.directory / shard.file for shard in written.index.shards)
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    assert main(["activations", "info", directory]) == 1
    said = capsys.readouterr().out
    assert "shard-00001.safetensors has" in said
    assert "shard-00002.safetensors is missing" in said
    assert main(["activations", "verify", directory]) == 1
    said = capsys.readouterr().out
    assert "shard-00000.safetensors is damaged" in said
    assert "shard-00001.safetensors has" in said
    assert "shard-00002.safetensors is missing" in said
    assert said.endswith("3 of 3 shards are not as they were written\n")
    assert main(["activations", "info", directory + "/none"]) == 1
    assert "there are no saved activations" in capsys.readouterr().err
