"""A harvest that ended early is whole as far as it got, and goes on to the same bytes."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import D_VOCAB
from written_by_hand import files

from tl_devicefix import load_activations, save_activations
from tl_devicefix.activation_store import beginning, writing
from tl_devicefix.activation_store.format import TEMPORARY, read_index, shard_name, write_index

NAMES = ["blocks.1.hook_resid_post", "blocks.3.hook_resid_post"]
N_BATCHES = 16


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, D_VOCAB, (4, 9), generator=generator) for _ in range(N_BATCHES)]


@pytest.fixture
def model(folded_on_one: Any) -> Any:
    return folded_on_one("llama")


Start = Callable[..., Any]


@pytest.fixture
def start(model: Any, batches: Any, tmp_path: Path) -> Start:
    """`start(...)` harvests to `tmp_path / "out"`; other options replace those that it has."""

    def start(data: Any = None, **options: Any) -> Any:
        given = {
            "names_filter": NAMES,
            "directory": tmp_path / "out",
            "shard_size": 12000,
            **options,
        }
        model = given.pop("model", start.model)  # type: ignore[attr-defined]
        return save_activations(model, batches if data is None else data, **given, progress=False)

    start.model = model  # type: ignore[attr-defined]
    return start


@pytest.fixture
def begun(start: Start, batches: Any, tmp_path: Path) -> Path:
    """Of a harvest whose data ended with an error."""

    def some() -> Any:
        yield from batches[:10]
        raise InterruptedError

    with pytest.raises(InterruptedError):
        start(some())
    assert 0 < len(load_activations(tmp_path / "out")) < 48
    return tmp_path / "out"


def kill_at(moment: float, job: Callable[[], Any]) -> bool:
    """Run something in a process of its own, and kill that; say whether it was still running."""
    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    time.sleep(moment)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    "n_kills",
    [3, pytest.param(20, marks=pytest.mark.full("three kills do, by default"))],
)
def test_killed_at_any_moment_what_is_there_is_whole_and_the_rest_follows(
    n_kills: int, start: Start, tmp_path: Path
) -> None:
    began = time.perf_counter()
    start(directory=tmp_path / "whole")
    duration = time.perf_counter() - began
    moments = random.Random(n_kills)
    killed = 0
    while killed < n_kills:
        moment = moments.uniform(0, duration / 2)
        if kill_at(moment, lambda: start(resume=True, directory=tmp_path / "out")):
            killed += 1
        else:  # it took less time than the first, or was nearly done
            duration = moment
        with contextlib.suppress(FileNotFoundError):  # killed before there was anything
            there = load_activations(tmp_path / "out")
            assert there.verify() == []
            assert len(there[NAMES[0]][:]) == len(there)

    found = start(resume=True, directory=tmp_path / "out")

    assert found.is_complete
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_what_a_killed_one_left_half_is_cleared_away_and_nothing_else(
    begun: Path, start: Start
) -> None:
    ours, theirs = begun / f"shard-00009.safetensors{TEMPORARY}", begun / f"film{TEMPORARY}"
    for path in (ours, theirs):
        path.write_bytes(b"a part")
    start(resume=True)
    assert not ours.exists()
    assert theirs.exists()


def test_only_what_is_not_there_is_run(
    begun: Path, start: Start, model: Any, tmp_path: Path
) -> None:
    there = len(load_activations(begun))
    ran = []

    def count(activation: torch.Tensor, hook: Any) -> None:
        ran.append(len(activation))

    with model.hooks(fwd_hooks=[(NAMES[0], count)]):
        start(resume=True)

    assert ran[0] == 4  # the first batch, to compare
    assert 4 * N_BATCHES - there <= sum(ran[1:]) < 4 * N_BATCHES - there + 4
    start(directory=tmp_path / "whole")
    assert files(begun) == files(tmp_path / "whole")


def test_a_harvest_that_is_complete_is_left_as_it_is(start: Start, tmp_path: Path) -> None:
    start()
    before = files(tmp_path / "out")
    assert start(resume=True).is_complete
    assert files(tmp_path / "out") == before


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "filter": ({"names_filter": NAMES[:1]}, r"it has blocks.3\S*, which names_filter leaves out"),
    "larger filter": (
        {"names_filter": [*NAMES, "blocks.2.hook_resid_post"]},
        r"it has no blocks.2\.",
    ),
    "dtype": ({"dtype": torch.float16}, "the dtype of blocks.1.* there is float32, not float16"),
    "reduce": ({"transform": lambda a: a[:, :, :3]}, r"the shape of blocks.1.* is \(9, 16\), not"),
    "reduce of the same shape": (
        {"transform": lambda a: a + 1},
        "blocks.1.* of its first batch is not what this model gives now",
    ),
    "keep": ({"token_mask": lambda tokens: tokens > 5}, "it was begun without token_mask"),
    "size of shards": ({"shard_size": 20000}, "shards have .* examples, but with this shard_size"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_to_go_on_with_something_else_is_refused_naming_it(
    other: str, begun: Path, start: Start
) -> None:
    before, (options, message) = files(begun), OTHERS[other]
    with pytest.raises(ValueError, match=rf"the harvest in \S+ is another one: .*{message}"):
        start(resume=True, **options)
    assert files(begun) == before


def test_to_go_on_with_another_model_is_refused_naming_it(
    begun: Path, start: Start, folded_on_one: Any
) -> None:
    with pytest.raises(ValueError, match=r"is another one: its model's \w+ is"):
        start(resume=True, model=folded_on_one("gpt2"))
    index = read_index(begun)
    write_index(begun, replace(index, made_by={**index.made_by, "torch": "1.0"}))
    with pytest.raises(ValueError, match=r"its version of torch is '1.0', not"):
        start(resume=True)


def test_to_go_on_with_other_data_is_refused_naming_it(
    begun: Path, start: Start, batches: Any
) -> None:
    there = len(load_activations(begun))
    other = [*batches[:3], batches[3].flip(1), *batches[4:]]
    with pytest.raises(ValueError, match="has other tokens from example 12 on than batches"):
        start(other, resume=True)
    with pytest.raises(ValueError, match="has other tokens from example 0 on than batches"):
        start(batches[1:], resume=True)
    with pytest.raises(ValueError, match=f"has {there} examples, but batches has 8"):
        start(batches[:2], resume=True)
    start(resume=True)
    with pytest.raises(ValueError, match="is complete with 64 examples, but batches has more"):
        start([*batches, batches[0]], resume=True)


def test_what_is_there_is_not_written_over(begun: Path, start: Start) -> None:
    before = files(begun)
    with pytest.raises(FileExistsError, match=r"of \d+ examples already, of .*: pass resume"):
        start()
    assert files(begun) == before


def test_two_harvests_to_one_directory_are_refused(start: Start, tmp_path: Path) -> None:
    with (
        beginning.alone_in(tmp_path / "out"),
        pytest.raises(RuntimeError, match="someone else is harvesting to"),
    ):
        start()
    assert start().is_complete


@pytest.fixture(params=["a file", "a link"])
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """`theirs("lock")`: a file of the user's in the directory, or the target of a link there."""

    def make(name: str) -> Path:
        there = tmp_path / "out" / name
        there.parent.mkdir()
        if request.param == "a link":
            there.symlink_to(tmp_path / "theirs")
        there.write_text("their own")
        return there

    return make


