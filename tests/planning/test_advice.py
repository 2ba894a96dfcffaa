"""What would fit is found with few rehearsals, and each that is told was rehearsed."""

from __future__ import annotations

import re
from ast import literal_eval
from typing import Any

import pytest

from tl_devicefix import estimate
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.planning import advice, usage

pytestmark = pytest.mark.skipif(not has_hooked_transformer(), reason="no HookedTransformer")


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[usage.Setting]:
    """The settings that are rehearsed, as they are."""
    settings: list[usage.Setting] = []
    measure = usage.Setting.measure

    def note(self: usage.Setting) -> Any:
        settings.append(self)
        return measure(self)

    monkeypatch.setattr(usage.Setting, "measure", note)
    return settings


def distinct(settings: list[usage.Setting]) -> int:
    return len({id(each) for each in settings})


def test_what_cannot_hold_the_weights_is_not_rehearsed(rehearsed: Any) -> None:
    found = estimate("meta-llama/Llama-2-70b-hf", 1, seq_len=64)
    assert "n_devices=4, or max_memory={0: " in found.advice
    told = [each for each in rehearsed if each.n_devices == 4]
    assert told
    assert distinct(rehearsed) <= 4
    assert not any(each.n_devices in (2, 3) for each in rehearsed)


def test_more_devices_are_told_as_the_user_named_them() -> None:
    options: Any = {"first_n_layers": 8, "dtype": "bfloat16", "seq_len": 64}
    found = estimate("meta-llama/Llama-2-70b-hf", max_memory={0: "6GiB", 1: "6GiB"}, **options)
    told = re.search(r"max_memory=(\{.*?\})", found.advice)
    assert told is not None, found.advice
    room = literal_eval(told[1])
    assert set(room.values()) == {"6GiB"}
    assert len(room) > 2
    assert estimate("meta-llama/Llama-2-70b-hf", max_memory=room, **options).fits


def test_a_job_that_is_too_large_is_halved_in_few_steps(rehearsed: Any) -> None:
    options: Any = {"first_n_layers": 1, "seq_len": 256, "batch_size": 512, "max_memory": "1500MiB"}
    found = estimate("gpt2", **options)
    batches = {each.job.batch_size for each in rehearsed if each.job.seq_len == 256}
    told = next(part for part in found.advice.split(", or ") if "batch_size=" in part)
    batch = int(told.partition("batch_size=")[2].rstrip("."))
    assert {512, batch, 2 * batch} <= batches
    assert len(batches) < 9
    assert estimate("gpt2", **{**options, "batch_size": batch}).fits
    assert not estimate("gpt2", **{**options, "batch_size": 2 * batch}).fits


@pytest.mark.parametrize("fitting_from", range(9))
def test_the_least_change_is_found(fitting_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fits(change: Any) -> bool:
        tried.append(change)
        return change >= fitting_from

    monkeypatch.setattr(advice, "_fits", fits)
    changes: Any = [(f"change {index}", index) for index in range(8)]
    expected = f"change {fitting_from}" if fitting_from < 8 else None
    assert advice._least(changes) == expected
    assert expected is None or fitting_from in tried
    assert len(tried) == len(set(tried)) <= 5
