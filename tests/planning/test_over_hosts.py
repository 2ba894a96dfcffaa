"""`plan`, `estimate` and `dry_run` over hosts that are not there: no launcher, no devices."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from architectures import TOYS
from local_hosts import hosts as joined_hosts

from tl_devicefix import dry_run, estimate, plan, simulate
from tl_devicefix.__main__ import main

THERE, BACK = ("host0", "host1"), ("host1", "host0")


def test_a_plan_is_that_of_the_devices_that_will_be_joined():
    planned = plan("gpt2", 4, hosts=2)

    with simulate(4, hosts=2):
        assert plan("gpt2", 4) == planned
    assert [site.name for site in planned.sites] == ["host0/0", "host0/1", "host1/0", "host1/1"]


def test_what_the_devices_have_is_said_or_unlimited():
    assert plan("meta-llama/Llama-3.1-405B", 4, hosts=2).bytes_on(3) > 300 << 30
    with pytest.raises(ValueError, match=r"sim:0 \(host0/0\) would hold"):
        plan("gpt2", 2, hosts=2, max_memory={"host0/cuda:0": "1MiB", "host1/cuda:0": "1MiB"})


def test_hosts_may_have_different_numbers_of_devices(capsys):
    planned = plan("gpt2", hosts=[1, 3])
    placements = [
        planned,
        plan("gpt2", 4, hosts=(1, 3)),
        estimate("gpt2", hosts=[1, 3], seq_len=8).placement,
        dry_run("gpt2", id, hosts=[1, 3]).placement,
    ]
    main(["estimate", "gpt2", "--hosts", "1,3", "--seq-len", "8"])
    too_large = estimate("gpt2", hosts=[1, 2], max_memory="100MiB", seq_len=8)

    names = ["host0/0", "host1/0", "host1/1", "host1/2"]
    assert [[site.name for site in item.sites] for item in placements] == [names] * 4
    assert [len(item.devices) for item in placements] == [4] * 4
    with simulate(4, hosts=[1, 3]):
        assert plan("gpt2", 4) == planned
    assert "3 (host1/2)" in capsys.readouterr().out
    assert not too_large.fits
    assert too_large.advice.startswith("Try more devices")


@pytest.mark.parametrize("toy", TOYS)
def test_a_forward_sends_what_the_placement_says(toy):
    cfg = TOYS[toy]()

    result = estimate(cfg, 4, hosts=2, batch_size=3, seq_len=5)

    assert result.between_hosts["a forward"] == result.placement.between_hosts(3, 5)
    assert result.placement.between_hosts(3, 5) == plan(cfg, 4, hosts=2).between_hosts(3, 5)


def test_each_part_of_a_job_is_told_apart():
    job: dict[str, Any] = {
        "cache": "resid_post",
        "gradients": True,
        "max_new_tokens": 2,
        "seq_len": 8,
    }
    result = estimate("gpt2", 4, hosts=2, dtype="bfloat16", **job)

    stream = 8 * 768 * 2
    blocks_there = sum("host1" in site.hostname for site in map(_site(result), _blocks(result)))
    assert result.between_hosts["a forward"] == dict.fromkeys((THERE, BACK), stream)
    assert result.between_hosts["its backward"] == dict.fromkeys((THERE, BACK), stream)
    assert result.between_hosts["the cache, read at home"] == {BACK: blocks_there * stream}
    assert result.between_hosts["the prompt"][BACK] == stream
    assert result.between_hosts["a generated token"][BACK] == stream // 8
    assert "- its backward: host0 -> host1 12.0 KiB, host1 -> host0 12.0 KiB" in repr(result)


def _site(result: Any) -> Any:
    sites = {site.torch_device: site for site in result.placement.sites}
    return lambda component: sites[component.device]


def _blocks(result: Any) -> list[Any]:
    return [item for item in result.placement.components if item.name.startswith("blocks")]


def test_a_dry_run_says_what_went_between_hosts():
    def forward(model):
        with torch.no_grad():
            model(torch.zeros(1, 16, dtype=torch.long))

    dry = dry_run("gpt2", forward, 4, hosts=2)

    assert dry.between_hosts == dry.placement.between_hosts(1, 16)
    lines = repr(dry).splitlines()
    assert lines[3].startswith("2 (host1/0) ")
    assert "; between hosts: host0 -> host1 48.0 KiB, host1 -> host0 48.0 KiB" in lines[-2]


def test_the_command_gives_json(capsys):
    main(["estimate", "gpt2", "--n-devices", "4", "--hosts", "2", "--seq-len", "8", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["between_hosts"]["a forward"] == dict.fromkeys(
        ("host0 -> host1", "host1 -> host0"), 8 * 768 * 4
    )


def test_a_plan_is_the_same_after_other_hosts_have_joined():
    before = str(plan("gpt2", 4, hosts=2)), str(estimate("gpt2", 4, hosts=2, seq_len=8))
    with joined_hosts("node-b"):
        after = str(plan("gpt2", 4, hosts=2)), str(estimate("gpt2", 4, hosts=2, seq_len=8))
    assert after == before
