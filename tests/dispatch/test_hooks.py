"""Hooks run on the device of their block, and may use what is on the model's other devices.

What hooks do most often is in tests/surface.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from kinds import home_of

import tl_devicefix

LAST = "blocks.4.hook_resid_post"


# --------------------------------------------------------------------------------------------
# A buffer at home that a hook changes


def into_several(a: torch.Tensor, zeros: Any) -> Any:
    values, indices = zeros(2, 9, 3), zeros(2, 9, 3).long()
    torch.topk(a, 3, out=(values, indices))
    return values, indices


def into_a_view(a: torch.Tensor, zeros: Any) -> Any:
    buffer = zeros(a.numel())
    buffer.view_as(a).add_(a)
    return buffer


def by_an_evaluated_batch_norm(a: torch.Tensor, zeros: Any) -> Any:
    """Its input is at home, and is not to be written to: others need it as it is."""
    norm = torch.nn.BatchNorm1d(a.shape[-1]).to(a.device).eval()
    rows = zeros(1, a.shape[-1]).expand(3, -1)
    return norm(rows + zeros(1)), norm(rows), norm.running_mean


def by_keyword(a: torch.Tensor, zeros: Any) -> Any:
    buffer = zeros(a.shape[-1])
    torch.index_put_(
        input=buffer, indices=[torch.tensor([1], device=a.device)], values=a[0, 0, :1].clone()
    )
    return buffer


def by_batch_norm(a: torch.Tensor, zeros: Any) -> Any:
    norm = torch.nn.BatchNorm1d(a.shape[-1]).to(zeros(1).device)
    return norm(a.flatten(0, 1)), norm.running_mean, norm.running_var


def by_a_gradient(a: torch.Tensor, zeros: Any) -> Any:
    leaf = a.detach().clone().requires_grad_()
    leaf.grad = zeros(*a.shape) + 1
    return leaf.grad


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    "change",
    [
        *(into_several, into_a_view, by_keyword),
        *(by_batch_norm, by_an_evaluated_batch_norm, by_a_gradient),
    ],
)
def test_a_buffer_at_home_that_a_hook_changes(
    change: Any, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    def run(model: Any) -> Any:
        results = []

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, device=model.cfg.device)

        def look(activation: torch.Tensor, hook: Any) -> None:
            results.append(change(activation, zeros))

        with torch.no_grad():
            model.run_with_hooks(tokens, fwd_hooks=[(LAST, look)])
        return results

    assert_agrees(run(model), run(reference))


@pytest.mark.fails_unpatched
def test_a_tensor_that_is_changed_between_two_uses_counts_as_it_is(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    def run(model: Any) -> torch.Tensor:
        vector = torch.ones(model.cfg.d_model, device=model.cfg.device)

        def steer(activation: torch.Tensor, hook: Any) -> torch.Tensor:
            steered = activation + vector
            vector[::2] += 1
            return steered * vector

        return model.run_with_hooks(tokens, fwd_hooks=[(LAST, steer)])

    assert_agrees(run(model), run(reference), home_of(model))


@pytest.mark.fails_unpatched
def test_a_tensor_that_is_used_without_a_graph_first_is_in_the_graph_afterwards(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    def run(model: Any) -> torch.Tensor | None:
        vector = torch.ones(model.cfg.d_model, device=model.cfg.device, requires_grad=True)

        def steer(activation: torch.Tensor, hook: Any) -> torch.Tensor:
            with torch.no_grad():
                scale = (activation * vector).norm()
            return activation + scale * vector

        hooks = [(LAST, steer)]
        model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="loss").backward()
        return vector.grad

    assert_agrees(run(model), run(reference), home_of(model))


@pytest.mark.parametrize("spread", [1, 4])
def test_a_hook_that_reads_weights_and_caches_on_a_chosen_device(
    model: Any, reference: Any, tokens: torch.Tensor, other_tokens: torch.Tensor
) -> None:
    def run(model: Any, within: Any) -> torch.Tensor:
        _, clean = model.run_with_cache(other_tokens)

        def change(activation: torch.Tensor, hook: Any) -> torch.Tensor:
            return activation + clean[hook.name] + (activation @ model.W_U) @ model.W_U.T

        with within:
            return model.run_with_hooks(tokens, fwd_hooks=[(LAST, change)])

    assert_agrees(
        run(model, tl_devicefix.gather_on("cpu")), run(reference, nullcontext()), home_of(model)
    )


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            lambda value, hook: value + torch.ones(value.shape[-1]),
            r"mixes devices: .* on sim:3.*\.to\(activation",
        ),
        (lambda value, hook: value.cpu(), "returned a tensor on cpu, .* on sim:3"),
        (lambda value, hook: (value.cpu(),), "returned a tensor on cpu, .* on sim:3"),
    ],
    ids=["mixes", "returns", "returns a tuple"],
)
def test_a_hook_that_uses_a_tensor_of_no_device_of_the_model_is_named(
    hook: Any, message: str, direction: str, model: Any, tokens: torch.Tensor
) -> None:
    """On one GPU, a tensor on the CPU fails too."""
    with (
        model.hooks(**{f"{direction}_hooks": [(LAST, hook)]}),
        pytest.raises(RuntimeError, match=r"hook on blocks\.4\.hook_resid_post " + message),
    ):
        model(tokens, return_type="loss").backward()


@pytest.mark.parametrize("spread", [1, 4])
def test_an_error_of_the_hook_itself_is_the_user_s_own(
    model: Any, tokens: torch.Tensor, spread: int
) -> None:
    def fail(value: torch.Tensor, hook: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        model.run_with_hooks(tokens, fwd_hooks=[(LAST, fail)])


def test_hooks_added_before_a_model_is_spread_mix_devices_afterwards(
    load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", 1)
    vector = torch.linspace(-1, 1, model.cfg.d_model, device="sim:0")
    model.add_hook(LAST, lambda value, hook: value + vector)
    model.cfg.n_devices = 4

    model.move_model_modules_to_device()

    expected = reference.run_with_hooks(
        tokens, fwd_hooks=[(LAST, lambda value, hook: value + vector.cpu())]
    )
    assert_agrees(model(tokens), expected, home_of(model))
    assert {str(p.device) for p in model.parameters()} == {f"sim:{i}" for i in range(4)}
