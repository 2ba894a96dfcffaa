"""What would fit is found with few dry runs, and each that is told was tried."""

from __future__ import annotations

import re
from ast import literal_eval
from typing import Any

import pytest

from tl_devicefix import estimate
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.planning.usage import Setting

pytestmark = pytest.mark.skipif(not has_hooked_transformer(), reason="no HookedTransformer")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Setting]:
    """The settings that are tried, as they are."""
    settings: list[Setting] = []
    on_device = Setting._on_device

    def note(self: Setting, index: int, *args: Any) -> Any:
        settings.extend([self] if index == 0 else [])
        return on_device(self, index, *args)

    monkeypatch.setattr(Setting, "_on_device", note)
    return settings


def test_what_cannot_hold_the_weights_is_not_tried(tried: Any) -> None:
    result = estimate("meta-llama/Llama-2-70b-hf", 1, seq_len=64)
    assert "n_devices=4, or max_memory={0: " in result.advice
    message = [item for item in tried if item.n_devices == 4]
    assert message
    assert len(tried) <= 4
    assert not any(item.n_devices in (2, 3) for item in tried)


def test_more_devices_are_told_as_the_user_named_them() -> None:
    options: Any = {"first_n_layers": 8, "dtype": "bfloat16", "seq_len": 64}
    result = estimate("meta-llama/Llama-2-70b-hf", max_memory={0: "6GiB", 1: "6GiB"}, **options)
    message = re.search(r"max_memory=(\{.*?\})", result.advice)
    assert message is not None, result.advice
    room = literal_eval(message[1])
    assert set(room.values()) == {"6GiB"}
    assert len(room) > 2
    assert estimate("meta-llama/Llama-2-70b-hf", max_memory=room, **options).fits


def test_a_job_that_is_too_large_is_halved_in_few_steps(tried: Any) -> None:
    options: Any = {"first_n_layers": 1, "seq_len": 256, "batch_size": 512, "max_memory": "1500MiB"}
    result = estimate("gpt2", **options)
    batches = {item.job.batch_size for item in tried if item.job.seq_len == 256}
    message = next(part for part in result.advice.split(", or ") if "batch_size=" in part)
    batch = int(message.partition("batch_size=")[2].rstrip("."))
    assert {512, batch, 2 * batch} <= batches
    assert estimate("gpt2", **{**options, "batch_size": batch}).fits
    assert not estimate("gpt2", **{**options, "batch_size": 2 * batch}).fits
