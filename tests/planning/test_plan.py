"""What `plan` says: where each component is, and what it weighs there."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, TOYS
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix import plan

LLAMA_70B = "meta-llama/Llama-2-70b-chat-hf"


@pytest.mark.parametrize(
    ("options", "around"),
    [
        ({}, ("embed", "pos_embed", "ln_final", "unembed")),
        (
            {"positional_embedding_type": "rotary", "rotary_dim": 4},
            ("embed", "ln_final", "unembed"),
        ),
        ({"normalization_type": None}, ("embed", "pos_embed", "unembed")),
    ],
    ids=["standard", "rotary", "no norm"],
)
def test_the_device_map_names_every_component_in_the_order_they_run(
    options: dict[str, Any], around: tuple[str, ...], config: Any
) -> None:
    cfg = config(n_layers=3, **options)
    names = list(plan(cfg).device_map)

    first = 2 if "pos_embed" in around else 1
    assert names == [*around[:first], "blocks.0", "blocks.1", "blocks.2", *around[first:]]
    assert set(names) == components_with_tensors(HookedTransformer(cfg)) | {"blocks.0"}


def components_with_tensors(model: HookedTransformer) -> set[str]:
    return set(bytes_of_components(model)[0])


def bytes_of_components(model: HookedTransformer) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of parameters and of buffers that each component of a real model has."""
    weights: dict[str, int] = defaultdict(int)
    buffers: dict[str, int] = defaultdict(int)
    for kind, tensors in ((weights, model.named_parameters()), (buffers, model.named_buffers())):
        for name, tensor in tensors:
            parts = name.split(".")
            kind[".".join(parts[: 2 if parts[0] == "blocks" else 1])] += tensor.nbytes
    return weights, buffers


def assert_weighs_as(placement: Any, model: HookedTransformer) -> None:
    weights, buffers = bytes_of_components(model)
    for component in placement.components:
        assert component.weights == weights[component.name], component.name
        assert component.buffers == buffers[component.name], component.name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_sizes_are_those_of_the_real_model(name: str, references: Any) -> None:
    assert_weighs_as(plan(references(name).cfg), references(name))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma-2"])
@pytest.mark.parametrize("n_devices", [1, 3])
def test_blocks_of_one_kind_on_one_device_share_one_mask_and_rotary_table(
    n_devices: int, name: str, checkpoints: Any, machine: Any
) -> None:
    checkpoint = str(checkpoints(name))
    model = HookedTransformer.from_pretrained(checkpoint, n_devices=n_devices)

    for device in model.placement.devices:
        current = [block.attn for block in model.blocks if block.attn.W_Q.device == device]
        for kind in {attention.attn_type for attention in current}:
            of_kind = [attention for attention in current if attention.attn_type == kind]
            for buffer in dict(current[0].named_buffers()):
                assert len({id(getattr(attention, buffer)) for attention in of_kind}) == 1, buffer
        tensors = [*model.parameters(), *model.buffers()]  # each tensor once
        present = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        assert model.placement.bytes_on(device) == present
    model.to(model.placement.devices[-1])
    assert len({id(block.attn.IGNORE) for block in model.blocks}) == len(
        {block.attn.attn_type for block in model.blocks}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("toy", TOYS)
def test_the_sizes_of_a_toy_are_those_of_the_real_model(toy: str, dtype: torch.dtype) -> None:
    cfg = TOYS[toy](dtype=dtype)
    assert_weighs_as(plan(cfg), HookedTransformer(cfg))


@pytest.mark.parametrize("name", ["gpt2", "gemma-2"])
def test_the_plan_of_a_checkpoint_is_where_it_is_then_loaded(
    name: str, checkpoints: Any, machine: Any
) -> None:
    planned = plan(str(checkpoints(name)), n_devices=3)

    model = HookedTransformer.from_pretrained(checkpoints(name), n_devices=3)

    assert model.placement.device_map == planned.device_map


def test_a_model_that_transformer_lens_knows_by_name_needs_no_network() -> None:
    with tl_devicefix.simulate(4, memory="80GiB") as machine:
        placement = plan(LLAMA_70B, n_devices=4, dtype="bfloat16")

        assert sum(c.weights for c in placement.components) == pytest.approx(2 * 69e9, rel=0.01)
        shares = [placement.bytes_on(device) for device in placement.devices]
        assert len(shares) == 4
        assert max(shares) < 1.1 * min(shares)
        assert machine.max_memory_allocated("sim:0") == 0


@pytest.mark.parametrize("of_config", [False, True])
def test_dtypes_may_be_named_as_transformer_lens_names_them(of_config: bool, config: Any) -> None:
    model = config() if of_config else "Llama-2-7b"
    placements = [
        plan(model, dtype=dtype) for dtype in (torch.bfloat16, "bfloat16", "bf16", "torch.bfloat16")
    ]

    assert all(placement == placements[0] for placement in placements)
    assert 2 * placements[0].components[0].weights == plan(model).components[0].weights


def test_a_placement_cannot_be_changed(config: Any) -> None:
    placement = plan(config())
    for frozen, name in ((placement, "components"), (placement.components[0], "device")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, None)
    placement.device_map["embed"] = torch.device("meta")
    assert placement.device_map["embed"] == placement.home


def test_printing_shows_a_table_of_devices_with_components_weights_and_totals(config: Any) -> None:
    with tl_devicefix.simulate(3):
        placement = plan("Llama-2-7b", n_devices=3, dtype="bfloat16")
        header, *rows, total = str(placement).splitlines()

    assert header.split() == ["device", "components", "weights", "total"]
    assert [row.split()[0] for row in rows] == ["sim:0", "sim:1", "sim:2"]
    assert "(home)" in rows[0]
    blocks_1 = [n for n, d in placement.device_map.items() if d == placement.devices[1]]
    assert f"{blocks_1[0]}-{blocks_1[-1].removeprefix('blocks.')}" in rows[1]
    assert "embed, blocks.0-" in rows[0]
    assert "ln_final, unembed" in rows[0]
    in_gib = placement.bytes_on(placement.devices[2]) / 2**30
    assert rows[2].endswith(f"{in_gib:.2f} GiB")
    everything = sum(c.weights for c in placement.components) / 2**30
    assert total.startswith("total")
    assert f"{everything:.2f} GiB" in total
