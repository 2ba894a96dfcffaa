"""What ended early is complete as far as it goes, and goes on to the same bytes."""

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from hf_models import D_VOCAB
from tqdm.auto import tqdm
from written_by_hand import files

from tl_devicefix import load_activations, save_activations
from tl_devicefix.activation_store import save, writer
from tl_devicefix.activation_store.format import (
    TEMPORARY,
    read_index,
    shard_name,
    write_index,
)

pytestmark = pytest.mark.once

NAMES = ["blocks.1.hook_resid_post", "blocks.3.hook_resid_post"]
N_BATCHES = 16


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, D_VOCAB, (4, 9), generator=generator) for _ in range(N_BATCHES)]


@pytest.fixture
def model(on_one):
    return on_one("llama", folded=True)


@pytest.fixture
def start(model, batches, tmp_path):
    """`start(...)` saves to `tmp_path / "out"`; other options replace those that it has."""

    def start(data=batches, **options):
        defaults = {"names_filter": NAMES, "directory": tmp_path / "out", "shard_size": 12000}
        options = {"model": model, **defaults, **options}
        return save_activations(batches=data, **options, progress=False)

    return start


@pytest.fixture
def begun(start, batches, tmp_path):
    """A directory of batches that ended with an error."""

    def some():
        yield from batches[:10]
        raise InterruptedError

    with pytest.raises(InterruptedError):
        start(some())
    assert 0 < len(load_activations(tmp_path / "out")) < 48
    return tmp_path / "out"


def kill_at(moment, job):
    """Run something in a process of its own, and kill that; say whether it was still running."""

    def run():
        # The lock of progress bars is one for all processes, and would be lost with this one.
        for cls in tqdm.__mro__:
            if "_lock" in vars(cls):
                cls._lock = threading.RLock()
        job()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    time.sleep(moment)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def test_killed_job_leaves_whole_shards_and_resumes_the_rest(start, tmp_path):
    began = time.perf_counter()
    start(directory=tmp_path / "whole")
    duration = time.perf_counter() - began
    moments = random.Random(0)
    killed = 0
    while killed < 3:
        moment = moments.uniform(0, duration / 2)
        if kill_at(moment, lambda: start(resume=True, directory=tmp_path / "out")):
            killed += 1
        else:  # it took less time than the first, or was nearly done
            duration = moment
        with contextlib.suppress(FileNotFoundError):  # killed before there was anything
            h = load_activations(tmp_path / "out")
            assert h.verify() == []
            assert len(h[NAMES[0]][:]) == len(h)

    assert start(resume=True, directory=tmp_path / "out").is_complete
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_only_batches_that_are_not_on_disk_are_run(begun, start, model, tmp_path):
    missing = 4 * N_BATCHES - len(load_activations(begun))
    ran = []

    def count(activation, hook):
        ran.append(len(activation))

    with model.hooks(fwd_hooks=[(NAMES[0], count)]):
        start(resume=True)

    assert ran[0] == 4  # the first batch, to see what is saved
    assert missing <= sum(ran[1:]) < missing + 4
    start(directory=tmp_path / "whole")
    assert files(begun) == files(tmp_path / "whole")
    assert start(resume=True, shard_size=20000).is_complete  # shards are as large as the first
    assert files(begun) == files(tmp_path / "whole")


OTHER_OPTIONS = {
    r"of \d+ examples already, of .*: repeat that call": {"resume": False},
    r"in \S+ are not .*blocks.3\S* was .*, but is missing": {"names_filter": NAMES[:1]},
    r"blocks.2\S* was not saved, but is float32": {
        "names_filter": [*NAMES, "blocks.2.hook_resid_post"]
    },
    "blocks.1.* was float32 .*, but is float16": {"dtype": torch.float16},
    r"blocks.1.* was float32 \[9, 16\] by ex": {"transform": lambda a: a[:, :, :3]},
    "by example, but .* by token": {"token_mask": lambda tokens: tokens > 5},
}
"""What is said of options that the first call had not."""


def test_resuming_with_other_options_or_versions_is_refused(begun, start):
    before = files(begun)
    for message, options in OTHER_OPTIONS.items():
        with pytest.raises((ValueError, FileExistsError), match=message):
            start(**{"resume": True, **options})
    index = read_index(begun)
    write_index(begun, replace(index, made_by={**index.made_by, "torch": "1.0"}))
    with pytest.raises(ValueError, match=r"version of torch was 1.0, but is .* repeat"):
        start(resume=True)
    write_index(begun, index)
    another = "another process is saving activations to"
    with save.locked(begun), pytest.raises(RuntimeError, match=another):
        start(resume=True)
    assert files(begun) == before


