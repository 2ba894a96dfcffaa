"""Compatibility mode is all or nothing: on any error, the Bridge is what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparison import assert_agrees, assert_same_tensors, on_cpu
from dispatching import dispatched
from hf_models import N_LAYERS
from transformer_lens.weight_processing import ProcessWeights

import tl_devicefix
from tl_devicefix.transformer_bridge import originals


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("name", ["gpt2", "gemma-2"])
def test_tied_weights_whose_final_norm_is_on_another_device_are_folded(
    name: str, machine: Any, boot: Any, references: Any, tokens: torch.Tensor
) -> None:
    """The unpatched release raises there, and what it leaves computes other logits."""
    bridge = boot(name, device_map=dispatched(name, machine.devices))
    home = machine.devices[0]
    before = bridge(tokens).log_softmax(-1)

    bridge.enable_compatibility_mode()

    assert_agrees(bridge(tokens), references(name, compatible=True)(tokens), home)
    assert_agrees(bridge(tokens).log_softmax(-1), before, home)


def weights_of(bridge: Any) -> dict[str, torch.nn.Parameter]:
    return dict(bridge.original_model.named_parameters(remove_duplicate=False))


class Interrupted(BaseException):
    """Such as KeyboardInterrupt."""


@pytest.mark.cover(("name", "at_block"), ("name", "error"))
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, Interrupted])
@pytest.mark.parametrize("at_block", [0, N_LAYERS - 1])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_an_error_half_way_leaves_the_bridge_as_it_was(
    name: str,
    at_block: int,
    error: type[BaseException],
    machine: Any,
    boot: Any,
    tokens: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge = boot(name, n_devices=4)
    parameters, logits = weights_of(bridge), bridge(tokens)
    values = on_cpu(copy.deepcopy(bridge.state_dict()))
    hooks = dict(bridge.hook_dict)
    names = [point.name for point in hooks.values()]
    held = [machine.memory_allocated(index) for index in range(4)]
    fold, calls = ProcessWeights._fold_layer, 0

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at_block:
            raise error("in the middle")
        return fold(*args)

    monkeypatch.setattr(ProcessWeights, "_fold_layer", staticmethod(fail))
    with pytest.raises(error, match="in the middle"):
        bridge.enable_compatibility_mode()
    monkeypatch.undo()

    assert_same_tensors(on_cpu(bridge.state_dict()), values, tolerance=0)
    assert weights_of(bridge).keys() == parameters.keys()
    assert all(weight is parameters[path] for path, weight in weights_of(bridge).items())
    assert not bridge.compatibility_mode
    assert dict(bridge.hook_dict) == hooks
    assert [point.name for point in hooks.values()] == names
    assert [machine.memory_allocated(index) for index in range(4)] == held
    assert_agrees(bridge(tokens), logits, machine.devices[0], tolerance=0)


def test_weights_that_nobody_else_holds_come_back_too(
    machine: Any, boot: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of these tests hold them, to compare."""
    bridge = boot("gpt2", n_devices=3)
    with torch.no_grad():
        logits = bridge(tokens)
    values = on_cpu(copy.deepcopy(bridge.state_dict()))
    held = [machine.memory_allocated(index) for index in range(3)]

    def fail(_: Any) -> None:
        raise RuntimeError("at the end")

    monkeypatch.setattr(bridge.adapter, "postprocess_weights", fail)
    with pytest.raises(RuntimeError, match="at the end"):
        bridge.enable_compatibility_mode()

    assert [machine.memory_allocated(index) for index in range(3)] == held
    assert_same_tensors(on_cpu(bridge.state_dict()), values, tolerance=0)
    assert_agrees(bridge(tokens), logits, tolerance=0)


def test_what_others_hold_of_the_old_weights_stays_as_it_is(machine: Any, boot: Any) -> None:
    bridge = boot("llama", n_devices=3)
    unembed = bridge.unembed.original_component.weight
    values = unembed.detach().clone()

    bridge.enable_compatibility_mode()

    assert unembed.device == machine.devices[0]
    assert (unembed == values).all()


def test_after_an_error_it_can_be_done_again(
    machine: Any, boot: Any, references: Any, tokens: torch.Tensor
) -> None:
    bridge = boot("llama", n_devices=4)
    with pytest.raises(ValueError, match="rotary"):
        bridge.enable_compatibility_mode(refactor_factored_attn_matrices=True)

    bridge.enable_compatibility_mode()

    expected = references("llama", compatible=True)
    assert_same_tensors(on_cpu(bridge.state_dict()), on_cpu(expected.state_dict()))


def test_what_host_memory_has_no_room_for_is_kept_in_a_file(
    machine: Any, boot: Any, monkeypatch: pytest.MonkeyPatch, tokens: torch.Tensor
) -> None:
    monkeypatch.setattr(originals, "_ROOM_LEFT", 2**60)
    bridge = boot("llama", n_devices=4)
    values, logits = on_cpu(copy.deepcopy(bridge.state_dict())), bridge(tokens)

    def fail(_: Any) -> None:
        raise RuntimeError("at the end")

    monkeypatch.setattr(bridge.adapter, "postprocess_weights", fail)
    with pytest.raises(RuntimeError, match="at the end"):
        bridge.enable_compatibility_mode()

    assert_same_tensors(on_cpu(bridge.state_dict()), values, tolerance=0)
    assert_agrees(bridge(tokens), logits, tolerance=0)


def test_processing_twice_is_once(
    machine: Any, boot: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = boot("gpt2", n_devices=3, compatible=True)
    values = on_cpu(copy.deepcopy(bridge.state_dict()))

    bridge.process_weights()

    assert "already applied" in caplog.text
    assert_same_tensors(on_cpu(bridge.state_dict()), values, tolerance=0)


def test_a_device_without_room_is_named_with_what_was_being_processed(
    boot: Any, tokens: torch.Tensor
) -> None:
    with tl_devicefix.simulate(2, memory="1MiB") as machine:
        bridge = boot("llama", n_devices=2)
        logits = bridge(tokens)
        room = machine.mem_get_info(1)[0]
        filler = torch.empty(room - 2**12, dtype=torch.uint8, device=machine.devices[1])

        with pytest.raises(
            torch.OutOfMemoryError, match=r"while blocks\.\d was processed"
        ) as caught:
            bridge.enable_compatibility_mode()

        assert "\n" not in str(caught.value)
        del filler
        assert_agrees(bridge(tokens), logits, tolerance=0)
        bridge.enable_compatibility_mode()
        assert_agrees(bridge(tokens).log_softmax(-1), logits.log_softmax(-1))
