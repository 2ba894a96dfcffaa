"""Processing the weights of a model that is loaded."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from architectures import NO_PROCESSING, TOYS
from comparison import (
    assert_same_model,
    assert_same_tensors,
    assert_same_weights,
    log_probs,
    on_cpu,
)

import tl_devicefix
from tl_devicefix.hooked_transformer import processing

METHODS = (
    *("fold_layer_norm", "center_writing_weights", "center_unembed", "fold_value_biases"),
    "refactor_factored_attn_matrices",
)
PROCESSING: dict[str, dict[str, bool]] = {
    "default": {},
    "none": NO_PROCESSING,
    **{f"without {flag}": {flag: False} for flag in NO_PROCESSING},
    "refactored": {"refactor_factored_attn_matrices": True},
}


class Snapshot:
    """What a state dict holds, to see that it is left alone."""

    def __init__(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(state_dict)
        self._values = {name: tensor.cpu().clone() for name, tensor in state_dict.items()}

    def assert_unchanged(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        assert list(state_dict) == list(self._tensors)
        for name, tensor in state_dict.items():
            assert tensor is self._tensors[name], f"{name} was replaced"
        assert_same_tensors(on_cpu(dict(state_dict)), self._values, tolerance=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_transformer_lens_on_a_model_over_several_devices(
    method: str, unprocessed: Any, without_weights: Any, machine: Any
) -> None:
    """It is TransformerLens's own, which needs each component's weights together and no more."""
    weights = unprocessed("gpt2").state_dict()
    model = without_weights("gpt2", n_devices=4)
    model.load_state_dict(weights)
    expected = getattr(unprocessed("gpt2"), method)(
        {name: tensor.clone() for name, tensor in weights.items()}
    )

    result = getattr(model, method)(model.state_dict())

    assert_same_tensors(on_cpu(dict(result)), dict(expected))
    assert all(tensor.device == model.placement.device_of(name) for name, tensor in result.items())


@pytest.mark.cover(("name", "n_devices"))
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("processing", PROCESSING)
@pytest.mark.parametrize(
    ("name", "n_devices"), [("attention-only", 3), *(("solu", n) for n in (1, 2, 3, 4))]
)
def test_loading_weights_that_lie_anywhere(
    name: str,
    processing: str,
    n_devices: int,
    unprocessed: Any,
    without_weights: Any,
    machine: Any,
    tokens: torch.Tensor,
) -> None:
    options = PROCESSING[processing]
    weights = unprocessed(name).state_dict()
    with tl_devicefix.disabled():
        reference = without_weights(name)
        reference.load_and_process_state_dict(dict(weights), **options)
    choose = random.Random(0).choice
    given = {key: tensor.to(choose(machine.devices)) for key, tensor in weights.items()}
    before = Snapshot(given)

    model = without_weights(name, n_devices=n_devices)
    model.load_and_process_state_dict(given, **options)

    before.assert_unchanged(given)
    assert_same_model(model, reference, tokens)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("options", [{}, {"fold_ln": False}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mixtral", *TOYS])
def test_processing_an_unprocessed_model_in_place(
    name: str,
    options: dict[str, bool],
    unprocessed: Any,
    without_weights: Any,
    machine: Any,
    tokens: torch.Tensor,
) -> None:
    weights = unprocessed(name).state_dict()
    with tl_devicefix.disabled():
        reference = without_weights(name)
        reference.load_state_dict(weights)
        reference.process_weights_(**options)
    model = without_weights(name, n_devices=4)
    model.load_state_dict(weights)

    model.process_weights_(**options)

    assert_same_model(model, reference, tokens)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mixtral", *TOYS])
def test_processing_a_processed_model_again_changes_nothing(
    name: str, unprocessed: Any, without_weights: Any, machine: Any, tokens: torch.Tensor
) -> None:
    model = without_weights(name, n_devices=4)
    model.load_state_dict(unprocessed(name).state_dict())
    model.process_weights_()
    weights, logits = on_cpu(model.state_dict()), model(tokens).cpu()
    weights = {key: tensor.clone() for key, tensor in weights.items()}

    model.process_weights_()

    assert_same_tensors(on_cpu(model.state_dict()), weights)
    torch.testing.assert_close(model(tokens).cpu(), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [{flag: False} for flag in list(NO_PROCESSING)[:3]], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "solu"])
def test_processing_the_rest_of_a_partly_processed_model(
    name: str,
    first: dict[str, bool],
    unprocessed: Any,
    without_weights: Any,
    machine: Any,
    tokens: torch.Tensor,
) -> None:
    at_once, in_two_steps = (
        without_weights(name, n_devices=4),
        without_weights(name, n_devices=4),
    )
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
    interruption: type[BaseException],
    unprocessed: Any,
    without_weights: Any,
    machine: Any,
    tokens: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = unprocessed("gpt2").state_dict()
    model, uninterrupted = without_weights("gpt2", n_devices=4), without_weights("gpt2")
    for each in (model, uninterrupted):
        each.load_state_dict(weights)
    uninterrupted.process_weights_()
    load_component = processing.load_component

    def stop_at_the_third_block(model: Any, unit: str, *args: Any) -> None:
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
    ):
        with pytest.raises(RuntimeError, match=r"only partly processed.*load the model again"):
            use()
    with pytest.raises(ValueError, match=r"the state dict lacks blocks\.0\.attn\.W_K and"):
        model.load_and_process_state_dict({"embed.W_E": weights["embed.W_E"]})
    again = copy.deepcopy(model)
    model.load_and_process_state_dict(weights)
    assert_same_model(model, uninterrupted, tokens)
    again.load_state_dict(uninterrupted.state_dict())
    assert_same_model(again, uninterrupted, tokens)


def test_a_placed_model_s_device_that_has_no_room_for_other_weights_is_named(
    unprocessed: Any, without_weights: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = without_weights("gpt2", n_devices=4)
    monkeypatch.setattr(machine, "_capacities", [*machine._capacities[:3], 1000])

    with pytest.raises(torch.OutOfMemoryError, match=r"sim:3.* ran out of memory while blocks\.\d"):
        model.load_and_process_state_dict(unprocessed("gpt2").state_dict())
