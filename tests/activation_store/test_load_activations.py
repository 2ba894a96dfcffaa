"""`load_activations` reads what is on disk without a model, and hands tokens out in batches."""

import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from written_by_hand import D_MODEL, N_EXAMPLES, PER_SHARD, REDUCED, RESID, WIDTH, write_by_hand

import tl_devicefix
from tl_devicefix.activation_store import token_batches
from tl_devicefix.activation_store.format import INDEX, VERSION

pytestmark = pytest.mark.once


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(token_batches, "BYTES_OF_BLOCK", 5 * D_MODEL * 2)  # five tokens
    return write_by_hand(tmp_path / "written")


@pytest.fixture
def all_of_it():
    numbers = torch.arange(N_EXAMPLES * WIDTH).view(N_EXAMPLES, WIDTH, 1)
    return numbers.bfloat16().repeat(1, 1, D_MODEL)


INDICES = [
    *(3, -1, slice(3, 7), slice(None), slice(5, 2), slice(-3, None), slice(1, 11, 4)),
    *([5, 1, 10], [-1, 5, 5], [], torch.tensor([2, 9]), np.array([7, 0]), torch.tensor(4)),
]


def test_indexing_reads_what_indexing_a_tensor_gives(written, all_of_it):
    assert len(written) == len(written[RESID]) == N_EXAMPLES
    assert written[RESID].shape == tuple(all_of_it.shape)
    for index in INDICES:
        expected = all_of_it[index if isinstance(index, slice) else torch.as_tensor(index).long()]
        actual = written[RESID][index]
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), index
    assert torch.equal(written[RESID][::-1], all_of_it.flip(0))
    mask = [number in (2, 9) for number in range(N_EXAMPLES)]
    assert torch.equal(written[RESID][mask], all_of_it[[2, 9]])
    assert [int(number) for number in written[REDUCED]] == list(range(N_EXAMPLES))  # and ends


def test_changing_a_read_tensor_leaves_the_file_unchanged(written):
    written[RESID][3].zero_()
    assert written[RESID][3].any()


def test_safetensors_alone_reads_the_shards(written, all_of_it):
    index = json.loads((written.directory / INDEX).read_text())
    shards = [load_file(written.directory / shard["file"]) for shard in index["shards"]]
    assert torch.equal(torch.cat([shard[RESID] for shard in shards]), all_of_it)
    assert torch.equal(torch.cat([shard["tokens"] for shard in shards]), written.tokens[:])


