"""Processing weights by hand: each method alone, and all of them on a model."""

from __future__ import annotations

import random

import pytest
import torch
from architectures import NO_PROCESSING, PROCESSING
from comparison import (
    assert_same_model,
    assert_same_tensors,
    assert_same_weights,
    log_probs,
    on_cpu,
)
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix.hooked_transformer import processing

METHODS = (
    *("fold_layer_norm", "center_writing_weights", "center_unembed", "fold_value_biases"),
    *("refactor_factored_attn_matrices", "fill_missing_keys"),
)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_processes_weights_where_they_lie(method, unprocessed, without_weights, machine):
    model = without_weights("gpt2", n_devices=4)
    model.load_state_dict(unprocessed("gpt2").state_dict())
    with tl_devicefix.disabled():
        expected = getattr(unprocessed("gpt2"), method)(unprocessed("gpt2").state_dict())

    result = getattr(model, method)(model.state_dict())

    assert_same_tensors(on_cpu(result), expected)
    for name, tensor in result.items():
        assert tensor.device == model.placement.device_of(name), name


@pytest.mark.cover(("name", "n_devices"))
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("processing", PROCESSING)
@pytest.mark.parametrize(("name", "n_devices"), [("attention-only", 3), ("solu", 1), ("solu", 4)])
def test_loading_weights_that_lie_anywhere(
    name, processing, n_devices, unprocessed, without_weights, machine, tokens
):
    options = PROCESSING[processing]
    weights = unprocessed(name).state_dict()
    with tl_devicefix.disabled():
        reference = without_weights(name)
        reference.load_and_process_state_dict(dict(weights), **options)
    choose = random.Random(0).choice
    argument = {key: tensor.to(choose(machine.devices)) for key, tensor in weights.items()}
    before = dict(argument)

    model = without_weights(name, n_devices=n_devices)
    model.load_and_process_state_dict(argument, **options)

    assert all(argument[key] is tensor for key, tensor in before.items())
    assert_same_tensors(on_cpu(argument), weights, tolerance=0)
    assert_same_model(model, reference, tokens)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("options", [{}, {"fold_ln": False}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mixtral", "solu"])
def test_processing_an_unprocessed_model_in_place(
    name, options, unprocessed, without_weights, machine, tokens
):
    weights = unprocessed(name).state_dict()
    with tl_devicefix.disabled():
        reference = without_weights(name)
        reference.load_state_dict(weights)
        reference.process_weights_(**options)
    model = without_weights(name, n_devices=4)
    model.load_state_dict(weights)

    model.process_weights_(**options)

    assert_same_model(model, reference, tokens)


@pytest.mark.parametrize(
    "first", [{}, *({flag: False} for flag in list(NO_PROCESSING)[:3])], ids=str
)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "solu"])
def test_processing_the_rest_of_a_wholly_or_partly_processed_model(
    name, first, unprocessed, without_weights, machine, tokens
):
    at_once, in_two_steps = (without_weights(name, n_devices=4), without_weights(name, n_devices=4))
    for model in (at_once, in_two_steps):
        model.load_state_dict(unprocessed(name).state_dict())
    at_once.process_weights_()

    in_two_steps.process_weights_(**first)
    in_two_steps.process_weights_()

    assert_same_weights(in_two_steps, at_once)
    torch.testing.assert_close(
        log_probs(in_two_steps, tokens), log_probs(unprocessed(name), tokens), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_weights_whose_processing_was_interrupted_are_not_used(
    interruption, unprocessed, without_weights, machine, tokens, monkeypatch
):
    weights = unprocessed("gpt2").state_dict()
    model = without_weights("gpt2", n_devices=4)
    model.load_state_dict(weights)
    load_component = processing.load_component

    def stop_at_the_third_block(model, unit, *args):
        if unit == "blocks.2":
            raise interruption("stop here")
        load_component(model, unit, *args)

    with monkeypatch.context() as patch:
        patch.setattr(processing, "load_component", stop_at_the_third_block)
        with pytest.raises(interruption, match="stop here"):
            model.process_weights_()

    for use in (
        lambda: model(tokens),
        lambda: model.run_with_cache(tokens),
        lambda: model.process_weights_(),
        lambda: model.load_and_process_state_dict(weights),
    ):
        with pytest.raises(RuntimeError, match=r"only partly processed.*load the model again"):
            use()


def test_weights_of_another_shape_are_refused_and_the_model_is_as_it_was(
    unprocessed, without_weights, machine, tokens
):
    weights = unprocessed("gpt2").state_dict()
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
