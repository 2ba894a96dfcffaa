"""The meaning of "the same": for models, results, and all that a refused call must not change."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch
from devices import LEAST
from transformer_lens import ActivationCache

from tl_devicefix.simulation.machine import Machine

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

Weights = dict[str, torch.Tensor]


def on_cpu(state_dict: Weights) -> Weights:
    return {name: tensor.detach().cpu() for name, tensor in state_dict.items()}


def assert_same_weights(model: Any, reference: Any, tolerance: float = 1e-5) -> None:
    """Every parameter and buffer is the same, and of the same dtype.

    Two exceptions. Where TransformerLens 2 leaves a folded norm's module behind, ours may be gone
    if theirs does nothing. And no one reads the W_pos of an ALiBi model: TransformerLens 3 leaves
    it uninitialised.
    """
    ours, theirs = on_cpu(model.state_dict()), on_cpu(reference.state_dict())
    if model.cfg.positional_embedding_type == "alibi":
        del ours["pos_embed.W_pos"], theirs["pos_embed.W_pos"]
    for name in theirs.keys() - ours.keys():
        assert_is_identity_norm(name, theirs.pop(name))
    assert_same_tensors(ours, theirs, tolerance)


def assert_is_identity_norm(name: str, weight: torch.Tensor) -> None:
    assert ".ln" in f".{name}", f"{name} is missing"
    assert (weight == float(name.endswith(".w"))).all(), f"{name} is missing, and not an identity"


def assert_same_tensors(ours: Weights, theirs: Weights, tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        says = lambda message, name=name: f"{name}: {message}"  # noqa: E731
        torch.testing.assert_close(ours[name], expected, rtol=tolerance, atol=tolerance, msg=says)


def assert_same_logits(
    model: HookedTransformer, reference: Any, tokens: torch.Tensor, tolerance: float = 1e-5
) -> None:
    logits = model(tokens)
    assert logits.device == torch.device(model.cfg.device)
    expected = reference(tokens)
    torch.testing.assert_close(logits.cpu(), expected, rtol=tolerance, atol=tolerance)


def assert_same_model(
    model: HookedTransformer, reference: Any, tokens: torch.Tensor, tolerance: float = 1e-5
) -> None:
    assert_same_weights(model, reference, tolerance)
    assert_same_logits(model, reference, tokens, tolerance)


def log_probs(model: HookedTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """What a model predicts, which no processing changes; on the CPU."""
    return model(tokens).detach().cpu().log_softmax(dim=-1)


def assert_agrees(
    actual: Any, expected: Any, home: torch.device | None = None, tolerance: float = 1e-5
) -> None:
    """Tensors are equal, and at home where that is given; so are those in sequences and dicts."""
    if isinstance(expected, torch.Tensor):
        assert home is None or actual.device == home, f"on {actual.device}, not at home on {home}"
        within: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(actual.detach().cpu(), expected.detach().cpu(), **within)
    elif isinstance(expected, (Mapping, ActivationCache)):
        assert list(actual.keys()) == list(expected.keys())
        for name, value in expected.items():
            assert_agrees(actual[name], value, home, tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            assert_agrees(one, other, home, tolerance)
    elif isinstance(expected, float):
        tolerance = max(tolerance, LEAST)
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
    else:
        assert actual == expected


def assert_bit_equal(actual: Any, expected: Any) -> None:
    """The same bits, on the same devices."""
    if isinstance(expected, torch.Tensor):
        assert (actual.device, actual.dtype) == (expected.device, expected.dtype)
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_bit_equal(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            assert_bit_equal(one, other)
    else:
        assert actual == expected


class Snapshot:
    """A Hugging Face model as it is now: its modules, tensors and config."""

    def __init__(self, hf_model: torch.nn.Module) -> None:
        self._model = hf_model
        self._before, self._tensors = self._now(), self._tensors_now()  # which keep their ids
        self._values = [tensor.detach().clone() for _, tensor in self._tensors]

    def _tensors_now(self) -> list[tuple[str, torch.Tensor]]:
        parameters = self._model.named_parameters(remove_duplicate=False)
        return [*parameters, *self._model.named_buffers(remove_duplicate=False)]

    def _now(self) -> Any:
        modules = list(self._model.named_modules(remove_duplicate=False))
        tensors = [(name, id(t), t.device, t.requires_grad) for name, t in self._tensors_now()]
        config: Any = getattr(self._model, "config", None)
        return modules, tensors, config and config.to_dict()

    def assert_unchanged(self) -> None:
        assert self._now() == self._before
        for (name, tensor), value in zip(self._tensors_now(), self._values):
            assert tensor.is_meta or torch.equal(tensor.detach(), value), name


def in_use(machine: Machine) -> list[int]:
    gc.collect()
    return [machine.memory_allocated(device) for device in machine.devices]
