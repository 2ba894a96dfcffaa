"""Processing weights by hand: each method alone, and all of them on a model."""

import copy
import random

import pytest
import torch
from architectures import NO_PROCESSING, PROCESSING, TOYS
from comparison import (
    assert_same_model,
    assert_same_tensors,
    assert_same_weights,
    log_probs,
    on_cpu,
)
from devices import device
from model_classes import HookedTransformer
from parameters import in_turn

import tl_devicefix
from tl_devicefix.hooked_transformer import processing
from tl_devicefix.hooked_transformer.processing import installed_conventions

pytestmark = pytest.mark.hooked

RMS = {"fold_biases": False, "center_weights": False}

METHODS = [
    *(("fold_layer_norm", {}, name) for name in ("gpt2", "pythia", *TOYS)),
    *(("fold_layer_norm", RMS, name) for name in ("gemma-2", "mixtral")),
    *(("center_writing_weights", {}, name) for name in ("gpt2", "bloom")),
    ("center_unembed", {}, "phi"),
    *(("fold_value_biases", {}, name) for name in ("qwen2", "mixtral", "solu")),
    *(("refactor_factored_attn_matrices", {}, name) for name in ("gpt2", "bloom")),
]
"""With such models as differ in what a method reads."""
OF_SEVERAL_BLOCKS = ("fold_layer_norm", "refactor_factored_attn_matrices")
"""Methods that fail unpatched where weights are scattered."""


def case(method, options, name):
    marks = pytest.mark.fails_unpatched if method in OF_SEVERAL_BLOCKS else ()
    return pytest.param(method, options, name, id=f"{method}-{name}", marks=marks)


@pytest.fixture
def without_weights(on_one):
    """`without_weights("gpt2", n_devices=4)`: a new model, spread over devices, to be loaded.

    Without `n_devices` it is on the CPU. Its norms are identities and its weights anything.
    """

    def make(name, n_devices=None):
        cfg = copy.deepcopy(on_one(name, folded=False).cfg)
        cfg.tokenizer_name = None  # which could not be fetched
        if n_devices is None:
            return HookedTransformer(cfg, move_to_device=False)
        # Set on the finished config: making one with n_devices > 1 wants that many CUDA devices.
        cfg.device, cfg.n_devices = device(0), n_devices
        return HookedTransformer(cfg)

    return make


def scattered(state_dict, devices):
    """The weights, each on any of the devices and in any of three dtypes."""
    choose = random.Random(0).choice
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    return {
        name: tensor.to(choose(devices), choose(dtypes) if tensor.is_floating_point() else None)
        for name, tensor in state_dict.items()
    }


def copied(state_dict):
    return {name: tensor.cpu().clone() for name, tensor in state_dict.items()}


@pytest.mark.parametrize(("method", "options", "name"), [case(*row) for row in METHODS])
def test_method_gives_scattered_weights_what_one_device_gives(
    method, options, name, on_one, without_weights, machine
):
    if method == "fold_layer_norm" and name == "mixtral" and not installed_conventions().folds_moe:
        pytest.skip("this TransformerLens cannot fold the norms of a mixture of experts")
    argument = scattered(on_one(name, folded=False).state_dict(), machine.devices)
    if name == "bloom":  # nobody reads it, and TransformerLens leaves it as it is
        argument["pos_embed.W_pos"].zero_()
    exact = {key: t.double() if t.is_floating_point() else t for key, t in on_cpu(argument).items()}
    with tl_devicefix.disabled():
        expected = getattr(on_one(name, folded=False), method)(exact, **options)

    model, before = without_weights(name, n_devices=4), copied(argument)

    result = getattr(model, method)(argument, **options)

    assert_same_tensors(on_cpu(argument), before, tolerance=0)
    assert result.keys() == expected.keys()
    for key, tensor in expected.items():
        assert result[key].dtype == argument[key].dtype, key
        assert result[key].device == model.placement.device_of(key), key
        precision = 2**-7 if argument[key].dtype == torch.bfloat16 else 1e-5
        ours, theirs = {key: result[key].cpu().double()}, {key: tensor.double()}
        assert_same_tensors(ours, theirs, precision)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    ("processing", "name", "n_devices"),
    in_turn(["default", "none", "refactored"], [("attention-only", 3), ("solu", 1), ("solu", 4)]),
)
def test_weights_on_any_device_are_loaded_and_processed(
    name, processing, n_devices, on_one, without_weights, machine, tokens
):
    options = PROCESSING[processing]
    weights = on_one(name, folded=False).state_dict()
    with tl_devicefix.disabled():
        reference = without_weights(name)
        reference.load_and_process_state_dict(dict(weights), **options)
    choose = random.Random(0).choice
    argument = {key: tensor.to(choose(machine.devices)) for key, tensor in weights.items()}
    before = copied(argument)

    model = without_weights(name, n_devices=n_devices)
    model.load_and_process_state_dict(argument, **options)

    assert_same_tensors(on_cpu(argument), before, tolerance=0)
    assert_same_model(model, reference, tokens)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    ("name", "processing"),
    in_turn(["gpt2", "mixtral"], ["default", "without fold_ln"]),
)
def test_process_weights_in_place_equals_transformer_lens(
    name, processing, on_one, without_weights, machine, tokens
):
    options = PROCESSING[processing]
    weights = on_one(name, folded=False).state_dict()
    with tl_devicefix.disabled():
        reference = without_weights(name)
        reference.load_state_dict(weights)
        reference.process_weights_(**options)
    model = without_weights(name, n_devices=4)
    model.load_state_dict(weights)

    model.process_weights_(**options)

    assert_same_model(model, reference, tokens)