def test_index_of_another_version_or_of_other_files_is_refused(written):
    path = written.directory / INDEX
    text = path.read_text()
    of_others = r"damaged \(it is not the one in the index\)"
    for old, new, message in (
        (f'"version": {VERSION}', '"version": 99', rf"version 99 of .* reads version {VERSION}"),
        ("00001.safe", "00000.safe", of_others),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            tl_devicefix.load_activations(written.directory)[RESID][4]
    with pytest.raises(FileNotFoundError, match=r"there is no index\.json in"):
        tl_devicefix.load_activations(written.directory / "none")


def test_a_shard_is_compared_with_the_index_when_it_is_read(written):
    first, second, third = (written.directory / shard.file for shard in written.index.shards)
    first.write_bytes(second.read_bytes())  # as large
    third.write_bytes(third.read_bytes()[:-1])
    h = tl_devicefix.load_activations(written.directory)
    for example in (0, 10):
        with pytest.raises(ValueError, match=r"is damaged \(.*verify\(\) checks all shards"):
            h[RESID][example]
    assert h[RESID][5].any()
    third.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00002.safetensors is missing.*verify"):
        h.tokens[10]
    assert h.verify() == [
        "shard-00000.safetensors is damaged: it is not as it was written",
        "shard-00002.safetensors is missing",
    ]


def test_activations_are_listed(written):
    text = str(written)
    assert "11 examples of none" in text
    assert f"{RESID}: bfloat16 [11, 6, 4]" in text
    assert written.verify() == []


N_TOKENS = N_EXAMPLES * WIDTH


def numbers(batches):
    """Of the tokens, in the order in which they are handed out."""
    return [int(row[0]) for batch in batches for row in batch]


def assert_no_thread_reads():
    for thread in threading.enumerate():
        if "activations reader" in thread.name:
            thread.join(10)
            assert not thread.is_alive()


def test_each_epoch_hands_out_every_token_once_shuffled_anew(written):
    order = numbers(written.activations(RESID, 7, epochs=2))
    assert len(order) == 2 * N_TOKENS
    first, second = order[:N_TOKENS], order[N_TOKENS:]
    assert sorted(first) == sorted(second) == list(range(N_TOKENS))
    assert first != second
    assert first != sorted(first)
    # What was reduced comes by example.
    assert sorted(numbers(written.activations(REDUCED, 4))) == list(range(N_EXAMPLES))


def test_the_order_is_that_of_the_seed_and_mixes_all_shards(written):
    orders = [numbers(written.activations(RESID, 7, seed=seed)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    per_shard = PER_SHARD * WIDTH
    in_large_batches = numbers(written.activations(RESID, per_shard, seed=3))
    assert in_large_batches == orders[0]
    # What fills a shard has tokens of others.
    assert len({number // per_shard for number in orders[0][:per_shard]}) > 1


def test_unshuffled_batches_come_in_the_order_on_disk(written):
    batches = list(written.activations(RESID, 7, shuffle=False))
    assert [len(batch) for batch in batches] == [7] * 9 + [3]
    assert torch.equal(torch.cat(batches), written[RESID][:].flatten(0, 1))
    assert batches[0].dtype == torch.bfloat16


@pytest.mark.parametrize("n_batches", [0, 14])
def test_state_dict_resumes_other_batches_where_it_was_taken(n_batches, written):
    options = {"batch_size": 7, "epochs": 2, "seed": 1}
    first = written.activations(RESID, **options)
    seen = list(itertools.islice(first, n_batches))
    others = written.activations(RESID, **options)
    others.load_state_dict(first.state_dict())
    expected = numbers(written.activations(RESID, **options))
    assert numbers([*seen, *others]) == expected
    assert numbers([*seen, *first]) == expected
    first = written.activations(RESID, **options)
    state = first.state_dict()
    list(itertools.islice(first, n_batches))
    first.load_state_dict(state)
    assert numbers(first) == expected
    with pytest.raises(ValueError, match="has seed=1, but these batches have 2"):
        written.activations(RESID, **{**options, "seed": 2}).load_state_dict(first.state_dict())


def test_epochs_none_iterates_until_closed_or_dropped(written):
    batches = written.activations(RESID, 20, epochs=None)
    assert sorted(numbers(itertools.islice(batches, 8)))[:4] == [0, 0, 1, 1]
    with pytest.raises(TypeError, match="have no length"):
        len(batches)
    batches.close()
    assert_no_thread_reads()
    dropped = written.activations(RESID, 7)
    next(dropped)
    del dropped
    assert_no_thread_reads()
    assert len(written.activations(RESID, 7, epochs=3)) == 30


def test_a_script_that_only_reads_imports_no_models(written):
    script = f"""
        import sys
        import tl_devicefix
        h = tl_devicefix.load_activations({str(written.directory)!r})
        batches = h.activations({RESID!r}, 7)
        print(len(next(batches)))
        large = {{"transformer_lens", "transformers", "bitsandbytes", "peft", "datasets"}}
        print(sorted(large & sys.modules.keys()))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TL_DEVICEFIX_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "7\n[]\n"), ended.stderr


def test_rows_of_a_dtype_that_torch_cannot_index_are_shuffled(tmp_path):
    written = write_by_hand(tmp_path, torch.float8_e4m3fn)
    result = torch.cat([item.float() for item in written.activations(RESID, 7)])
    expected = written[RESID][:].flatten(0, 1).float()
    assert sorted(result.tolist()) == sorted(expected.tolist())
