"""Comparisons of models and results, and of all that a refused call must not change."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from devices import LEAST
from transformer_lens import ActivationCache

from tl_devicefix.simulation.machine import Machine

Weights = dict[str, torch.Tensor]


def on_cpu(state_dict: Weights) -> Weights:
    return {name: tensor.detach().cpu() for name, tensor in state_dict.items()}


def assert_same_weights(model: Any, reference: Any, tolerance: float = 1e-5) -> None:
    """Every parameter and buffer is the same, and of the same dtype, with two exceptions.

    1. Where TransformerLens 2 leaves a folded norm's module behind, ours may be gone if theirs does
       nothing.
    2. Nothing reads the W_pos of an ALiBi model: TransformerLens 3 leaves it uninitialised.
    """
    ours, theirs = on_cpu(model.state_dict()), on_cpu(reference.state_dict())
    if model.cfg.positional_embedding_type == "alibi":
        del ours["pos_embed.W_pos"], theirs["pos_embed.W_pos"]
    for name in theirs.keys() - ours.keys():
        weight, identity = theirs.pop(name), float(name.endswith(".w"))
        assert ".ln" in f".{name}", f"{name} is missing"
        assert (weight == identity).all(), f"{name} is missing, and not an identity"
    assert_same_tensors(ours, theirs, tolerance)


def assert_same_tensors(ours: Weights, theirs: Weights, tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        says = lambda message, name=name: f"{name}: {message}"  # noqa: E731
        torch.testing.assert_close(ours[name], expected, rtol=tolerance, atol=tolerance, msg=says)


def assert_same_model(
    model: Any, reference: Any, tokens: torch.Tensor, tolerance: float = 1e-5
) -> None:
    assert_same_weights(model, reference, tolerance)
    assert_agrees(model(tokens), reference(tokens), torch.device(model.cfg.device), tolerance)


def log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return log probabilities, which no weight processing changes, on the CPU."""
    return model(tokens).detach().cpu().log_softmax(dim=-1)


def _pairs(actual: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what two results hold in the same places, in sequences and dicts of the same form."""
    if isinstance(expected, (Mapping, ActivationCache)):
        assert list(actual.keys()) == list(expected.keys())
        for name, value in expected.items():
            yield from _pairs(actual[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            yield from _pairs(one, other)
    else:
        yield actual, expected


def assert_agrees(
    actual: Any, expected: Any, home: torch.device | None = None, tolerance: float = 1e-5
) -> None:
    """Numbers and tensors are equal within the tolerance; tensors are at home, if it is given."""
    tolerance = max(tolerance, LEAST)
    within: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    for one, other in _pairs(actual, expected):
        if isinstance(other, torch.Tensor):
            assert home is None or one.device == home, f"on {one.device}, not at home on {home}"
            torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), **within)
        elif isinstance(other, float):
            assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
        else:
            assert one == other


def assert_bit_equal(actual: Any, expected: Any) -> None:
    """The same bits, on the same devices."""
    for one, other in _pairs(actual, expected):
        if isinstance(other, torch.Tensor):
            assert (one.device, one.dtype) == (other.device, other.dtype)
            assert torch.equal(one, other)
        else:
            assert one == other


class Snapshot:
    """A Hugging Face model as it is now: its modules, tensors and config."""

    def __init__(self, hf_model: torch.nn.Module) -> None:
        self._model = hf_model
        # Tensors are kept, so that no new one gets an old one's id.
        self._before, self._tensors = self._now(), self._tensors_now()
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
