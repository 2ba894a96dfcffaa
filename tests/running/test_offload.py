"""Blocks whose weights live in host memory: everything works, and two at a time are on a device."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import NO_PROCESSING
from comparison import assert_agrees, assert_same_weights
from kinds import devices_of, home_of, new_kv_cache
from transformer_lens import HookedTransformer
from transformer_lens.train import HookedTransformerTrainConfig

import tl_devicefix
from tl_devicefix import copying
from tl_devicefix.alignment import is_aligned
from tl_devicefix.fitting import working_room
from tl_devicefix.kept_weights import keeping_on_host
from tl_devicefix.simulation.machine import Machine, Transfer

HOST = torch.device("cpu")

OFFLOADED = {
    "some of one device": {"": 0, "blocks.1": "cpu", "blocks.2": "cpu", "blocks.4": "cpu"},
    "all of one device": {"": 0, "blocks": "cpu"},
    "some of three devices": {
        "": 0, "blocks.1": "cpu", "blocks.2": 1, "blocks.3": "cpu", "blocks.4": 2,
    },
    "all but one of two devices": {"": 0, "blocks": "cpu", "blocks.2": 1},
}  # fmt: skip

every_offload = pytest.mark.parametrize("offload", OFFLOADED)
every_kind = pytest.mark.parametrize("kind", ["llama", "gpt2"])


@pytest.fixture(scope="module")
def load(machine: Machine, from_pretrained: Any) -> Callable[..., HookedTransformer]:
    """`load("gpt2", "all of one device")`: a model for one test to change as it likes."""

    def load(name: str, offload: str, **options: Any) -> HookedTransformer:
        return from_pretrained(name, device_map=OFFLOADED[offload], **options)

    return load


@pytest.fixture(scope="module")
def models(load: Any) -> Callable[..., HookedTransformer]:
    loaded: dict[Any, HookedTransformer] = {}

    def get(kind: str, offload: str) -> HookedTransformer:
        if (kind, offload) not in loaded:
            loaded[kind, offload] = load(kind, offload)
        return loaded[kind, offload]

    return get


@pytest.fixture
def offload() -> str:
    return "some of one device"


@pytest.fixture
def model(models: Any, kind: str, offload: str) -> HookedTransformer:
    """The model under test, not to be changed."""
    model = models(kind, offload)
    model.reset_hooks(including_permanent=True)
    model.zero_grad()
    return model


def assert_at_rest(model: HookedTransformer) -> None:
    """The weights are where the placement says, and parameters."""
    for name, parameter in model.named_parameters():
        assert type(parameter) is torch.nn.Parameter or parameter.is_leaf
        assert parameter.device == model.placement.stored_on(name), name
    for name, buffer in model.named_buffers():
        assert buffer.device == model.placement.device_of(name), name


def weights_of(block: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in block.parameters())


def offloaded_blocks(model: HookedTransformer) -> list[int]:
    placed = enumerate(c for c in model.placement.components if c.name.startswith("blocks."))
    return [layer for layer, component in placed if component.offloaded]


# --------------------------------------------------------------------------------------------
# Parity


@pytest.mark.fails_unpatched
@every_kind
@every_offload
def test_a_model_is_loaded_folded_and_stored_on_the_host(
    offload: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    assert len(offloaded_blocks(model)) > 1
    assert_at_rest(model)
    assert_same_weights(model, reference)
    assert_agrees(model(tokens), reference(tokens), home_of(model))
    assert_at_rest(model)


@every_kind
@every_offload
def test_caches_are_the_same_and_where_the_blocks_run(
    offload: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    expected_logits, expected = reference.run_with_cache(tokens)

    logits, cache = model.run_with_cache(tokens)

    assert_agrees([logits, cache], [expected_logits, expected], home_of(model))
    stored = getattr(cache.cache_dict, "stored", lambda: cache.cache_dict)()
    for layer in range(model.cfg.n_layers):
        there = model.placement.device_of(f"blocks.{layer}")
        assert stored[f"blocks.{layer}.hook_resid_mid"].device == there


@every_offload
@pytest.mark.parametrize("kind", ["mixtral", "pythia", "bloom", "gemma-2"])
def test_other_architectures_are_the_same_too(
    kind: str, offload: str, load: Any, on_cpu: Any, tokens: torch.Tensor
) -> None:
    model, reference = load(kind, offload, **NO_PROCESSING), on_cpu(kind, **NO_PROCESSING)

    assert_agrees(model(tokens), reference(tokens), home_of(model))
    assert_at_rest(model)


@every_kind
@every_offload
def test_generating_is_the_same(
    offload: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False}
    in_pieces = new_kv_cache(model, len(tokens))

    assert_agrees(
        model.generate(tokens.to(home_of(model)), **options),
        reference.generate(tokens, **options),
        home_of(model),
    )
    model(tokens[:, :4], past_kv_cache=in_pieces)
    assert_agrees(
        model(tokens[:, 4:], past_kv_cache=in_pieces), reference(tokens)[:, 4:], home_of(model)
    )
    keys = [entry.past_keys.device for entry in in_pieces.entries]
    assert keys == [model.placement.device_of(f"blocks.{i}") for i in range(model.cfg.n_layers)]


@every_offload
def test_a_forward_may_start_and_stop_at_layers(
    offload: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    residual = reference(tokens, stop_at_layer=2)

    assert_agrees(model(tokens, stop_at_layer=2), residual, home_of(model))
    assert_agrees(
        model(residual, start_at_layer=2), reference(residual, start_at_layer=2), home_of(model)
    )
    assert_agrees(
        model(residual, start_at_layer=2, stop_at_layer=-1),
        reference(residual, start_at_layer=2, stop_at_layer=-1),
        home_of(model),
    )


def test_one_block_may_be_run_by_itself(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    residual = reference(tokens, stop_at_layer=1)

    there = model.blocks[1](residual.to(model.placement.device_of("blocks.1")))

    assert_agrees(there, reference.blocks[1](residual), home_of(model))
    assert_at_rest(model)


@every_kind
@every_offload
def test_analyses_read_weights_and_caches_at_home(
    kind: str, offload: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    _, cache = model.run_with_cache(tokens)
    _, expected = reference.run_with_cache(tokens)

    for read in (
        lambda model, cache: [model.W_Q, model.W_out, model.b_O],
        lambda model, cache: model.accumulated_bias(4),
        lambda model, cache: model.all_composition_scores("K"),
        lambda model, cache: cache.stack_head_results(),
        lambda model, cache: cache.logit_attrs(cache.decompose_resid(), tokens=3),
        lambda model, cache: cache.get_full_resid_decomposition(expand_neurons=False),
    ):
        assert_agrees(read(model, cache), read(reference, expected), home_of(model))
    assert model.blocks[1].attn.W_Q.device == HOST
    with tl_devicefix.gather_on("cpu"):
        assert_agrees(model.W_in, reference.W_in, HOST)


# --------------------------------------------------------------------------------------------
# Hooks


@every_offload
def test_hooks_see_the_weights_where_the_block_runs_and_may_use_others_from_the_host(
    offload: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    here = set()

    def of(model: Any) -> Callable[..., torch.Tensor]:
        def steer(activation: torch.Tensor, hook: Any) -> torch.Tensor:
            here.add(model.blocks[4].attn.W_Q.device == activation.device)
            return activation + model.blocks[1].mlp.W_out.sum(0) + model.blocks[4].mlp.W_out.sum(0)

        return steer

    name = "blocks.4.hook_resid_mid"
    assert_agrees(
        model.run_with_hooks(tokens, fwd_hooks=[(name, of(model))]),
        reference.run_with_hooks(tokens, fwd_hooks=[(name, of(reference))]),
        home_of(model),
    )
    assert here == {True}


def test_a_hook_may_run_the_model(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    def of(model: Any) -> Callable[..., torch.Tensor]:
        def patch(activation: torch.Tensor, hook: Any) -> torch.Tensor:
            if torch.is_grad_enabled():  # not in the run that it starts itself
                with torch.no_grad():
                    other = model(tokens.flip(1), stop_at_layer=3)
                return activation + other
            return activation

        return patch

    hooks = [("blocks.2.hook_resid_mid", of(model))]
    expected_hooks = [("blocks.2.hook_resid_mid", of(reference))]

    assert_agrees(
        model.run_with_hooks(tokens, fwd_hooks=hooks),
        reference.run_with_hooks(tokens, fwd_hooks=expected_hooks),
        home_of(model),
    )
    assert_at_rest(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [1, 3])
@every_offload
def test_after_a_hook_that_raises_the_model_is_whole_and_no_memory_stays(
    offload: str, layer: int, error: Any, model: Any, reference: Any,
    tokens: torch.Tensor, machine: Machine,
) -> None:  # fmt: skip
    def fail(activation: torch.Tensor, hook: Any) -> None:
        raise error("as it was told")

    gc.collect()
    before = [machine.memory_allocated(i) for i in range(4)]

    with contextlib.suppress(error):
        model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", fail)])

    assert_at_rest(model)
    gc.collect()
    assert [machine.memory_allocated(i) for i in range(4)] == before
    assert_agrees(model(tokens), reference(tokens), home_of(model))


def test_what_a_hook_changes_in_its_block_s_weights_stays_changed(
    load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", "all of one device"), copy.deepcopy(reference)

    for each in (model, reference):

        @torch.no_grad()
        def halve(activation: torch.Tensor, hook: Any, each: Any = each) -> None:
            each.blocks[2].mlp.W_out.mul_(0.5)

        each.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_pre", halve)])

    assert_at_rest(model)
    assert_same_weights(model, reference)
    assert_agrees(model(tokens), reference(tokens))


def test_a_change_of_a_weight_on_its_way_is_not_missed(
    load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", "all of one device"), copy.deepcopy(reference)
    results = []
    for each in (model, reference):

        @torch.no_grad()
        def halve_next(activation: torch.Tensor, hook: Any, each: Any = each) -> None:
            each.blocks[3].mlp.W_out.mul_(0.5)

        hooks = [("blocks.2.hook_resid_pre", halve_next)]
        results.append(each.run_with_hooks(tokens, fwd_hooks=hooks))

    assert_agrees(*results)


@every_kind
def test_a_forward_sees_what_was_changed_in_place_before(
    load: Any, kind: str, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load(kind, "some of one device"), copy.deepcopy(reference)

    for each in (model, reference):
        with torch.no_grad():
            each.blocks[1].attn.W_O[:, :, 3] += 1
        each.blocks[2].attn.W_V.data *= 2

    assert_agrees(model(tokens), reference(tokens))


# --------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.fails_unpatched
@every_kind
@every_offload
def test_gradients_arrive_at_the_parameters(
    offload: str, model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    for each in (model, reference):
        each(tokens, return_type="loss").backward()

    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_agrees(parameter.grad, expected[name].grad, parameter.device)
    assert_at_rest(model)


def test_second_derivatives_are_the_same(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    results = []
    for each in (model, reference):
        weights = [each.blocks[1].attn.W_O, each.blocks[4].mlp.W_out]
        first = torch.autograd.grad(each(tokens, return_type="loss"), weights, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), weights))
    assert_agrees(results[0], results[1], HOST)


@every_offload
def test_training_is_the_same(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", offload), copy.deepcopy(reference)
    for each in (model, reference):
        optimiser = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(3):
            optimiser.zero_grad()
            each(tokens, return_type="loss").backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimiser.step()

    assert_same_weights(model, reference, tolerance=1e-4)
    assert_at_rest(model)


def test_frozen_weights_and_gradients_of_activations(
    load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", "all of one device"), copy.deepcopy(reference)
    gradients = []
    for each in (model, reference):
        each.requires_grad_(False)
        residual = each(tokens, stop_at_layer=0).detach().requires_grad_()
        each(residual, start_at_layer=0).sum().backward()
        gradients.append(residual.grad)
    assert_agrees(*gradients)


@every_kind
def test_a_graph_does_not_keep_the_weights_that_have_visited(
    kind: str, models: Any, from_pretrained: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    """But for GPT-2's W_Q, W_K and W_V, of which TransformerLens makes copies on any device."""
    kept = []
    for model in (models(kind, "all of one device"), from_pretrained(kind, device_map=0)):
        gc.collect()
        before = machine.memory_allocated(0)
        loss = model(tokens, return_type="loss")
        gc.collect()
        kept.append(machine.memory_allocated(0) - before)
        del loss
    assert kept[0] == kept[1]


