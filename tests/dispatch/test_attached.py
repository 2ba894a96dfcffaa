"""Modules that people attach to a block: they are at home, and run on any block."""

import copy

import pytest
import torch
from comparison import assert_agrees
from devices import device
from kinds import home_of
from torch import nn

pytestmark = pytest.mark.hooked


class Probe(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, residual):
        return residual * self.scale


class Beside(nn.Module):
    def __init__(self, inside, probe):
        super().__init__()
        self.inside, self.probe = inside, probe

    def forward(self, residual):
        return self.inside(residual) + self.probe(residual)


def torch_s_module(model):
    torch.manual_seed(0)
    linear = nn.Linear(model.cfg.d_model, model.cfg.d_model)
    model.blocks[4].mlp = nn.Sequential(linear, nn.GELU()).to(model.cfg.device)


def wrappers(model):
    for layer in (1, 4):
        probe = Probe(model.cfg.d_model).to(model.cfg.device)
        model.blocks[layer].mlp = Beside(model.blocks[layer].mlp, probe)


@pytest.mark.parametrize("attach", [torch_s_module, wrappers])
def test_attached_module_runs_on_its_device_and_follows_to(attach, load, reference, tokens):
    model = load("llama")
    for variant in (model, reference):
        attach(variant)
        variant.setup()
    assert_agrees(model(tokens), reference(tokens), home_of(model))
    assert_agrees(copy.deepcopy(model)(tokens), reference(tokens), home_of(model))
    model.to(device(2))
    assert_agrees(model(tokens), reference(tokens), torch.device(device(2)))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("spread", "where"),
    [(4, "cpu"), ("all of one device", device(0)), ("some of three devices", device(2))],
)
def test_module_replacing_an_mlp_runs_and_stays_on_its_device(
    spread, where, load, reference, tokens
):
    model = load("llama", spread)
    for variant, location in ((model, where), (reference, "cpu")):
        variant.blocks[3].mlp = Probe(variant.cfg.d_model).to(location)
        variant.setup()
    assert_agrees(model(tokens), reference(tokens), home_of(model))
    assert model.blocks[3].mlp.scale.device == torch.device(where)
