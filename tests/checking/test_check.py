"""`tl_devicefix.check` of a HookedTransformer: what is its own, and what is put into it."""

import copy
import re

import pytest
import torch
from architectures import attention_only_config, build_toy
from comparison import assert_agrees
from devices import device
from hf_models import D_MODEL
from parameters import in_turn
from torch import nn

import tl_devicefix
from tl_devicefix import check

pytestmark = pytest.mark.hooked


def findings(model):
    return [(finding.kind, finding.name) for finding in check(model).findings]


WHERE = [
    {"device": None},
    {"n_devices": 2, "device": device(2)},
    {"device_map": {"": 1, "blocks.0": 3, "blocks.3": 0}},
]


@pytest.mark.parametrize(
    ("name", "options"), in_turn(["gemma-2", "mixtral", "bloom", "gpt2"], WHERE)
)
def test_check_finds_no_fault_after_loading_copying_or_moving(name, options, load, tokens):
    model = load(name, **options)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model(tokens.to(model.cfg.device))  # leaves ALiBi biases
    assert check(model), check(model)
    assert check(copy.deepcopy(model))
    assert check(model.to(torch.bfloat16))
    assert check(model.to(device(2)))


def test_check_accepts_aliases_of_parts_and_permanent_hooks(model):
    model.probe = model.blocks[3].mlp
    model.blocks[2].hook_resid_post.add_perma_hook(lambda activation, hook: None)
    assert check(model), check(model)


def test_misplaced_module_is_found_until_setup_then_stays(model, tokens):
    model.blocks[4].mlp = nn.Linear(D_MODEL, D_MODEL).to(device(0))
    name = "blocks.4.mlp"
    (finding,) = check(model).findings
    assert (finding.kind, finding.name) == ("device", name)
    assert finding.fix == f'model.blocks[4].mlp.to("{device(3)}")'

    model.setup()

    assert check(model)
    expected = model(tokens)
    model.blocks[4].attn.to(device(1))
    report = check(model, repair=True)

    assert report
    assert [item.name for item in report.repaired] == ["blocks.4.attn"]
    assert model.blocks[4].mlp.weight.device == torch.device(device(0))
    assert_agrees(model(tokens), expected)


def test_a_model_without_a_placement_is_compared_with_its_config():
    with tl_devicefix.disabled():
        model = build_toy(attention_only_config())
    with tl_devicefix.simulate(2):
        assert check(model)
        model.blocks[2].to(device(1))

        report = check(model, repair=True)

    (finding,) = report.repaired
    assert finding.name == "blocks.2"
    assert "cfg.device puts it on cpu" in finding.message
    assert report
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}


def test_offloaded_block_moved_to_a_device_is_found_and_repaired(load, tokens):
    model = load("llama", 1, device_map={"": 0, "blocks.2": "cpu"})
    assert check(model).well, check(model)
    model.blocks[2].to(device(0))
    report = check(model)
    assert report.findings
    for finding in report.findings:
        assert re.search(r"blocks\.2\..* but the placement puts it on cpu", finding.message)
        assert finding.fix == "tl_devicefix.check(model, repair=True)"
    assert check(model, repair=True).well
    assert {p.device.type for p in model.blocks[2].parameters()} == {"cpu"}
    model.blocks[2].to("cpu")  # its buffers too, if it has any
    assert {finding.fix for finding in check(model).findings} <= {finding.fix}
