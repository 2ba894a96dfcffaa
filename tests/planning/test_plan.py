"""What `plan` says: where each component is, and what it weighs there."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
from architectures import ARCHITECTURES, TOYS
from transformer_lens import HookedTransformer

from tl_devicefix import plan


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        ({}, ()),
        ({"positional_embedding_type": "rotary", "rotary_dim": 4}, ("pos_embed",)),
        ({"normalization_type": None}, ("ln_final",)),
    ],
    ids=["standard", "rotary", "no norm"],
)
def test_the_device_map_names_every_component_in_the_order_they_run(options, lacks, config):
    cfg = config(n_layers=2, **options)
    every = ["embed", "pos_embed", "blocks.0", "blocks.1", "ln_final", "unembed"]
    names = list(plan(cfg).device_map)
    assert names == [name for name in every if name not in lacks]
    assert set(names) == set(bytes_of_components(HookedTransformer(cfg))[0])


def bytes_of_components(model: HookedTransformer) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of parameters and of buffers that each component of a real model has."""
    weights: dict[str, int] = defaultdict(int)
    buffers: dict[str, int] = defaultdict(int)
    for kind, tensors in ((weights, model.named_parameters()), (buffers, model.named_buffers())):
        for name, tensor in tensors:
            parts = name.split(".")
            kind[".".join(parts[: 2 if parts[0] == "blocks" else 1])] += tensor.nbytes
    return weights, buffers


@pytest.mark.parametrize("name", [*ARCHITECTURES, *TOYS])
def test_the_sizes_are_those_of_the_real_model(name, references):
    if name in TOYS:
        cfg = TOYS[name](dtype=torch.bfloat16)
        model = HookedTransformer(cfg)
    else:
        model, cfg = references(name), references(name).cfg
    weights, buffers = bytes_of_components(model)
    for component in plan(cfg).components:
        assert component.weights == weights[component.name], component.name
        assert component.buffers == buffers[component.name], component.name


@pytest.mark.parametrize(("name", "n_devices"), [("gpt2", 1), ("llama", 3), ("gemma-2", 3)])
def test_a_checkpoint_is_loaded_as_planned_and_like_blocks_share_masks_and_rotary_tables(
    name, n_devices, checkpoints, machine
):
    checkpoint = str(checkpoints(name))
    model = HookedTransformer.from_pretrained(checkpoint, n_devices=n_devices)

    assert model.placement.device_map == plan(checkpoint, n_devices=n_devices).device_map
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
    kinds = {block.attn.attn_type for block in model.blocks}
    assert len({id(block.attn.IGNORE) for block in model.blocks}) == len(kinds)


def test_dtypes_may_be_named_as_transformer_lens_names_them(config):
    for model in (config(), "Llama-2-7b"):
        expected = plan(model, dtype=torch.bfloat16)
        assert 2 * expected.components[0].weights == plan(model).components[0].weights
        for dtype in ("bfloat16", "bf16", "torch.bfloat16"):
            assert plan(model, dtype=dtype) == expected


def test_a_placement_cannot_be_changed(config):
    placement = plan(config())
    for frozen, name in ((placement, "components"), (placement.components[0], "device")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, None)
    placement.device_map["embed"] = torch.device("meta")
    assert placement.device_map["embed"] == placement.home
