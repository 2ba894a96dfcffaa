"""Batches of tokens from disk: each token once, in an order that a seed says."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from written_by_hand import D_MODEL, N_EXAMPLES, PER_SHARD, REDUCED, RESID, WIDTH, write_by_hand

from tl_devicefix.activation_store import token_batches

N_TOKENS = N_EXAMPLES * WIDTH


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(token_batches, "BYTES_OF_BLOCK", 5 * D_MODEL * 2)  # five tokens
    return write_by_hand(tmp_path)


def numbers(batches: Any) -> list[int]:
    """Of the tokens, in the order in which they are handed out."""
    return [int(row[0]) for batch in batches for row in batch]


def assert_no_thread_reads() -> None:
    for thread in threading.enumerate():
        if "activations reader" in thread.name:
            thread.join(10)
            assert not thread.is_alive()


def test_every_token_is_handed_out_once_an_epoch_in_another_order(written):
    order = numbers(written.activations(RESID, 7, epochs=2))

    assert len(order) == 2 * N_TOKENS
    first, second = order[:N_TOKENS], order[N_TOKENS:]
    assert sorted(first) == sorted(second) == list(range(N_TOKENS))
    assert first != second
    assert first != sorted(first)


def test_the_order_is_that_of_the_seed_and_mixes_all_shards(written):
    orders = [numbers(written.activations(RESID, 7, seed=seed)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    per_shard = PER_SHARD * WIDTH
    in_large_batches = numbers(written.activations(RESID, per_shard, seed=3))
    assert in_large_batches == orders[0]
    # What fills a shard has tokens of others.
    assert len({number // per_shard for number in orders[0][:per_shard]}) > 1


def test_without_shuffling_they_come_as_on_disk(written):
    batches = list(written.activations(RESID, 7, shuffle=False))
    assert [len(batch) for batch in batches] == [7] * 9 + [3]
    assert torch.equal(torch.cat(batches), written[RESID][:].flatten(0, 1))
    assert batches[0].dtype == torch.bfloat16


@pytest.mark.parametrize("n_batches", [0, 9, 14])
def test_others_go_on_where_some_were(n_batches, written):
    options: Any = {"batch_size": 7, "epochs": 2, "seed": 1}
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


def test_another_shuffle_is_refused(written):
    with pytest.raises(ValueError, match="shuffle must be True or False, but is 'exact'"):
        written.activations(RESID, 7, shuffle="exact")


def test_there_is_no_end_of_them_where_epochs_is_none_but_of_the_thread_that_reads(written):
    batches = written.activations(RESID, 20, epochs=None)
    assert sorted(numbers(itertools.islice(batches, 8)))[:4] == [0, 0, 1, 1]
    with pytest.raises(TypeError, match="do not end"):
        len(batches)
    batches.close()
    assert_no_thread_reads()
    dropped = written.activations(RESID, 7)
    next(dropped)
    del dropped
    assert_no_thread_reads()
    assert len(written.activations(RESID, 7, epochs=3)) == 30


def test_a_script_may_end_amid_them_and_imports_no_models(written):
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
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stdout) == (0, "7\n[]\n"), ended.stderr


def test_what_was_reduced_comes_by_example(written):
    assert sorted(numbers(written.activations(REDUCED, 4))) == list(range(N_EXAMPLES))


def test_after_an_error_the_same_batch_is_read_again(written):
    expected = numbers(written.activations(RESID, 7))
    batches, path = (
        written.activations(RESID, 7),
        written.directory / written.index.shards[1].file,
    )
    content, seen = path.read_bytes(), []
    path.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"shard-00001.*is missing.*activations verify"):
            seen.extend(batches)
    path.write_bytes(content)
    assert numbers([*seen, *batches]) == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float32], ids=str)
def test_rows_of_any_dtype_are_shuffled(dtype, tmp_path):
    """Also of those that torch cannot index."""
    written = write_by_hand(tmp_path, dtype)
    result = torch.cat([item.float() for item in written.activations(RESID, 7)])
    expected = written[RESID][:].flatten(0, 1).float()
    assert sorted(result.tolist()) == sorted(expected.tolist())
