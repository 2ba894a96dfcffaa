"""What a placement, and a `device_map`, say of names that they do not know."""

from __future__ import annotations

import pytest
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix import plan


@pytest.fixture
def placement(config, machine):
    """Of 6 blocks, on two devices of four."""
    return plan(config(), n_devices=2)


HAS = "which has embed, pos_embed, blocks.0-5, ln_final, unembed"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("blocks.99", ""), ("blocks", ""), (4, ""), ("unembd.W_U", "; did you mean 'unembed'?")],
)
def test_a_name_of_no_component(name, meant, placement):
    for ask in (placement.device_of, placement.stored_on):
        with pytest.raises(KeyError) as caught:
            ask(name)
        assert caught.value.args[0] == f"{name!r} is in no component of this model, {HAS}{meant}"


@pytest.mark.parametrize(("n_devices", "is_told"), [(6, False), (8, True)])
def test_more_devices_than_blocks_are_told(n_devices, is_told, config, caplog):
    with tl_devicefix.simulate(8):
        assert len(plan(config(), n_devices=n_devices).devices) == 6
    assert ("n_devices is 8, but the model has 6 blocks" in caplog.text) == is_told


def test_hooks_are_where_what_they_see_is(config, machine):
    cfg = config(use_hook_tokens=True)
    model = HookedTransformer(cfg)
    model.to("sim:0")
    placement = plan(cfg, n_devices=3)

    for name in model.hook_dict:
        device = placement.device_of(name)
        assert device == placement.device_for(name)
        block = name.split(".")[1] if name.startswith("blocks.") else None
        assert device == placement.device_of(f"blocks.{block}" if block else "embed")
    assert placement.device_of("hook_embed") == placement.home
    assert placement.device_of("blocks.5.hook_resid_post") != placement.home


def test_bytes_on_devices_that_are_there(placement):
    assert placement.bytes_on(3) == placement.bytes_on("sim:2") == placement.bytes_on("cpu") == 0
    assert placement.bytes_on("sim") == placement.bytes_on(0) == placement.bytes_on("sim:0") > 0


def test_bytes_on_the_devices_of_a_machine_that_was_left(config):
    with tl_devicefix.simulate(2):
        placement = plan(config(), n_devices=2)
        n_bytes = placement.bytes_on(1)
    assert placement.bytes_on(1) == placement.bytes_on("sim:1") == n_bytes > 0
    with pytest.raises(ValueError, match="device '2' does not exist"):
        placement.bytes_on(2)


@pytest.mark.parametrize(
    ("device_map", "says"),
    [
        ({"": 0, "blocks.3": "disk"}, "as 'sim:0'; blocks on 'cpu' are offloaded to host memory"),
        ({"": 0, "blocks.3": "smi:1"}, "but that is not a .* as 'sim:0'"),
        ({"": 0, "blocks.3": 7}, "device_map puts blocks.3 on 7, but device '7' does not exist: "),
        ({"": 0, "blocks.3": None}, "device_map puts blocks.3 on None, but that is not a device"),
        ({"": 0, "blcks": 1}, "device_map names 'blcks', but this model has no such component"),
        ({"": 0, "blocks.3.mlp": 1}, "names 'blocks.3.mlp', .* each placed as a whole"),
        (
            {"embed": 0, "blocks": 1},
            "device_map leaves out pos_embed, ln_final, unembed: give each",
        ),
        ("balance", "device_map='balance' is neither .*; did you mean 'balanced'?"),
        (3.5, "device_map=3.5 is neither a device nor one of 'auto', 'balanced', 'sequential', "),
        ("sim:7", "but device 'sim:7' does not exist: this machine has 4 device"),
    ],
)
def test_a_device_map_that_says_no_device(device_map, says, config, machine):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        plan(config(), device_map=device_map)


@pytest.mark.parametrize("device_map", [{"": 0, "blocks.3": 1}, 1])
def test_a_device_map_that_does_not_fit_is_told_to_map_blocks_elsewhere(
    device_map, config, machine
):
    with pytest.raises(ValueError, match="do not fit") as caught:
        plan(config(), device_map=device_map, max_memory={0: "1KiB", 1: "1KiB"})
    message = str(caught.value)
    assert "put less there in device_map" in message
    assert "map them to 'cpu'" in message
    assert "more devices" not in message
    assert "first_n_layers" not in message  # which a Bridge has not
    assert "in max_memory" not in message  # which does nothing beside a map
