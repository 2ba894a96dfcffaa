"""`estimate`: what a job takes on each device, and what would fit if it does not."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from typing import Any

import pytest
import torch

from tl_devicefix import Estimate, estimate, plan
from tl_devicefix.__main__ import main
from tl_devicefix.planning.usage import Setting

GIB = 2**30


def test_printing_shows_a_table_and_the_verdict() -> None:
    lines = repr(estimate("gpt2", 2, cache="resid_post", max_memory="24GiB")).splitlines()
    assert lines[0] == "gpt2, float32: batch 1, 1024 tokens, caching resid_post"
    heads = ("device", "components", "weights", "buffers", "cached", "working", "total", "headroom")
    assert lines[1].split() == list(heads)
    assert lines[2].startswith("0 (home)  embed, pos_embed, blocks.0, ln_final, unembed")
    assert lines[-1] == "It fits into 24.00 GiB a device."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an int of 1 or more, but is 0"),
        ({"n_devices": 0}, "n_devices must be from 1 to 64, but is 0"),
        ({"cache": ""}, "but is ''"),
        ({"cache": ["z"]}, "cache must be 'all' or names"),
        ({"gather": 1}, "gather must be 'cpu' or a device's index below 1, but is 1"),
        ({"gather": "sim:7"}, "gather must be 'cpu'"),
        ({"max_memory": "much"}, "but is 'much'"),
        ({"max_memory": {0: "9" * 400 + "GiB"}}, r"max_memory\[0\] must be .* but is '999\S*GiB'"),
        ({"attn_implementation": "spda"}, "must be 'sdpa' or 'eager', but is 'spda'"),
        ({"memory": "1e999GiB"}, "but is '1e999GiB'"),
        ({"n_devices": 10**9}, "n_devices must be from 1 to 64, but is 1000000000"),
        ({"device_map": {"": 10**9}}, "n_devices must be from 1 to 64"),
        ({"hosts": [10**9]}, "n_devices must be from 1 to 64"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate("gpt2", **{"seq_len": 8, **options})


@pytest.mark.parametrize("model", [None, 3, torch.nn.Linear(2, 2)])
@pytest.mark.parametrize("function", [estimate, plan])
def test_what_is_no_model(function: Any, model: Any) -> None:
    with pytest.raises(ValueError, match=r"^a [A-Za-z]+ is neither a model's name"):
        function(model)


def test_cached_names_are_whole_and_may_have_spaces_between() -> None:
    both = estimate("gpt2", cache=" resid_post , hook_z", seq_len=8).devices[0].cached
    assert both == 2 * 12 * 8 * 768 * 4


def test_devices_may_be_named_as_where_there_are_gpus() -> None:
    result = estimate("gpt2", device_map={"": "cuda:0", "blocks.3": "cuda:1"}, seq_len=8)
    assert [item.components for item in result.devices][1] == "blocks.3"
    assert (
        estimate("gpt2", max_memory={"cuda:1": "24GiB"}, seq_len=8).devices[0].capacity == 80 * GIB
    )


def test_generating_is_without_gradients_and_without_the_forward_s_peak() -> None:
    plain = estimate("gpt2", 2, max_new_tokens=8, seq_len=256)
    both = estimate("gpt2", 2, max_new_tokens=8, seq_len=256, gradients=True)
    assert [d.kv_cache for d in plain.devices] == [d.kv_cache for d in both.devices]
    forward = estimate("gpt2", 2, seq_len=256)
    assert plain.devices[1].working < forward.devices[1].working


def test_gradients_of_offloaded_blocks_are_on_the_host() -> None:
    result = estimate("gpt2", gradients=True, seq_len=8, device_map={"": 0, "blocks": "cpu"})
    assert result.devices[-1].total == 2 * result.devices[-1].weights > 0


# --------------------------------------------------------------------------------------------
# What would fit


def told(result: Estimate, change: str) -> Any:
    """The value of an argument with which it would fit."""
    assert not result.fits
    message = re.search(rf"{change}=(\{{.*?\}}|\w+)", result.advice)
    assert message is not None, result.advice
    return message[1] if message[1].isidentifier() else literal_eval(message[1])


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"max_memory": "4GiB"}, "n_devices"),
        ({"max_memory": "4GiB"}, "dtype"),
        ({"batch_size": 16, "seq_len": 512, "max_memory": "6.4GiB"}, "batch_size"),
    ],
)
def test_what_it_says_would_fit_does(options: dict[str, Any], change: str) -> None:
    options["first_n_layers"] = 4
    value = told(estimate("EleutherAI/pythia-6.9b", **options), change)
    assert estimate("EleutherAI/pythia-6.9b", **{**options, change: value}).fits


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
    assert any(item.n_devices == 4 for item in tried)
    assert len(tried) <= 4
    assert not any(item.n_devices in (2, 3) for item in tried)


def test_more_devices_are_told_as_the_user_named_them() -> None:
    options: Any = {"first_n_layers": 8, "dtype": "bfloat16", "seq_len": 64}
    result = estimate("meta-llama/Llama-2-70b-hf", max_memory={0: "6GiB", 1: "6GiB"}, **options)
    room = told(result, "max_memory")
    assert set(room.values()) == {"6GiB"}
    assert len(room) > 2
    assert estimate("meta-llama/Llama-2-70b-hf", max_memory=room, **options).fits


def test_a_limit_with_which_it_would_fit_is_told_and_does() -> None:
    room = {0: "4GiB", "cpu": "10GiB"}
    options: Any = {"first_n_layers": 8, "batch_size": 4, "seq_len": 512}
    result = estimate("EleutherAI/pythia-6.9b", max_memory=room, **options)
    limits = told(result, "max_memory")

    changed = estimate("EleutherAI/pythia-6.9b", max_memory=limits, memory=room, **options)

    assert changed.fits
    assert changed.devices[-1].weights > 0


# --------------------------------------------------------------------------------------------
# The command line


def test_the_command_fails_if_it_does_not_fit(capsys: Any) -> None:
    status = main(["estimate", "gpt2", "--max-memory", "0=430MiB,1=430MiB", "--seq-len", "8"])
    assert status == 1
    printed = capsys.readouterr().out
    assert "It does not fit: device 0 (home) needs" in printed
    assert re.search(
        r"fit: --dtype bfloat16, or --max-memory 0=\d+MiB,1=\d+MiB,cpu=\d+MiB for", printed
    )


def test_the_command_gives_json(capsys: Any) -> None:
    command = ["estimate", "gpt2", "--n-devices", "2", "--json", "--seq-len", "8"]
    main([*command, "--device-map", '{"": 0, "blocks.3": 1}'])
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] is True
    assert [item["components"] for item in result["devices"]][1] == "blocks.3"
    expected: Estimate = estimate("gpt2", 2, device_map={"": 0, "blocks.3": 1}, seq_len=8)
    assert result == json.loads(json.dumps(expected.to_dict()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nosuchmodel", "TransformerLens lists no model 'nosuchmodel'"),
        ("gpt2 --max-memory 0=40", "max_memory[0] must be bytes"),
        ("gpt2 --max-memory 40GiB --memory 0=40", "memory[0] must be bytes"),
        ("gpt2 --seq-len 4096", "more than the model's n_ctx of 1024: lower them\n"),
        ("meta-llama/Meta-Llama-3-8B --seq-len 9000", ": lower them, or pass n_ctx=9000\n"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: str, message: str, capsys: Any) -> None:
    assert main(["estimate", *arguments.split()]) == 1
    assert message in capsys.readouterr().err


def test_less_is_left_than_a_gpu_needs() -> None:
    few = {"max_memory": "790MiB", "seq_len": 8}
    verdict = repr(estimate("gpt2", **few)).splitlines()[-1]
    assert re.fullmatch(
        r"It fits, but device 0 \(home\) has only [\d.]+ MiB \(\d%\) left: leave 10% .*", verdict
    )


def test_blocks_that_do_not_fit_are_estimated_on_the_host() -> None:
    limits = {0: "24GiB", 1: "20GiB", "cpu": "200GiB"}
    result = estimate("meta-llama/Llama-2-70b-hf", dtype="bfloat16", max_memory=limits, seq_len=16)
    on_host = result.devices[-1]
    assert [item.device for item in result.devices] == ["0 (home)", "1", "cpu"]
    assert on_host.weights == result.placement.bytes_on("cpu") > 80 * GIB
    assert on_host.headroom == 200 * GIB - on_host.weights