@pytest.mark.parametrize("changed", ["activation", "weight"])
def test_what_backward_needs_may_not_be_changed_before(changed: str) -> None:
    """Not simulated: there, torch cannot pass on an error that Python raises in backward."""
    tensors = {name: torch.ones(3, requires_grad=True) for name in ("weight", "activation")}
    copy_there = tensors["weight"] * 1
    with keeping_on_host([(copy_there, tensors["weight"])], HOST):
        result = (tensors["activation"] * copy_there).exp()
    assert_agrees(torch.autograd.grad(result.sum(), copy_there, retain_graph=True), [result])

    with torch.no_grad():
        {**tensors, "activation": result}[changed].mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# --------------------------------------------------------------------------------------------
# Memory and copies


@pytest.fixture
def transfers_of(machine: Machine) -> Callable[..., list[Transfer]]:
    def transfers_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Transfer]:
        machine.reset_transfers()
        function(*args, **kwargs)
        return [t for t in machine.transfers if t.source == HOST]

    return transfers_of


@every_kind
@every_offload
def test_a_forward_copies_the_weights_of_each_offloaded_block_once(
    offload: str, model: Any, tokens: torch.Tensor, transfers_of: Any
) -> None:
    at_home = tokens.to(home_of(model))
    away = [model.blocks[layer] for layer in offloaded_blocks(model)]

    copied = transfers_of(model, at_home)

    assert sum(t.bytes for t in copied) == sum(weights_of(block) for block in away)
    assert len(copied) == sum(len(list(block.parameters())) for block in away)


