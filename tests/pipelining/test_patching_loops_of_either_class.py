"""`transformer_lens.patching` by way of `sweep`: the same results, of fewer blocks.

Each of its functions is called in tests/surface.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas
import pytest
import torch
from blocks_run import blocks_run, traces
from hf_models import N_LAYERS
from transformer_lens import patching

import tl_devicefix
from tl_devicefix.monkeypatch.versions import installed

SETTER = patching.layer_pos_patch_setter
in_4 = pytest.mark.skipif(installed().major < 4, reason="TransformerLens 4's arguments")


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]


def patch(
    function: str, model: Any, tokens: torch.Tensor, metric: Any = metric, **arguments: Any
) -> Any:
    """Patch into what the model does with tokens what it does with others."""
    clean = model.run_with_cache(tokens + 1)[1]
    return getattr(patching, function)(model, tokens, clean, metric, **arguments)


def unpatched(*args: Any, **arguments: Any) -> Any:
    with tl_devicefix.disabled():
        return patch(*args, **arguments)


@pytest.fixture
def model(on_one: Any) -> Any:
    """On one CPU."""
    return on_one("llama")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def few(tokens: torch.Tensor) -> torch.Tensor:
    """Few tokens, as there is a run for each of them, or each pair."""
    return tokens[:1, :2] // 2


def test_a_table_of_indices(model: Any, few: torch.Tensor) -> None:
    rows = pandas.DataFrame([(4, 1), (0, 0), (3, 1)], columns=["layer", "pos"])
    arguments = {"patch_setter": SETTER, "activation_name": "resid_pre", "index_df": rows}
    expected = unpatched("generic_activation_patch", model, few, **arguments)
    actual = patch("generic_activation_patch", model, few, **arguments, return_index_df=True)
    assert torch.equal(actual[0], expected)
    assert actual[1] is rows


@in_4
def test_several_metrics_for_each_example_and_a_baseline(model: Any, tokens: torch.Tensor) -> None:
    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, 5]

    few = tokens[:, :2]
    metrics = {"one": metric, "two": lambda logits: -metric(logits)}
    arguments = {"metric": metrics, "reduce": "none", "baseline": True}
    expected = unpatched("get_act_patch_mlp_out", model, few, **arguments)
    actual = patch("get_act_patch_mlp_out", model, few, **arguments)
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.baseline, expected.baseline)


def test_half_of_the_blocks_are_run(model: Any, few: torch.Tensor) -> None:
    """Of n layers (n + 1) / 2n, and once the unpatched run: from 12 layers on, at most 0.55."""
    clean = model.run_with_cache(few + 1)[1]
    with blocks_run(model) as count:
        patching.get_act_patch_resid_pre(model, few, clean, metric)
    runs_per_layer = few.shape[1]
    assert count.blocks == runs_per_layer * N_LAYERS * (N_LAYERS + 1) / 2 + N_LAYERS - 1
    assert traces(model) == []


def test_a_metric_with_a_state_sees_the_runs_in_order(model: Any, few: torch.Tensor) -> None:
    seen: list[float] = []

    def stateful(logits: torch.Tensor) -> torch.Tensor:
        seen.append(metric(logits).item())
        return torch.tensor(float(len(seen)))

    numbers = patch("get_act_patch_resid_pre", model, few, metric=stateful)
    assert numbers.flatten().tolist() == list(range(1, 1 + 2 * N_LAYERS))
    assert seen == unpatched("get_act_patch_resid_pre", model, few).flatten().tolist()


def test_an_error_in_a_metric_is_raised_and_leaves_no_hook(model: Any, few: torch.Tensor) -> None:
    calls: list[int] = []

    def fail_third(logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("in the metric")
        return metric(logits)

    with pytest.raises(ValueError, match="in the metric"):
        patch("get_act_patch_resid_pre", model, few, metric=fail_third)
    assert traces(model) == []


def test_a_model_of_neither_class_is_left_to_transformer_lens(
    model: Any, few: torch.Tensor
) -> None:
    class Wrapped:
        """A user's own, with what the loop takes of a model."""

        def __init__(self, model: Any) -> None:
            self.cfg = model.cfg
            self.run_with_hooks = model.run_with_hooks

    clean = model.run_with_cache(few + 1)[1]
    actual = patching.get_act_patch_resid_pre(Wrapped(model), few, clean, metric)
    assert torch.equal(actual, unpatched("get_act_patch_resid_pre", model, few))
