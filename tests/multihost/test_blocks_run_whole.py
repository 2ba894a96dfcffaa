"""A block that nobody looks into is run by its rank as a whole, as it is now."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import N_LAYERS
from test_traffic import far_blocks
from test_traffic import names as commands_of
from torch import nn

FAR = N_LAYERS - 1
FAR_DEVICE = 3


def another_scale(model: Any) -> None:
    model.blocks[FAR].attn.attn_scale *= 2


def another_activation(model: Any) -> None:
    model.blocks[FAR].mlp.act_fn = torch.tanh


def another_module(model: Any) -> None:
    model.blocks[FAR].ln2 = nn.Identity()


def another_parameter(model: Any) -> None:
    weight = model.blocks[FAR].mlp.W_in
    model.blocks[FAR].mlp.W_in = nn.Parameter(weight.detach() * 2)


def other_values(model: Any) -> None:
    model.blocks[FAR].mlp.W_in.data = model.blocks[FAR].mlp.W_in.data * 2


def another_part_of_a_storage(model: Any) -> None:
    weight = model.blocks[FAR].mlp.W_in
    both = torch.stack([weight.detach(), weight.detach() * 2])
    weight.data = both[0]
    with torch.no_grad():
        model(torch.arange(4)[None].to(model.cfg.device))
    weight.data = both[1]


def values_in_place(model: Any) -> None:
    model.blocks[FAR].mlp.W_in.data.mul_(2)


def a_setting(model: Any) -> None:
    model.cfg.use_split_qkv_input = True


def a_forward_of_one_s_own(model: Any) -> None:
    model.blocks[FAR].mlp.forward = lambda x: x * 2


def a_hook_of_torch(model: Any) -> None:
    model.blocks[FAR].mlp.register_forward_hook(lambda module, args, output: output * 2)


def a_permanent_hook(model: Any) -> None:
    model.blocks[FAR].hook_mlp_out.add_perma_hook(lambda value, hook: value * 2)


CHANGES = [
    *(another_scale, another_activation, another_module, another_parameter, other_values),
    *(
        another_part_of_a_storage,
        values_in_place,
        a_setting,
        a_forward_of_one_s_own,
        a_hook_of_torch,
        a_permanent_hook,
    ),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_by_hand_counts(
    change: Callable[[Any], None], load: Any, on_cpu: Any, tokens: torch.Tensor
) -> None:
    model, alone = load("llama", 4), copy.deepcopy(on_cpu("llama"))
    with torch.no_grad():
        model(tokens)  # its rank has a copy of the block
    for each in (model, alone):
        change(each)

    with torch.no_grad():
        torch.testing.assert_close(model(tokens).cpu(), alone(tokens))


def test_an_error_in_a_hook(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    def fail(value: torch.Tensor, hook: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.3.hook_resid_post", fail)])

    torch.testing.assert_close(model(tokens).cpu(), reference(tokens))


def test_the_components_of_a_block_that_is_looked_into_are_run_whole(
    model: Any, reference: Any, tokens: torch.Tensor, told: list[Any]
) -> None:
    names = [f"blocks.{FAR}.{name}" for name in ("hook_resid_pre", "hook_resid_mid")]
    seen: dict[str, torch.Tensor] = {}
    hooks = [(name, lambda value, hook: seen.update({hook.name: value.cpu()})) for name in names]
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        told.clear()
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        expected = reference.run_with_cache(tokens, names_filter=names)[1]

    # ln1, attention, ln2, MLP.
    assert commands_of(told).count("Call") == len(far_blocks(model)) - 1 + 4
    for name in names:
        torch.testing.assert_close(seen[name], expected[name])


def test_a_class_of_the_user_s_is_run_here(model: Any, tokens: torch.Tensor) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    mlp, model.blocks[FAR].mlp = model.blocks[FAR].mlp, Doubled()
    try:
        model(tokens, return_type="loss").backward()
        assert model.W_E.grad.isfinite().all()
    finally:
        model.blocks[FAR].mlp = mlp
        model.zero_grad()


@pytest.mark.parametrize("own", [False, True], ids=["", "with a forward of its own"])
def test_a_model_that_is_dropped_is_gone(own: bool, load: Any, tokens: torch.Tensor) -> None:
    model = load("llama", 4)
    if own:
        model.blocks[FAR].forward = model.blocks[FAR].forward  # which holds the block
    with torch.no_grad():
        model.run_with_cache(tokens)
    model(tokens, return_type="loss").backward()
    block = weakref.ref(model.blocks[FAR])

    del model
    gc.collect()

    assert block() is None


def held() -> list[int]:
    """Bytes on each device."""
    gc.collect()
    return list(map(torch.get_device_module("sim").memory_allocated, range(4)))


def test_weights_that_were_exchanged_leave_a_full_device(
    machine: Any, load: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", 4)
    with torch.no_grad():
        model(tokens)  # its rank has copies of the blocks
    mlp, device = model.blocks[FAR].mlp, model.blocks[FAR].mlp.W_in.device.index
    full = machine.memory_allocated(device) + mlp.W_in.nbytes
    monkeypatch.setattr(machine, "_capacities", [full] * 4)

    for _ in range(2):
        mlp.W_in = nn.Parameter(mlp.W_in.detach() * 2)

    assert machine.memory_allocated(device) == full - mlp.W_in.nbytes
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        mlp.W_in.detach().repeat(2, 1)


@pytest.mark.parametrize("last", [0, FAR_DEVICE], ids=["of rank 0", "of another rank"])
def test_weights_of_an_offloaded_block_leave_with_it(
    last: int, machine: Any, from_pretrained: Any, tokens: torch.Tensor
) -> None:
    where = {"": 0, "blocks": "cpu", f"blocks.{FAR}": last}  # the other blocks visit that device
    model = from_pretrained("llama", device_map=where)
    before = held()

    with torch.no_grad():
        model(tokens)
    assert held() == before

    model(tokens, return_type="loss").backward()
    model.zero_grad()
    assert held() == before


def test_a_model_that_is_moved_leaves_nothing(load: Any, tokens: torch.Tensor) -> None:
    before = held()
    model = load("llama", 4)
    with torch.no_grad():
        model(tokens)

    model.to("cpu")

    assert held() == before
