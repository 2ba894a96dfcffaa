"""Blocks that live in host memory are on a device while they run, in either class."""

import pytest
import torch
from comparison import assert_agrees, assert_same_weights
from devices import device
from model_classes import BRIDGE, CLASSES, HOOKED
from offloads import assert_at_rest, offloaded_blocks
from packaging.version import Version
from torch.nn.utils import parametrize

import tl_devicefix
from tl_devicefix.dispatch.forward import is_aligned
from tl_devicefix.monkeypatch.versions import installed

# TransformerLens 3 cannot fold a Bridge's offloaded blocks.
FOLDED = (False, True) if installed() >= Version("4.0") else (False,)
OF_THREE = "some of three devices"
CASES = [
    (HOOKED, "llama", OF_THREE, True),
    (HOOKED, "gpt2", "all of one device", True),
    (HOOKED, "mixtral", "some of one device", True),
    (HOOKED, "bloom", "all but one of two devices", True),
    (BRIDGE, "llama", OF_THREE, False),
    (BRIDGE, "gpt2", "all but one of two devices", FOLDED[-1]),
    (BRIDGE, "gemma-2", OF_THREE, FOLDED[-1]),
    (BRIDGE, "mixtral", "some of one device", False),
]


@pytest.mark.parametrize(
    ("model_class", "kind", "spread", "folded"), [case for case in CASES if case[0] in CLASSES]
)
def test_offloaded_model_gives_the_same_cache_and_gradients(
    kind, spread, folded, load, on_one, tokens
):
    model, reference = load(kind, spread, folded=folded), on_one(kind, folded=folded)
    home = torch.device(model.cfg.device)
    assert len(offloaded_blocks(model)) > 1
    assert_at_rest(model)
    assert_same_weights(model, reference)
    expected, expected_cache = reference.run_with_cache(tokens)

    logits, cache = model.run_with_cache(tokens)

    assert_agrees([logits, cache], [expected, expected_cache], home)
    assert_agrees(cache.accumulated_resid(), expected_cache.accumulated_resid(), home)
    assert_at_rest(model)
    stored = getattr(cache.cache_dict, "stored", lambda: cache.cache_dict)()
    of_blocks = [name for name in stored if name.startswith("blocks.")]
    assert len(of_blocks) > 5 * model.cfg.n_layers
    for name in of_blocks:
        block = ".".join(name.split(".")[:2])
        assert stored[name].device == model.placement.device_of(block), name

    for variant in (model, reference):
        variant.zero_grad()
        variant(tokens, return_type="loss").backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_agrees(parameter.grad, expected[name].grad, parameter.device)
    assert_at_rest(model)


def test_max_memory_offloads_what_does_not_fit(load, machine, reference, tokens):
    total = load("llama", device_map=3).placement.bytes_on(3)
    max_memory = {0: int(0.6 * total), 1: int(0.4 * total)}
    model = load("llama", max_memory={**max_memory, "cpu": "1GiB"})
    assert offloaded_blocks(model)
    for index, limit in max_memory.items():
        assert model.placement.bytes_on(index) <= limit
    assert_at_rest(model)
    assert_agrees(model(tokens), reference(tokens), machine.devices[0])


@pytest.mark.bridge
@pytest.mark.parametrize("device", [device(1), "cpu"])
def test_moving_to_one_device_ends_offloading(device, load, reference, tokens):
    """One over several devices TransformerLens does not move to one."""
    model, target = load("llama", "some of one device"), torch.device(device)
    model.to(device)
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {target}
    assert model.placement.memories == (target,)
    assert not is_aligned(model)
    assert all("forward" not in vars(module) for module in model.modules())
    assert_agrees(model(tokens.to(target)), reference(tokens), target)


def test_a_parametrization_of_an_offloaded_weight_is_removed(load, tokens):
    model = load("llama", "some of one device")
    block = model.blocks[offloaded_blocks(model)[0]]
    module, name = next(
        (m, n) for m in block.modules() for n, w in m._parameters.items() if w is not None
    )
    parametrize.register_parametrization(module, name, torch.nn.Tanh())
    expected = model(tokens)
    parametrize.remove_parametrizations(module, name)
    assert_at_rest(model)
    assert torch.equal(model(tokens), expected)


@pytest.mark.bridge
def test_buffers_outside_of_components_are_where_placed(load):
    assert tl_devicefix.check(load("olmo-hybrid", device_map={"": 0, "blocks.0": "cpu"}))


@pytest.mark.bridge(in_3=True)
@pytest.mark.skipif(FOLDED != (False,), reason="TransformerLens 4 can fold offloaded blocks")
def test_transformer_lens_3_refuses_to_fold_offloaded_blocks(load):
    with pytest.raises(ValueError, match=r"blocks.1-2, 4 are offloaded.*TransformerLens 4"):
        load("llama", "some of one device").enable_compatibility_mode()