def test_resuming_with_another_model_or_data_is_refused(begun, start, batches, on_one):
    with pytest.raises(ValueError, match=r"the model's \w+ was .*; repeat the first call's model"):
        start(resume=True, model=on_one("gpt2", folded=True))
    saved = len(load_activations(begun))
    others = {
        "from example 12 on, batches has other values of tokens": [
            *batches[:3], batches[3].flip(1), *batches[4:],
        ],
        "from example 0 on, batches has other values of tokens": batches[1:],
        f"they have {saved} examples, but batches has 8": batches[:2],
        "batch 12 has 8 tokens in a row, but those before it have 9": [
            *batches[:12], batches[12][:, 1:],
        ],
    }  # fmt: skip
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            start(other, resume=True)
    assert start(resume=True).is_complete
    with pytest.raises(ValueError, match="complete with 64 examples, but batches has more"):
        start([*batches, batches[0]], resume=True)


def test_an_interrupt_waits_for_the_writer(start, batches, tmp_path, monkeypatch):
    write_shard = writer.write_shard

    def interrupted(*args):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        return write_shard(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_shard", interrupted)
        # Where tests run beside each other, it is ignored.
        before_it = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt) as caught:
                start(batches[:2], shard_size="1MiB")  # one shard, when all is given to the writer
        finally:
            signal.signal(signal.SIGINT, before_it)
    assert_says_how_far(caught.value, len(load_activations(tmp_path / "out")))
    before = files(tmp_path / "out")
    assert not [thread for thread in threading.enumerate() if "activations" in thread.name]
    assert start(batches[:2], shard_size="1MiB", resume=True).is_complete
    assert before.keys() <= files(tmp_path / "out").keys()


def test_loader_may_reuse_the_memory_of_its_batches(start, batches):
    def of_one_piece_of_memory():
        tokens = torch.empty_like(batches[0])
        for item in batches:
            tokens.copy_(item)
            yield {"tokens": tokens}

    assert torch.equal(start(of_one_piece_of_memory()).tokens[:], torch.cat(batches))


def assert_says_how_far(error, n_examples):
    if sys.version_info >= (3, 11):  # exceptions have notes
        assert error.__notes__[0].startswith(f"{n_examples} examples are complete in ")
        assert "resume=True" in error.__notes__[0]


def test_a_disk_that_is_full_leaves_complete_shards(start, tmp_path, monkeypatch):
    write_shard = writer.write_shard

    def full(path, *args):
        if path.name.startswith("shard-00003"):
            path.with_name(path.name + TEMPORARY).write_bytes(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_shard(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_shard", full)
        with pytest.raises(OSError, match="No space left") as caught:
            start()
    assert len(load_activations(tmp_path / "out")) == 27
    assert_says_how_far(caught.value, 27)
    start(directory=tmp_path / "whole")
    start(resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_shard_that_is_damaged_is_mended_by_taking_it_away(start, batches, tmp_path):
    """As docs/save_activations.md has it."""
    index, before = start(batches[:6]).index, files(tmp_path / "out")
    damaged = tmp_path / "out" / index.shards[2].file
    damaged.write_bytes(before[damaged.name][:-1] + b"\0")  # in a mask
    with pytest.raises(ValueError, match=r"attention_mask.*, or a shard is damaged"):
        start(batches[:6], resume=True)
    for shard in index.shards[2:]:
        (tmp_path / "out" / shard.file).unlink()
    assert start(batches[:6], resume=True).is_complete
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize(("missing", "n_batches"), [(range(6), 6), ([1], 3)])
def test_shards_that_others_follow_are_not_computed_again(
    missing, n_batches, begun, start, batches
):
    """They would be another model's, or of fewer examples: a disk may say so for a moment."""
    for number in missing:
        (begun / shard_name(number)).unlink(missing_ok=True)
    before = files(begun)
    message = r"-0000\d.safetensors is missing, .*: put it back, or give another directory"
    with pytest.raises(FileNotFoundError, match=message):
        start(batches[:n_batches], resume=True)
    assert files(begun) == before


def test_a_shard_of_many_small_batches_fills_after_large_ones(start, batches):
    """Room for large ones must not keep the small ones out."""
    small = batches[0][:1]
    h = start([torch.cat(batches[:2])] * 12 + [small] * 40, shard_size=40000)
    assert h.index.examples_per_shard == 32
    assert len(h) == 136