@pytest.mark.parametrize(
    ("first", "name"),
    in_turn(
        ["default", *(f"without {flag}" for flag in list(NO_PROCESSING)[:3])],
        ["gpt2", "qwen2", "solu"],
    ),
)
def test_processing_a_partly_processed_model_does_the_rest_once(
    name, first, on_one, without_weights, machine, tokens
):
    at_once, in_two_steps = (without_weights(name, n_devices=4), without_weights(name, n_devices=4))
    for model in (at_once, in_two_steps):
        model.load_state_dict(on_one(name, folded=False).state_dict())
    at_once.process_weights_()

    in_two_steps.process_weights_(**PROCESSING[first])
    in_two_steps.process_weights_()

    assert_same_weights(in_two_steps, at_once)
    torch.testing.assert_close(
        *(log_probs(model, tokens) for model in (in_two_steps, on_one(name, folded=False))),
        rtol=1e-5,
        atol=1e-5,
    )


def test_weights_whose_processing_was_interrupted_are_not_used(
    on_one, without_weights, machine, tokens, monkeypatch
):
    weights = on_one("gpt2", folded=False).state_dict()
    model = without_weights("gpt2", n_devices=4)
    model.load_state_dict(weights)
    load_component = processing.load_component

    def stop_at_the_third_block(model, unit, *args):
        if unit == "blocks.2":
            raise KeyboardInterrupt("stop here")
        load_component(model, unit, *args)

    with monkeypatch.context() as patch:
        patch.setattr(processing, "load_component", stop_at_the_third_block)
        with pytest.raises(KeyboardInterrupt, match="stop here"):
            model.process_weights_()

    for use in (
        lambda: model(tokens),
        lambda: model.run_with_cache(tokens),
        lambda: model.process_weights_(),
        lambda: model.load_and_process_state_dict(weights),
    ):
        with pytest.raises(RuntimeError, match=r"only partly processed.*load the model again"):
            use()


def test_misshapen_weights_are_refused_and_leave_the_model(
    on_one, without_weights, machine, tokens
):
    weights = on_one("gpt2", folded=False).state_dict()
    model = without_weights("gpt2", n_devices=2)
    model.load_and_process_state_dict(weights)
    expected = model(tokens)
    weights = {**weights, "unembed.W_U": weights["unembed.W_U"][:, :-1]}

    with pytest.raises(ValueError, match=r"unembed\.W_U has shape .* config asks for"):
        model.load_and_process_state_dict(weights)

    assert torch.equal(model(tokens), expected)


def test_a_model_whose_processing_is_refused_is_as_it_was(checkpoints, machine, tokens):
    model = HookedTransformer.from_pretrained_no_processing(str(checkpoints("pythia")), n_devices=4)
    expected, norm = model(tokens), model.cfg.normalization_type

    with pytest.raises(ValueError, match="refactor_factored_attn_matrices=True cannot be used"):
        model.process_weights_(refactor_factored_attn_matrices=True)

    assert model.cfg.normalization_type == norm
    assert torch.equal(model(tokens), expected)


def test_weights_that_a_subclass_adds_are_loaded(on_one, machine):
    weights = {**on_one("solu", folded=False).state_dict(), "extra.weight": torch.full((2, 2), 7.0)}
    model = on_one("solu", folded=False)
    model.extra = torch.nn.Linear(2, 2, bias=False)

    model.load_and_process_state_dict(weights, fold_ln=False)

    assert (model.extra.weight == 7).all()
    with pytest.raises(ValueError, match=r"extra.weight has shape \(1,\)"):
        model.load_and_process_state_dict({**weights, "extra.weight": torch.ones(1)})
