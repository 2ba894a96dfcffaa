"""What is true of every model that is loaded: where it is, what it holds, what it shares."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from architectures import NO_PROCESSING


@pytest.mark.cover
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_devices": 2, "device": "sim:2"},
        {"device_map": {"": 1, "blocks.0": 3, "blocks.3": 0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "gemma-2", "bloom", "opt"])
def test_every_parameter_and_buffer_is_where_the_placement_says(
    name, options, from_pretrained, machine
):
    model = from_pretrained(name, **options)

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device == model.placement.device_of(name), name
        assert not tensor.is_meta, name
    assert model.cfg.device == str(model.placement.home)
    assert model.cfg.n_devices == len(model.placement.devices)


def test_every_tensor_crosses_to_its_device_and_no_other(from_pretrained, machine):
    from_pretrained("qwen2", n_devices=4)
    assert {transfer.source.type for transfer in machine.transfers} == {"cpu"}


@pytest.mark.cover
@pytest.mark.parametrize("options", [{}, NO_PROCESSING], ids=["processed", "not processed"])
@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma-2", "bloom"])
def test_no_two_parameters_share_memory_nor_any_with_the_hf_model(
    name, device, options, from_pretrained, hf_models, snapshot,
    machine,
) :  # fmt: skip
    """Not even tied embeddings."""
    before = snapshot(hf_models(name))

    model = from_pretrained(name, device=device, **options)

    for (one, tensor), (other, another) in itertools.combinations(model.named_parameters(), 2):
        if tensor.numel() and another.numel():
            addresses = tensor.untyped_storage().data_ptr(), another.untyped_storage().data_ptr()
            assert addresses[0] != addresses[1], (one, other)
    before.assert_unchanged()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before.assert_unchanged()


@pytest.mark.parametrize(
    ("name", "devices"), [("qwen2", (3, 2, 1, 0)), ("gpt2", (0,)), ("mixtral", (1,))]
)
def test_an_hf_model_that_is_on_devices_itself_stays_there(
    name, devices, hf_models, from_pretrained, snapshot,
    machine,
) :  # fmt: skip
    """TransformerLens's issue 371."""
    reference = from_pretrained(name, device="cpu")
    hf_model = copy.deepcopy(hf_models(name)).to(f"sim:{devices[0]}")
    for i, layer in enumerate(getattr(hf_model, "model", hf_model).children()):
        layer.to(f"sim:{devices[i % len(devices)]}")
    before = snapshot(hf_model)

    model = from_pretrained(name, hf_model, n_devices=4)

    before.assert_unchanged()
    for name, tensor in model.named_parameters():
        assert tensor.device == model.placement.device_of(name)
        assert torch.equal(tensor.detach().cpu(), reference.get_parameter(name).detach()), name
