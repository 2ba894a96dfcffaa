"""Hooks run on the device of their block; what they change changes the output as on one device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from hf_models import N_LAYERS
from kinds import everywhere, home_of
from transformer_lens import patching

import tl_devicefix

RESIDUALS = [f"blocks.{i}.hook_resid_post" for i in range(N_LAYERS)]


def double(value: torch.Tensor, hook: Any) -> torch.Tensor:
    return value * 2


def ablate_head(value: torch.Tensor, hook: Any) -> torch.Tensor:
    value[:, :, 2] = 0
    return value


@pytest.mark.cover
@everywhere
def test_a_hook_on_each_block(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    hooks = [(name, double) for name in RESIDUALS]
    expected = reference.run_with_hooks(tokens, fwd_hooks=hooks, return_type="both")

    actual = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="both")

    assert_agrees(actual, expected, home_of(model))


def test_a_hook_sees_its_activation_where_it_is_computed(model: Any, tokens: torch.Tensor) -> None:
    seen: dict[str, torch.device] = {}

    def look(value: torch.Tensor, hook: Any) -> None:
        seen[hook.name] = value.device

    model.run_with_hooks(tokens, fwd_hooks=[(lambda name: name.startswith("blocks."), look)])

    assert len(set(seen.values())) == 4
    assert seen == {name: model.placement.device_of(name) for name in seen}


@pytest.mark.cover
@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("blocks.3.attn.hook_z", ablate_head),
        ("blocks.2.hook_mlp_out", lambda value, hook: torch.zeros_like(value)),
        ("hook_embed", double),
        (lambda name: name.endswith("hook_pattern"), double),
        ("blocks.4.ln2.hook_normalized", double),
        ("ln_final.hook_scale", double),
    ],
    ids=["head", "MLP", "embedding", "every pattern", "normalized", "final scale"],
)
@pytest.mark.parametrize("spread", [4, "scattered"])
def test_an_ablation(
    name: Any, hook: Any, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    expected = reference.run_with_hooks(tokens, fwd_hooks=[(name, hook)])

    actual = model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])

    assert_agrees(actual, expected, home_of(model))


def replace(value: torch.Tensor, hook: Any, clean: Any) -> torch.Tensor:
    return clean[hook.name].to(value.device)


def replace_last_position(value: torch.Tensor, hook: Any, clean: Any) -> torch.Tensor:
    value[:, -1] = clean[hook.name][:, -1]  # in place: torch copies from any device
    return value


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("patch", [replace, replace_last_position])
@pytest.mark.parametrize("layer", range(N_LAYERS))
def test_patching_with_an_activation_of_another_run(
    layer: int,
    patch: Any,
    model: Any,
    reference: Any,
    tokens: torch.Tensor,
    other_tokens: torch.Tensor,
) -> None:
    def run(model: Any) -> torch.Tensor:
        _, clean = model.run_with_cache(other_tokens)
        hook = (RESIDUALS[layer], partial(patch, clean=clean))
        return model.run_with_hooks(tokens, fwd_hooks=[hook])

    assert_agrees(run(model), run(reference), home_of(model))


@pytest.mark.fails_unpatched
def test_the_patching_module_of_transformer_lens(
    model: Any, reference: Any, tokens: torch.Tensor, other_tokens: torch.Tensor
) -> None:
    def run(model: Any) -> torch.Tensor:
        _, clean = model.run_with_cache(other_tokens)
        return patching.get_act_patch_attn_head_out_all_pos(
            model, tokens.to(home_of(model)), clean, lambda logits: logits[0, -1, 5]
        )

    assert_agrees(run(model), run(reference), home_of(model))


@pytest.mark.fails_unpatched
def test_backward_hooks(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    def run(model: Any) -> dict[str, torch.Tensor]:
        gradients: dict[str, torch.Tensor] = {}

        def keep(gradient: torch.Tensor, hook: Any) -> None:
            gradients[hook.name] = gradient.clone()

        with model.hooks(bwd_hooks=[(name, keep) for name in RESIDUALS]):
            model(tokens, return_type="loss").backward()
        return gradients

    gradients = run(model)

    assert_agrees(gradients, run(reference))
    devices = {name: gradient.device for name, gradient in gradients.items()}
    assert devices == {name: model.placement.device_of(name) for name in reversed(RESIDUALS)}


@pytest.mark.cover
@pytest.mark.parametrize("spread", [4, "scattered"])
@pytest.mark.parametrize(
    "options",
    [
        {"stop_at_layer": 0},
        {"stop_at_layer": 3},
        {"stop_at_layer": -1},
        {"return_type": "loss"},
        {"return_type": "loss", "loss_per_token": True},
        {"return_type": None},
    ],
    ids=str,
)
def test_run_with_hooks_takes_the_options_of_a_forward(
    options: dict[str, Any], model: Any, reference: Any, tokens: torch.Tensor, mask: torch.Tensor
) -> None:
    options = {"attention_mask": mask, "fwd_hooks": [(RESIDUALS[1], double)], **options}
    expected = reference.run_with_hooks(tokens, **options)

    assert_agrees(model.run_with_hooks(tokens, **options), expected, home_of(model))


def into_several(a: torch.Tensor, zeros: Any) -> Any:
    values, indices = zeros(2, 9, 3), zeros(2, 9, 3).long()
    torch.topk(a, 3, out=(values, indices))
    return values, indices


def into_a_view(a: torch.Tensor, zeros: Any) -> Any:
    buffer = zeros(a.numel())
    buffer.view_as(a).add_(a)
    return buffer


def into_an_entry(a: torch.Tensor, zeros: Any) -> Any:
    counts = zeros(20)
    counts[a[0, 0].argmax()].add_(1)
    return counts


def into_lists(a: torch.Tensor, zeros: Any) -> Any:
    sums = [zeros(a.shape[-1]), zeros(a.shape[-1]), torch.zeros_like(a[0, 0])]
    torch._foreach_add_(sums, [a.sum((0, 1)), a.mean((0, 1)), a[0, 0]])
    return sums


def by_an_evaluated_batch_norm(a: torch.Tensor, zeros: Any) -> Any:
    """Its input is at home, and is not to be written to: others need it as it is."""
    norm = torch.nn.BatchNorm1d(a.shape[-1]).to(a.device).eval()
    given = zeros(1, a.shape[-1]).expand(3, -1)
    return norm(given + zeros(1)), norm(given), norm.running_mean


def by_keyword(a: torch.Tensor, zeros: Any) -> Any:
    buffer = zeros(a.shape[-1])
    torch.index_put_(
        input=buffer, indices=[torch.tensor([1], device=a.device)], values=a[0, 0, :1].clone()
    )
    return buffer


def by_out(a: torch.Tensor, zeros: Any) -> Any:
    buffer = zeros(*a.shape)
    same = torch.add(a, buffer, out=buffer)
    same.mul_(a)
    return buffer


def by_a_histogram(a: torch.Tensor, zeros: Any) -> Any:
    top = a.argmax(-1).flatten()
    return zeros(a.shape[-1]).scatter_add_(0, top, torch.ones(len(top), device=a.device))


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
        *(into_several, into_a_view, into_an_entry, into_lists, by_keyword, by_out),
        *(by_a_histogram, by_batch_norm, by_an_evaluated_batch_norm, by_a_gradient),
    ],
)
def test_a_buffer_at_home_that_a_hook_changes(
    change: Any, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    def run(model: Any) -> Any:
        found = []

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, device=model.cfg.device)

        def look(activation: torch.Tensor, hook: Any) -> None:
            found.append(change(activation, zeros))

        with torch.no_grad():
            model.run_with_hooks(tokens, fwd_hooks=[(RESIDUALS[4], look)])
        return found

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

        return model.run_with_hooks(tokens, fwd_hooks=[(RESIDUALS[4], steer)])

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

        hooks = [(RESIDUALS[4], steer)]
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
            return model.run_with_hooks(tokens, fwd_hooks=[(RESIDUALS[4], change)])

    assert_agrees(
        run(model, tl_devicefix.gather_on("cpu")), run(reference, nullcontext()), home_of(model)
    )


def test_a_hook_that_mixes_in_a_tensor_of_no_device_of_the_model_is_named(
    model: Any, tokens: torch.Tensor
) -> None:
    """On one GPU, a tensor on the CPU fails too."""
    on_cpu = torch.ones(model.cfg.d_model)
    hook = (RESIDUALS[4], lambda value, hook: value + on_cpu)
    with pytest.raises(
        RuntimeError, match=r"hook on blocks\.4\.hook_resid_post mixes.*sim:3.*\.to\(activation"
    ):
        model.run_with_hooks(tokens, fwd_hooks=[hook])


def test_a_hook_that_returns_such_a_tensor_is_named(model: Any, tokens: torch.Tensor) -> None:
    hook = (RESIDUALS[4], lambda value, hook: value.cpu())
    with pytest.raises(
        RuntimeError, match=r"hook on blocks\.4\.hook_resid_post returned a tensor on cpu.*sim:3"
    ):
        model.run_with_hooks(tokens, fwd_hooks=[hook])


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            lambda gradient, hook: gradient * torch.ones(gradient.shape[-1]),
            r"hook on blocks\.4\.hook_resid_post mixes devices",
        ),
        (
            lambda gradient, hook: (gradient.cpu(),),
            r"hook on blocks\.4\.hook_resid_post returned a tensor on cpu",
        ),
    ],
    ids=["mixes", "returns"],
)
def test_a_backward_hook_with_a_tensor_of_no_device_of_the_model_is_named(
    hook: Any, message: str, model: Any, tokens: torch.Tensor
) -> None:
    with (
        model.hooks(bwd_hooks=[(RESIDUALS[4], hook)]),
        pytest.raises(RuntimeError, match=message),
    ):
        model(tokens, return_type="loss").backward()


@pytest.mark.parametrize("spread", [1, 4])
def test_an_error_of_the_hook_itself_is_the_user_s_own(
    model: Any, tokens: torch.Tensor, spread: int
) -> None:
    def fail(value: torch.Tensor, hook: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        model.run_with_hooks(tokens, fwd_hooks=[(RESIDUALS[4], fail)])


def test_hooks_added_before_a_model_is_spread_mix_devices_afterwards(
    load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", 1)
    vector = torch.linspace(-1, 1, model.cfg.d_model, device="sim:0")
    model.add_hook(RESIDUALS[4], lambda value, hook: value + vector)
    model.cfg.n_devices = 4

    model.move_model_modules_to_device()

    expected = reference.run_with_hooks(
        tokens, fwd_hooks=[(RESIDUALS[4], lambda value, hook: value + vector.cpu())]
    )
    assert_agrees(model(tokens), expected, home_of(model))
    assert {str(p.device) for p in model.parameters()} == {f"sim:{i}" for i in range(4)}