def test_a_part_of_a_forward_copies_the_weights_of_its_blocks_only(
    model: Any, tokens: torch.Tensor, transfers_of: Any
) -> None:
    at_home = tokens.to(home_of(model))

    copied = transfers_of(model, at_home, stop_at_layer=2)

    assert sum(t.bytes for t in copied) == weights_of(model.blocks[1])


@pytest.mark.parametrize("offload", ["all of one device"])
def test_the_next_block_is_on_its_way_before_a_block_computes(
    offload: str, model: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    at_home = tokens.to(home_of(model))
    n_layers, n_weights = model.cfg.n_layers, len(list(model.blocks[0].parameters()))
    machine.reset_transfers()
    sent: dict[str, list[int]] = {"resid_pre": [], "resid_post": []}

    def note(activation: torch.Tensor, hook: Any) -> None:
        sent[hook.name.rsplit("hook_")[1]].append(len(machine.transfers) // n_weights)

    names = ("resid_pre", "resid_post")
    hooks = [(lambda name: name.endswith(names), note)]
    model.run_with_hooks(at_home, fwd_hooks=hooks)

    # Before block k computes, k + 1 is sent for; k + 2 is not before k has computed.
    assert sent["resid_pre"] == [min(k + 2, n_layers) for k in range(n_layers)]
    assert sent["resid_post"] == sent["resid_pre"]


@every_kind
@every_offload
def test_two_visiting_blocks_at_a_time_are_on_a_device(
    offload: str, model: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    one_token = tokens[:1, :1].to(home_of(model))  # whose activations are less than any block
    placement = model.placement
    gc.collect()
    before = {device: machine.memory_allocated(device) for device in placement.devices}
    for device in before:
        machine.reset_peak_memory_stats(device)

    with torch.no_grad():
        model(one_token)

    for device, held in before.items():
        runs_here = (placement.device_of(f"blocks.{i}") for i in offloaded_blocks(model))
        block = weights_of(model.blocks[0])
        visiting = min(2, list(runs_here).count(device)) * block
        assert visiting <= machine.max_memory_allocated(device) - held < visiting + block / 2
        assert machine.memory_allocated(device) == held


@pytest.mark.parametrize("offload", ["all of one device"])
def test_a_backward_brings_back_less_than_two_blocks_at_a_time(
    offload: str, model: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    logits = model(tokens[:1, :1].to(home_of(model)))
    held = machine.memory_allocated(0) + sum(
        p.nbytes for p in model.parameters() if p.device != HOST
    )  # their gradients
    machine.reset_peak_memory_stats(0)

    logits.sum().backward()

    block = weights_of(model.blocks[0])
    assert block / 8 < machine.max_memory_allocated(0) - held < 2 * block


def held_on(model: HookedTransformer, device: torch.device) -> int:
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if t.device == device}
    return sum(tensor.nbytes for tensor in tensors.values())


def test_the_plan_knows_what_is_held(model: Any, machine: Machine) -> None:
    placement = model.placement
    visiting = 2 * weights_of(model.blocks[1])
    home = home_of(model)
    assert placement.bytes_on(home) == held_on(model, home) + visiting
    assert placement.bytes_on("cpu") == held_on(model, HOST)


@every_offload
def test_loading_needs_no_more_of_a_device_than_running_and_what_is_being_folded(
    offload: str, load: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    gc.collect()
    for device in machine.devices:
        machine.reset_peak_memory_stats(device)
    before = [machine.memory_allocated(device) for device in machine.devices]

    placement = load("llama", offload).placement

    folding = working_room(placement, torch.float32)
    for device in placement.devices:
        taken = machine.max_memory_allocated(device) - before[device.index]
        assert taken <= placement.bytes_on(device) + folding


@pytest.mark.parametrize("limited", [{0: 0.6}, {0: 0.6, 1: 0.4}])
def test_max_memory_offloads_what_does_not_fit(
    limited: dict[int, float], machine: Machine, from_pretrained: Any, reference: Any,
    tokens: torch.Tensor,
) -> None:  # fmt: skip
    whole = from_pretrained("llama", device_map=3).placement.bytes_on(3)
    max_memory = {device: int(part * whole) for device, part in limited.items()}

    n_devices = len(limited)
    model = from_pretrained("llama", n_devices=n_devices, max_memory={**max_memory, "cpu": "1GiB"})

    assert offloaded_blocks(model)
    for device, limit in max_memory.items():
        assert model.placement.bytes_on(device) <= limit
    assert_at_rest(model)
    assert_agrees(model(tokens), reference(tokens), home_of(model))


# --------------------------------------------------------------------------------------------
# Moving and changing a model


@pytest.mark.parametrize("device", ["sim:1", "cpu", "sim:0"])
@every_offload
def test_a_device_gathers_the_model(
    device: str, offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload)

    model.to(device)

    assert devices_of(model) == {device}
    assert model.placement.memories == (torch.device(device),)
    assert not is_aligned(model)
    assert all("forward" not in vars(module) for module in model.modules())
    assert_agrees(model(tokens), reference(tokens), torch.device(device))


@every_offload
def test_a_dtype_keeps_the_blocks_on_the_host(
    offload: str, load: Any, on_cpu: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload)
    before = offloaded_blocks(model)

    model.to(torch.float64)

    assert offloaded_blocks(model) == before
    assert_at_rest(model)
    assert_agrees(model(tokens), copy.deepcopy(on_cpu("llama")).to(torch.float64)(tokens))


@every_offload
def test_a_copy_runs_by_itself(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload)
    model(tokens)

    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    del model
    gc.collect()

    assert_at_rest(copied)
    assert_agrees(copied(tokens), reference(tokens), home_of(copied))
    assert_at_rest(copied)


def test_a_pickled_model_runs_where_it_is_put(
    load: Any, reference: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    torch.save(load("llama", "some of three devices"), tmp_path / "model.pt")

    model = torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=False)

    assert devices_of(model) == {"cpu"}
    assert_agrees(model(tokens), reference(tokens), HOST)


def test_a_state_dict_goes_in_and_out(load: Any, reference: Any, tokens: torch.Tensor) -> None:
    model, other = load("llama", "all of one device"), load("llama", "some of three devices")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()

    other.load_state_dict(model.state_dict())

    assert_at_rest(other)
    assert_agrees(other(tokens), reference(tokens), home_of(other))


@every_offload
def test_weights_are_processed_on_the_device_and_kept_on_the_host(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload, **NO_PROCESSING)

    model.process_weights_()

    assert_at_rest(model)
    assert_agrees(model(tokens).log_softmax(-1), reference(tokens).log_softmax(-1), home_of(model))


@every_offload
def test_placing_anew_changes_nothing(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload)
    before = model.placement

    model.move_model_modules_to_device()
    model.setup()

    assert model.placement == before
    assert_at_rest(model)
    assert_agrees(model(tokens), reference(tokens), home_of(model))


class Probe(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        return residual * self.scale


@pytest.mark.parametrize("device", ["sim:0", "sim:3", "cpu"])
@every_offload
def test_attached_modules_run_wherever_they_are(
    device: str, offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", offload), copy.deepcopy(reference)
    if device == "sim:3":
        device = str(model.placement.devices[-1])
    for each, there in ((model, device), (reference, "cpu")):
        each.blocks[3].mlp = Probe(each.cfg.d_model).to(there)
        each.setup()

    assert_agrees(model(tokens), reference(tokens), home_of(model))
    assert model.blocks[3].mlp.scale.device == torch.device(device)


@pytest.mark.parametrize("kind", ["mixtral"])
def test_torch_s_modules_of_transformer_lens_itself_are_left_alone(
    kind: str, load: Any, on_cpu: Any
) -> None:
    on_cpu(kind, **NO_PROCESSING)
    model = load(kind, "all of one device", **NO_PROCESSING)
    with_forward = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert with_forward == [f"blocks.{layer}" for layer in range(5)]


def test_it_runs_without_the_patches_too(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    at_home = tokens.to(home_of(model))
    with tl_devicefix.unpatched():
        assert_agrees(model(at_home), reference(tokens))
    assert_at_rest(model)


def test_several_threads_may_run_it(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    def run(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens)

    batches = [tokens.roll(i, 1) for i in range(8)]
    with ThreadPoolExecutor(4) as threads:
        assert_agrees(list(threads.map(run, batches)), [reference(each) for each in batches])
    assert_at_rest(model)


@pytest.mark.parametrize("offload", ["some of one device", "some of three devices"])
def test_train_leaves_the_blocks_on_the_host(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", offload), copy.deepcopy(reference)
    data = [{"tokens": row} for row in tokens]
    options = {
        "num_epochs": 1,
        "batch_size": 2,
        "lr": 1e-2,
        "optimizer_name": "SGD",
        "wandb": False,
    }

    from transformer_lens.train import train  # the patched one

    for each, device in ((model, None), (reference, "cpu")):
        torch.manual_seed(0)
        train(each, HookedTransformerTrainConfig(device=device, **options), data)

    assert_at_rest(model)
    assert_same_weights(model, reference)


# --------------------------------------------------------------------------------------------
# Streams


class Streams:
    """Of a device that has streams, what is asked of them, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running = "computing"
        streams = self

        class Stream:
            def __init__(self, device: torch.device, name: str = "copying") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                streams.events.append(f"{self.name} waits for {other.name}")

            def record_event(self) -> int:
                streams.events.append(f"{self.name} done: {len(streams.events)}")
                return len(streams.events) - 1

            def wait_event(self, event: int) -> None:
                streams.events.append(f"{self.name} waits for {event}")

        self.Stream = Stream
        self.computing = Stream(torch.device("sim", 0), "computing")

    def current_stream(self, device: torch.device) -> Any:
        return self.computing

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.running = stream.name
        yield
        self.running = "computing"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Any:
    """Let the simulated devices have streams, and record what is copied on them."""
    streams, record = Streams(), machine.record_transfer

    def record_transfer(source: torch.device, target: torch.device, copied: torch.Tensor) -> None:
        if source != target:
            streams.events.append(f"{streams.running} copy")
        record(source, target, copied)

    monkeypatch.setattr(machine, "record_transfer", record_transfer)
    monkeypatch.setattr(copying, "_streams", lambda device: streams)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    copying._copy_stream.cache_clear()
    yield streams
    copying._copy_stream.cache_clear()


def test_copies_have_a_stream_of_their_own_and_a_block_waits_for_its_own(
    models: Any, tokens: torch.Tensor, streams: Any
) -> None:
    model = models("llama", "all of one device")
    at_home = tokens.to(home_of(model))
    n_weights = len(list(model.blocks[0].parameters()))
    streams.events.clear()

    with torch.no_grad():
        model(at_home)

    copies = ["copying waits for computing", *["copying copy"] * n_weights]
    events, position = streams.events, 0
    done: list[str] = []
    expected: list[str] = []
    for step in ["send", "send", *["run", "send"] * 3, "run", "run"]:
        if step == "send":
            position = len(expected) + len(copies)
            done.append(str(position))
            expected += [*copies, f"copying done: {position}"]
        else:
            expected.append(f"computing waits for {done.pop(0)}")
    assert events == expected


def test_what_was_sent_in_vain_is_waited_for_before_its_memory_is_used(
    models: Any, tokens: torch.Tensor, streams: Any
) -> None:
    model = models("llama", "all of one device")

    def fail(activation: torch.Tensor, hook: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_mid", fail)])

    done = [event.split()[-1] for event in streams.events if " done: " in event]
    waited = [e.split()[-1] for e in streams.events if e.startswith("computing waits for ")]
    assert waited == done
