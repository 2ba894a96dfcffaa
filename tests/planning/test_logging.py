"""What is logged is logged by the package's own loggers: the root logger is the user's."""

from __future__ import annotations

import logging

import pytest
import transformers

import tl_devicefix
from tl_devicefix import plan
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

CONFIG = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=16)


def test_the_root_logger_gets_no_handler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "gpt2" if has_hooked_transformer() else CONFIG
    # As in a user's process; pytest has handlers of its own.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    heard = logging.getLogger("tl_devicefix")
    monkeypatch.setattr(heard, "handlers", [caplog.handler])

    with tl_devicefix.simulate(2):
        plan(name, 1, max_memory={0: "1GiB", 1: "1GiB"})

    assert logging.getLogger().handlers == []
    assert "max_memory names sim:1" in caplog.text
    assert {record.name for record in caplog.records} == {"tl_devicefix.placement.deciding"}
