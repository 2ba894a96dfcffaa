"""`estimate`: what a job takes on each device, and what would fit if it does not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tl_devicefix import Estimate, estimate
from tl_devicefix.__main__ import main

GIB = 2**30


def test_printing_shows_a_table_and_the_verdict():
    lines = repr(estimate("gpt2", 2, cache="resid_post", max_memory="24GiB")).splitlines()
    assert lines[0] == "gpt2, float32: batch 1, 1024 tokens, caching resid_post"
    assert lines[1].split() == ["device", "components", "weights", "peak", "headroom", "peak", "in"]
    assert lines[2].startswith("0 (home)  embed, pos_embed, blocks.0, ln_final, unembed")
    assert lines[2].endswith(" unembed")
    assert lines[-1] == "It fits into 24.00 GiB a device."


def test_cached_names_are_whole_and_may_have_spaces_between():
    none, some = (
        estimate("gpt2", cache=cache, batch_size=4, seq_len=512).devices[0].peak
        for cache in (None, " resid_post , hook_z")
    )
    assert some - none == pytest.approx(2 * 12 * 4 * 512 * 768 * 4, rel=0.1)


def test_devices_may_be_named_as_where_there_are_gpus():
    result = estimate("gpt2", device_map={"": "cuda:0", "blocks.3": "cuda:1"}, seq_len=8)
    assert [item.components for item in result.devices][1] == "blocks.3"
    result = estimate("gpt2", max_memory={"cuda:1": "24GiB"}, seq_len=8)
    assert result.devices[0].capacity == 80 * GIB


def test_gradients_of_offloaded_blocks_are_on_the_host():
    result = estimate("gpt2", gradients=True, seq_len=8, device_map={"": 0, "blocks": "cpu"})
    assert result.devices[-1].peak == 2 * result.devices[-1].weights > 0


def test_so_many_devices_as_it_says_are_enough():
    options: dict[str, Any] = {"first_n_layers": 8, "max_memory": "4GiB", "seq_len": 64}
    name = "EleutherAI/pythia-6.9b"
    advice = estimate(name, **options).advice
    n_devices = int(re.findall(r"^It would fit on (\d+) devices", advice)[0])
    assert estimate(name, n_devices, **options).fits
    assert not estimate(name, n_devices - 1, **options).fits


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"max_memory": "1MiB"}, "a smaller dtype"),
        ({"max_memory": {0: "300MiB", 1: "200MiB"}}, "more devices"),
        ({"max_memory": "200MiB", "device_map": {"": 0, "blocks.3": 1}}, "more devices"),
    ],
)
def test_what_else_to_try_where_more_devices_do_not_help(options, first):
    advice = estimate("gpt2", seq_len=8, **options).advice
    assert advice.startswith(f"Try {first}, ")
    assert "offloaded blocks" in advice


def test_the_command_fails_if_it_does_not_fit_and_gives_json(capsys):
    command = ["estimate", "gpt2", "--seq-len", "8"]
    assert main([*command, "--max-memory", "0=430MiB,1=430MiB"]) == 1
    printed = capsys.readouterr().out
    assert "It does not fit: device 0 (home) needs" in printed
    assert printed.rstrip().endswith("SDPA or offloaded blocks.")

    main([*command, "--n-devices", "2", "--json", "--device-map", '{"": 0, "blocks.3": 1}'])
    result = json.loads(capsys.readouterr().out)
    expected: Estimate = estimate("gpt2", 2, device_map={"": 0, "blocks.3": 1}, seq_len=8)
    assert result == json.loads(json.dumps(expected.to_dict()))
    assert result["fits"] is True
    assert [item["components"] for item in result["devices"]][1] == "blocks.3"


def test_less_is_left_than_a_gpu_needs():
    few = {"max_memory": "790MiB", "seq_len": 8}
    verdict = repr(estimate("gpt2", **few)).splitlines()[-1]
    assert re.fullmatch(
        r"It fits, but device 0 \(home\) has only [\d.]+ MiB \(\d%\) left: leave 10% .*", verdict
    )


def test_blocks_that_do_not_fit_are_estimated_on_the_host():
    limits = {0: "400MiB", 1: "100MiB", "cpu": "1GiB"}
    result = estimate("gpt2", max_memory=limits, seq_len=16)
    on_host = result.devices[-1]
    assert [item.device for item in result.devices] == ["0 (home)", "1", "cpu"]
    assert on_host.weights == result.placement.bytes_on("cpu") > 2**27
    assert on_host.headroom == GIB - on_host.weights
