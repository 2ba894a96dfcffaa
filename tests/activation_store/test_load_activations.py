"""`load_activations`: what is read of what is on disk, without a model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from written_by_hand import D_MODEL, N_EXAMPLES, REDUCED, RESID, WIDTH, write_by_hand

import tl_devicefix
from tl_devicefix.__main__ import main
from tl_devicefix.activation_store.format import INDEX, VERSION


@pytest.fixture
def written(tmp_path):
    return write_by_hand(tmp_path / "written")


@pytest.fixture
def all_of_it():
    numbers = torch.arange(N_EXAMPLES * WIDTH).view(N_EXAMPLES, WIDTH, 1)
    return numbers.bfloat16().repeat(1, 1, D_MODEL)


INDICES: Any = [
    *(3, -1, slice(3, 7), slice(None), slice(5, 2), slice(-3, None), slice(1, 11, 4)),
    *([5, 1, 10], [-1, 5, 5], [], torch.tensor([2, 9]), np.array([7, 0]), torch.tensor(4)),
]


def test_indices_are_those_of_the_tensor(written, all_of_it):
    assert len(written) == len(written[RESID]) == N_EXAMPLES
    assert written[RESID].shape == tuple(all_of_it.shape)
    for index in INDICES:
        expected = all_of_it[index if isinstance(index, slice) else torch.as_tensor(index).long()]
        actual = written[RESID][index]
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), index
    assert torch.equal(written[RESID][::-1], all_of_it.flip(0))
    assert [int(number) for number in written[REDUCED]] == list(range(N_EXAMPLES))  # and ends


def test_changes_to_a_tensor_stay_in_it(written):
    written[RESID][3].zero_()
    assert written[RESID][3].any()


def test_safetensors_alone_reads_it(written, all_of_it):
    index = json.loads((written.directory / INDEX).read_text())
    shards = [load_file(written.directory / shard["file"]) for shard in index["shards"]]
    assert torch.equal(torch.cat([shard[RESID] for shard in shards]), all_of_it)
    assert torch.equal(torch.cat([shard["tokens"] for shard in shards]), written.tokens[:])


def test_a_directory_without_activations(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there are no saved activations in"):
        tl_devicefix.load_activations(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 99}', rf"version 99 of the format.* reads version {VERSION}"),
        *((text, "index.json is damaged: put") for text in ("{", f'{{"version": {VERSION}}}')),
    ],
)
def test_an_index_that_cannot_be_read(text, message, tmp_path):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=message):
        tl_devicefix.load_activations(tmp_path)


@pytest.mark.parametrize(("old", "new"), [("bfloat16", "float16"), ("00001.safe", "00000.safe")])
def test_an_index_that_was_edited_is_not_believed(old, new, written):
    path = written.directory / INDEX
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=r"is damaged \(it is not the one in the index\)"):
        tl_devicefix.load_activations(written.directory)[RESID][4]


def test_a_shard_is_compared_with_the_index_when_it_is_read(written):
    first, second, third = (written.directory / shard.file for shard in written.index.shards)
    first.write_bytes(second.read_bytes())  # as large
    content = third.read_bytes()
    third.write_bytes(content[:-1])
    h = tl_devicefix.load_activations(written.directory)
    for example in (0, 10):
        with pytest.raises(ValueError, match=r"is damaged \(.*activations verify .*all shards"):
            h[RESID][example]
    assert h[RESID][5].any()
    third.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00002.safetensors is missing.*verify"):
        h.tokens[10]
    third.write_bytes(content)
    assert h.verify() == [
        "shard-00000.safetensors is damaged: its checksum is not that of what was written"
    ]


def test_the_command_lists_activations_and_checks_shards(written, capsys):
    directory = str(written.directory)
    assert main(["activations", "info", directory]) == 0
    text = capsys.readouterr().out
    assert "11 examples of none" in text
    assert f"{RESID}: bfloat16 [11, 6, 4]" in text
    assert main(["activations", "verify", directory]) == 0
    assert "every shard is as it was written" in capsys.readouterr().out

    first, second, third = (written.directory / shard.file for shard in written.index.shards)
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    assert main(["activations", "info", directory]) == 1
    text = capsys.readouterr().out
    assert "shard-00001.safetensors has" in text
    assert "shard-00002.safetensors is missing" in text
    assert main(["activations", "verify", directory]) == 1
    text = capsys.readouterr().out
    assert "shard-00000.safetensors is damaged" in text
    assert text.endswith("3 of 3 shards are not as they were written\n")
    assert main(["activations", "info", directory + "/none"]) == 2
    assert "there are no saved activations" in capsys.readouterr().err