def test_a_file_of_the_user_s_that_is_called_lock_is_left_as_it_is(
    theirs: Any, start: Start, batches: Any
) -> None:
    file = theirs("lock")
    with pytest.raises(ValueError, match="nothing to harvest"):
        start([])
    start(batches[:2])
    assert file.read_text() == "their own"


def test_so_is_one_that_is_called_as_our_own(theirs: Any, start: Start) -> None:
    file = theirs(beginning.LOCK)
    with pytest.raises(FileExistsError, match="is not a file of tl_devicefix: take it away, or"):
        start()
    assert file.read_text() == "their own"


def test_a_process_that_was_forked_meanwhile_does_not_keep_others_out(
    start: Start, batches: Any
) -> None:
    """As a DataLoader's workers are, which may live on."""
    context = multiprocessing.get_context("fork")
    over = context.Event()
    process = context.Process(target=over.wait)

    def some() -> Any:
        process.start()
        yield from batches[:2]

    start(some())
    try:
        assert start(batches[:2], resume=True).is_complete
    finally:
        over.set()
        process.join()


def test_a_writer_is_waited_for_by_who_is_interrupted(
    start: Start, batches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard = writing.write_shard

    def interrupted(*args: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        return write_shard(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_shard", interrupted)
        # Where tests run beside each other, it is ignored.
        before_it = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                start(batches[:2], shard_size="1MiB")  # one shard, when all is given to the writer
        finally:
            signal.signal(signal.SIGINT, before_it)
    before = files(tmp_path / "out")
    assert not [thread for thread in threading.enumerate() if "harvest" in thread.name]
    assert start(batches[:2], shard_size="1MiB", resume=True).is_complete
    assert before.keys() <= files(tmp_path / "out").keys()


def test_a_loader_may_use_its_memory_again(start: Start, batches: Any) -> None:
    def of_one_piece_of_memory() -> Any:
        tokens = torch.empty_like(batches[0])
        for each in batches:
            tokens.copy_(each)
            yield {"tokens": tokens}

    assert torch.equal(start(of_one_piece_of_memory()).tokens[:], torch.cat(batches))


def test_a_disk_that_is_full_leaves_what_was_written(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, of: Any) -> None:
            self._of = of

        def __call__(self, path: Path, *args: Any) -> Any:
            if path.name.startswith("shard-00003"):
                path.with_name(path.name + TEMPORARY).write_bytes(b"a part")
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._of(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_shard", Full(writing.write_shard))
        with pytest.raises(OSError, match=r"the disk of \S+ is full: 27 examples.*resume=True"):
            start()
    assert len(load_activations(tmp_path / "out")) == 27
    start(directory=tmp_path / "whole")
    start(resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_disk_without_room_is_refused_before_anything_is_written(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = beginning.shutil.disk_usage(tmp_path)._replace(free=2**16)
    monkeypatch.setattr(beginning.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"the harvest takes .* more, but the disk of .* 64.0 KiB"):
        start()
    assert not (tmp_path / "out").exists()


def test_a_batch_of_another_width_leaves_what_was_written(
    start: Start, batches: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="batch 12 has 8 tokens in a row, but those before it 9"):
        start([*batches[:12], batches[12][:, 1:]])
    assert len(load_activations(tmp_path / "out")) > 0
    assert start(resume=True).is_complete


def test_a_shard_that_is_damaged_is_mended_by_taking_it_away(
    start: Start, batches: Any, tmp_path: Path
) -> None:
    """As docs/save_activations.md has it."""
    index, before = start(batches[:6]).index, files(tmp_path / "out")
    damaged = tmp_path / "out" / index.shards[2].file
    damaged.write_bytes(before[damaged.name][:-1] + b"\0")  # in a mask
    with pytest.raises(ValueError, match=r"attention_mask .*, unless a shard is damaged: see"):
        start(batches[:6], resume=True)
    for each in index.shards[2:]:
        (tmp_path / "out" / each.file).unlink()
    assert start(batches[:6], resume=True).is_complete
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("missing", "data", "options", "what"),
    [
        ([0], slice(6), OTHERS["reduce of the same shape"][0], "it back, or harvest to another"),
        (range(6), slice(6), OTHERS["reduce of the same shape"][0], "it back, or harvest to"),
        ([1], slice(3), {}, "it back, delete those after shard-00001.safetensors too, or harvest"),
    ],
)
def test_shards_that_others_follow_are_not_harvested_again(
    missing: Any,
    data: slice,
    options: Any,
    what: str,
    begun: Path,
    start: Start,
    batches: Any,
) -> None:
    """They would be another model's, or of fewer examples: a disk may say so for a moment."""
    for number in missing:
        (begun / shard_name(number)).unlink(missing_ok=True)
    before = files(begun)
    with pytest.raises(FileNotFoundError, match=rf"-0000\d.safetensors is missing: put {what}"):
        start(batches[data], resume=True, **options)
    assert files(begun) == before


def test_tokens_that_were_kept_are_compared(start: Start, batches: Any, tmp_path: Path) -> None:
    start(batches[:6], token_mask=lambda tokens: tokens > 5)
    calls = iter(range(6))
    with pytest.raises(ValueError, match="has other kept from example 12 on than batches"):
        start(token_mask=lambda tokens: tokens > (5 if next(calls) != 3 else 6), resume=True)


def test_a_shard_of_many_small_batches_fills_after_large_ones(start: Start, batches: Any) -> None:
    """Whatever has room for large ones must not keep the small ones out."""
    small = batches[0][:1]
    found = start([torch.cat(batches[:2])] * 12 + [small] * 40, shard_size=40000)
    assert found.index.examples_per_shard == 32
    assert len(found) == 136


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no data": ({"data": []}, ValueError, "nothing to harvest"),
    "a text": ({"data": "w4 w5"}, TypeError, "put it in a list"),
    "an item that is none": ({"data": [3]}, TypeError, "item 0 of the batches is a int"),
    "a batch of none": (
        {"data": [torch.zeros(0, 9).long()]},
        ValueError,
        r"must be tokens \[batch, pos\], but is \[0, 9\]",
    ),
    "a dict without tokens": ({"data": [{"content": "w4"}]}, TypeError, r"with \['content'\]"),
    "nothing kept": ({"names_filter": lambda name: False}, ValueError, "keeps no activation"),
    "no byte": ({"shard_size": 0}, ValueError, "shard_size=0 is no byte"),
    "no byte as a text": ({"shard_size": "0.0KB"}, ValueError, "shard_size='0.0KB' is no byte"),
    "no size": ({"shard_size": "much"}, ValueError, "'much' is no size"),
    "no batch size": ({"batch_size": 0}, ValueError, "1 or more examples, but is 0"),
    "a mask": ({"attention_mask": torch.ones(2)}, TypeError, "give batches that are dicts"),
    "keep of another shape": (
        {"token_mask": lambda tokens: tokens[0] > 3},
        ValueError,
        "token_mask must return booleans of the tokens' shape",
    ),
    "keep of patterns": (
        {"names_filter": "blocks.1.attn.hook_pattern", "token_mask": "attention_mask"},
        ValueError,
        "token_mask cannot leave tokens out of blocks.1.attn.hook_pattern",
    ),
    "keep by another name": (
        {"token_mask": "padding"},
        ValueError,
        "token_mask must be a function of tokens, or \"attention_mask\", but is 'padding'",
    ),
    "a reduce for what is not kept": (
        {"transform": {"blocks.1.hook_resid_pots": torch.abs}},
        ValueError,
        "transform has blocks.1.hook_resid_pots, which is not kept; did you mean 'blocks.1",
    ),
    "a reduce that returns two": (
        {"transform": lambda a: (a, a)},
        TypeError,
        r"transform must return a tensor of blocks.1.\S*, but returned a tuple",
    ),
    "tensors of which one may be a mask": (
        {"data": [[torch.ones(2, 9).long()] * 2]},
        TypeError,
        "item 0 of the batches is a list: give",
    ),
    "a side of padding": ({"padding_side": "left"}, TypeError, "set model.tokenizer.padding_side"),
    "a dtype": ({"transform": lambda a: a.to(torch.complex64)}, ValueError, "complex64, which"),
    "no model": ({"model": 3}, TypeError, "the model must be a"),
    "what has no row for each example": (
        {"transform": lambda a: a.mean((0, 1))},
        ValueError,
        r"no row for each example, and is not the same in each batch",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_harvested_is_refused_in_a_sentence(what: str, start: Start) -> None:
    options, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        start(**options)
