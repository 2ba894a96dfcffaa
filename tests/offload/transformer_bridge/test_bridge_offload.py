"""Blocks that live in host memory visit a device while they run, in a Bridge as elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees
from packaging.version import Version

from tl_devicefix.monkeypatch.versions import installed

OFFLOADED = {"": 0, "blocks.1": "cpu", "blocks.3": 1, "blocks.4": "cpu"}


in_4 = pytest.mark.skipif(
    installed() < Version("4.0"), reason="TransformerLens 3 cannot fold offloaded blocks"
)


@pytest.mark.skipif(installed() >= Version("4.0"), reason="TransformerLens 4 can fold them")
def test_transformer_lens_3_says_that_it_cannot_fold_them(machine: Any, boot: Any) -> None:
    bridge = boot("llama", device_map=OFFLOADED)
    with pytest.raises(ValueError, match=r"blocks.1, 4 are offloaded.*TransformerLens 4"):
        bridge.enable_compatibility_mode()


def test_max_memory_decides_which_blocks_are_offloaded(
    machine: Any, boot: Any, references: Any, tokens: torch.Tensor
) -> None:
    bridge = boot("llama", max_memory={0: "24KiB", "cpu": "1GiB"})

    assert any(component.offloaded for component in bridge.placement.components)
    assert_agrees(bridge(tokens), references("llama")(tokens), machine.devices[0])


@in_4
def test_hooks_and_generation(
    machine: Any, boot: Any, references: Any, tokens: torch.Tensor
) -> None:
    reference = references("gpt2", compatible=True)
    bridge = boot("gpt2", device_map=OFFLOADED, compatible=True)
    direction = torch.ones(reference.cfg.d_model)

    def steer(model: Any) -> torch.Tensor:
        at_home = direction.to(model.cfg.device)
        hooks = [("blocks.4.hook_resid_pre", lambda residual, hook: residual + at_home)]
        return model.run_with_hooks(tokens, fwd_hooks=hooks)

    assert_agrees(steer(bridge), steer(reference), machine.devices[0])
    generated = [
        model.generate(tokens, max_new_tokens=4, do_sample=False, verbose=False).cpu()
        for model in (bridge, reference)
    ]
    assert_agrees(*generated)
