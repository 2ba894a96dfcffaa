"""What `plan` and `estimate` say: where each component is, what a job takes, and what fits."""

import json
import re

import pytest
import torch
from architectures import TOYS
from model_classes import HookedTransformer

from tl_devicefix import estimate, plan
from tl_devicefix.__main__ import main

pytestmark = pytest.mark.hooked


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma-2", "mixtral", "bloom", "phi", *TOYS])
def test_planned_sizes_equal_the_real_models(name, on_one):
    if name in TOYS:
        cfg = TOYS[name](dtype=torch.bfloat16)
        model = HookedTransformer(cfg)
    else:
        model, cfg = on_one(name), on_one(name).cfg
    planned = plan(cfg)
    assert planned.components == planned.reweighed(model).components


@pytest.mark.parametrize(("name", "n_devices"), [("gpt2", 1), ("llama", 3), ("gemma-2", 3)])
def test_checkpoint_loads_as_planned_sharing_equal_buffers(name, n_devices, checkpoints, machine):
    checkpoint = str(checkpoints(name))
    model = HookedTransformer.from_pretrained(checkpoint, n_devices=n_devices)

    assert model.placement.device_map == plan(checkpoint, n_devices=n_devices).device_map
    for device in model.placement.devices:
        current = [block.attn for block in model.blocks if block.attn.W_Q.device == device]
        for kind in {attention.attn_type for attention in current}:
            of_kind = [attention for attention in current if attention.attn_type == kind]
            for buffer in dict(current[0].named_buffers()):
                assert len({id(getattr(attention, buffer)) for attention in of_kind}) == 1, buffer
        tensors = [*model.parameters(), *model.buffers()]  # each tensor once
        present = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        assert model.placement.bytes_on(device) == present
    model.to(model.placement.devices[-1])
    kinds = {block.attn.attn_type for block in model.blocks}
    assert len({id(block.attn.IGNORE) for block in model.blocks}) == len(kinds)


def test_dtypes_may_be_named_as_transformer_lens_names_them(config):
    for model in (config(), "Llama-2-7b"):
        expected = plan(model, dtype=torch.bfloat16)
        assert 2 * expected.components[0].weights == plan(model).components[0].weights
        for dtype in ("bfloat16", "bf16", "torch.bfloat16"):
            assert plan(model, dtype=dtype) == expected


KIB, MIB, GIB = 2**10, 2**20, 2**30


def test_devices_may_be_named_as_where_there_are_gpus():
    result = estimate("gpt2", device_map={"": "cuda:0", "blocks.3": "cuda:1"}, seq_len=8)
    assert [item.components for item in result.devices][1] == "blocks.3"
    for name in ("cuda:1", "cuda"):
        result = estimate("gpt2", max_memory={name: "24GiB"}, seq_len=8)
        assert [item.capacity for item in result.devices] == [24 * GIB]


# Four matrices of 2.25 MiB, two of 9 MiB, biases of 3 KiB and one of 12 KiB: powers of two.
PINNED_BLOCK = (4 * 4 + 2 * 16) * MIB + (5 * 4 + 16) * KIB


def test_gradients_of_offloaded_blocks_are_on_the_host():
    result = estimate("gpt2", gradients=True, seq_len=8, device_map={"": 0, "blocks": "cpu"})
    assert result.devices[-1].peak == 12 * PINNED_BLOCK + result.devices[-1].weights


def test_estimate_advises_the_least_number_of_devices_that_fits():
    options = {"first_n_layers": 4, "max_memory": "3GiB", "seq_len": 64}
    name = "EleutherAI/pythia-6.9b"
    advice = estimate(name, **options).advice
    n_devices = int(re.findall(r"^It would fit on (\d+) devices", advice)[0])
    assert estimate(name, n_devices, **options).fits
    assert not estimate(name, n_devices - 1, **options).fits


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"max_memory": "1MiB", "first_n_layers": 2}, "a smaller dtype"),
        ({"max_memory": {0: "300MiB", 1: "200MiB"}}, "more devices"),
    ],
)
def test_estimate_advises_other_means_where_devices_do_not_help(options, first):
    advice = estimate("gpt2", seq_len=8, **options).advice
    assert advice.startswith(f"Try {first}, ")
    assert "offloaded blocks" in advice


def test_estimate_says_nothing_of_limits_that_nobody_gave(caplog):
    estimate("gpt2", seq_len=8, device_map={"": 1})
    assert "max_memory" not in caplog.text


def test_the_command_fails_if_it_does_not_fit_and_gives_json(capsys):
    command = ["estimate", "gpt2", "--seq-len", "8"]
    assert main([*command, "--max-memory", "0=430MiB,1=430MiB"]) == 1
    printed = capsys.readouterr().out
    assert "It does not fit: device 0 (home) needs" in printed
    assert printed.rstrip().endswith("fuse_blocks or offloaded blocks.")

    main([*command, "--n-devices", "2", "--json", "--device-map", '{"": 0, "blocks.3": 1}'])
    result = json.loads(capsys.readouterr().out)
    expected = estimate("gpt2", 2, device_map={"": 0, "blocks.3": 1}, seq_len=8)
    assert result == json.loads(json.dumps(expected.to_dict()))
    assert result["fits"] is True
    assert [item["components"] for item in result["devices"]][1] == "blocks.3"


def test_estimate_warns_where_less_than_ten_percent_is_left():
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
    n_offloaded = sum(component.offloaded for component in result.placement.components)
    assert on_host.peak == n_offloaded * PINNED_BLOCK > on_host.weights
    assert on_host.headroom == GIB - on_host.peak
