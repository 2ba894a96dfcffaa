"""Moving, copying and saving a model: `to`, `cuda`, `cpu`, `copy.deepcopy`, state dicts."""

import copy
import gc

import pytest
import torch
from comparison import assert_agrees
from devices import device
from kinds import home_of
from offloads import assert_at_rest
from parameters import in_turn
from runs_of_users import GREEDY

pytestmark = pytest.mark.hooked

OFFLOADED = "some of three devices"


def devices_of(model):
    return {str(tensor.device) for tensor in [*model.parameters(), *model.buffers()]}


def zero(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def assert_runs(model, reference, tokens):
    """A forward, an activation cache and generation with a KV cache are as on one device."""
    home = home_of(model)
    for block in reference.blocks:
        block.attn.alibi = None  # of a longer text, which shifts scores
    expected, expected_cache = reference.run_with_cache(tokens, return_type="both")
    actual, cache = model.run_with_cache(tokens, return_type="both")
    assert_agrees([actual, cache], [expected, expected_cache], home)
    text = model.generate(tokens.to(home), **GREEDY)
    assert_agrees(text, reference.generate(tokens, **GREEDY), home)


MOVES = {
    "to a string": (lambda model: model.to(device(1)), device(1)),
    "to a device": (
        lambda model: model.to(torch.device(device(1)), print_details=False),
        device(1),
    ),
    "cuda": (lambda model: model.cuda(torch.device(device(3))), device(3)),
    "cpu": (lambda model: model.cpu(), "cpu"),
}


SPREADS = [("llama", 1), ("bloom", 4), ("llama", OFFLOADED)]
SPREADS += [("llama", "all but one of two devices")]


@pytest.mark.parametrize(("move", "kind", "spread"), in_turn(MOVES, SPREADS))
def test_moving_to_one_device_gathers_a_spread_model(move, kind, spread, load, reference, tokens):
    """TransformerLens's issues 199 and 911 too: inputs did not follow."""
    model, (call, target) = load(kind, spread), MOVES[move]
    model(tokens)  # leaves ALiBi biases where the blocks were

    assert call(model) is model

    assert devices_of(model) == {target}
    assert (str(model.cfg.device), model.cfg.n_devices) == (target, 1)
    assert model.placement.devices == model.placement.memories == (torch.device(target),)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    assert_runs(model, reference, tokens)


def test_a_split_model_moves_to_its_configs_device(load, machine, reference, tokens):
    model = load("llama", 2)
    model.cfg.device = "sim:2"
    model.move_model_modules_to_device()
    assert devices_of(model) == {"sim:2", "sim:3"}
    assert_agrees(model(tokens), reference(tokens), machine.devices[2])


@pytest.mark.parametrize("spread", [4, OFFLOADED])
def test_dtype_change_moves_no_component(spread, load, on_one, tokens):
    model = load("llama", spread)
    devices = model.placement.device_map
    weights = sum(c.weights for c in model.placement.components)
    assert model.to(torch.float64) is model
    assert {p.dtype for p in model.parameters()} == {model.cfg.dtype} == {torch.float64}
    assert model.placement.device_map == devices
    assert sum(c.weights for c in model.placement.components) == 2 * weights
    assert_at_rest(model)
    assert_agrees(model(tokens), on_one("llama").to(torch.float64)(tokens))
    if spread == 4:  # moved too, as accelerate, DDP and Lightning do: not by its own `to`
        torch.nn.Sequential(model).to(device(1), torch.float32)
        assert sum(c.weights for c in model.placement.components) == weights
        model.cfg.dtype = torch.float32  # which then is the user's to set
        assert_agrees(model(tokens), on_one("llama")(tokens), torch.device(device(1)))


def test_a_device_that_is_not_there_is_refused_and_nothing_moves(machine, load, reference, tokens):
    model = load("llama")
    before = model.placement
    for missing in (f"{machine.devices[0].type}:4", "cuda:7", "gpu"):
        with pytest.raises(ValueError, match=missing):
            model.to(missing)
    assert (model.placement, model.cfg.device) == (before, device(0))
    assert_agrees(model(tokens), reference(tokens), torch.device(device(0)))


@pytest.mark.parametrize(
    ("kind", "spread"),
    [pytest.param("bloom", 4, marks=pytest.mark.fails_unpatched), ("llama", OFFLOADED)],
)
def test_copied_model_runs_and_moves_by_itself(kind, spread, load, reference, tokens):
    model = load(kind, spread)
    model(tokens)

    copied, moved = copy.deepcopy(model), copy.deepcopy(model).to(device(2))
    assert copied.placement == model.placement
    assert (devices_of(moved), devices_of(copied)) == ({device(2)}, devices_of(model))
    zero(model)
    del model
    gc.collect()
    assert_at_rest(copied)

    assert_runs(copied, reference, tokens)
    assert_agrees(moved(tokens), reference(tokens), torch.device(device(2)))


@pytest.mark.parametrize(
    ("kind", "source", "target"), [("llama", 4, 3), ("attention-only", 1, 4), ("llama", 4, 1)]
)
def test_state_dict_loads_from_any_spread_into_any_other(
    kind, source, target, load, reference, tokens, tmp_path
):
    model, other = load(kind, source), load(kind, target)
    before = devices_of(other)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", map_location="cpu")
    for weights in (model.state_dict(), saved):
        zero(other)
        other.load_state_dict(weights)
        assert devices_of(other) == before
        assert_agrees(other(tokens), reference(tokens))


@pytest.mark.parametrize("spread", [OFFLOADED])
def test_unpickled_model_runs_where_it_is_put(model, reference, tokens, tmp_path):
    torch.save(model, tmp_path / "model.pt")
    model = torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=False)
    model.cpu()
    assert (devices_of(model), model.cfg.device) == ({"cpu"}, "cpu")
    assert_runs(model, reference, tokens)
