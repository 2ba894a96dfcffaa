"""An error about several devices leads to the page that says what to write: in a note, once."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_devicefix.tracebacks import ON_MIXED_DEVICES

needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
PAGE = "docs/single_device_code.md"


def kept(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    here: list[torch.Tensor] = []
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    hooks = [(name, lambda x, hook: here.append(x.detach())) for name in names]
    model.run_with_hooks(tokens, fwd_hooks=hooks)
    return here


def forward_with_a_module_of_elsewhere(model: Any, tokens: torch.Tensor) -> None:
    at_home = torch.ones(model.cfg.d_model, device=model.cfg.device)
    handle = model.blocks[4].register_forward_hook(lambda module, args, output: output + at_home)
    try:
        model(tokens)
    finally:
        handle.remove()


CASES = {
    "stack": lambda model, tokens: torch.stack(kept(model, tokens)),
    "a block's own weight": lambda model, tokens: (
        model.run_with_cache(tokens)[1]["z", 4][:, 0, :, None] @ model.blocks[4].attn.W_O
    ),
    "sum over parameters": lambda model, tokens: sum(p.sum().square() for p in model.parameters()),
    "forward": forward_with_a_module_of_elsewhere,
    "generate": lambda model, tokens: generate_with(model, tokens),
}


def generate_with(model: Any, tokens: torch.Tensor) -> None:
    at_home = torch.ones(model.cfg.d_model, device=model.cfg.device)
    handle = model.blocks[4].register_forward_hook(lambda module, args, output: output + at_home)
    try:
        model.generate(tokens, max_new_tokens=1, verbose=False)
    finally:
        handle.remove()


@needs_notes
@pytest.mark.parametrize("case", CASES)
def test_the_traceback_leads_to_the_page_once(model: Any, tokens: Any, case: str) -> None:
    with pytest.raises(RuntimeError, match="same device") as caught:
        CASES[case](model, tokens)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count(PAGE) == 1
    assert ".to(model.cfg.device)" in shown


@needs_notes
def test_torchs_own_error_gets_it_in_what_passes_through_here(
    model: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of real devices, whose errors are torch's and come without a note."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but got mat2 is on cuda:1"
        )

    _, cache = model.run_with_cache(tokens)
    for run in (
        lambda: model(tokens),
        lambda: model.run_with_cache(tokens),
        lambda: model.generate(tokens, max_new_tokens=1, verbose=False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.blocks[2].mlp, "forward", fails)
            with pytest.raises(RuntimeError, match="mat2 is on cuda:1") as caught:
                run()
        assert caught.value.__notes__ == [ON_MIXED_DEVICES]
    monkeypatch.setattr(torch, "stack", fails)
    for run in (cache.accumulated_resid, cache.decompose_resid):
        with pytest.raises(RuntimeError, match="mat2 is on cuda:1") as caught:
            run()
        assert caught.value.__notes__ == [ON_MIXED_DEVICES]


@needs_notes
def test_a_tensor_on_the_cpu_is_not_led_to_mix_devices(model: Any, tokens: Any) -> None:
    def mixes(activation: torch.Tensor, hook: Any) -> torch.Tensor:
        return activation + torch.ones(model.cfg.d_model)  # on the CPU

    with pytest.raises(RuntimeError, match=r"mixes devices.*\.to\(activation\.device\)") as caught:
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.hook_resid_post", mixes)])
    assert PAGE not in "".join(traceback.format_exception(caught.value))


@needs_notes
@pytest.mark.parametrize("spread", [1, 4])
def test_other_errors_have_none(model: Any, tokens: torch.Tensor, spread: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda x, hook: x[..., :3])])
    assert not hasattr(caught.value, "__notes__")


@needs_notes
@pytest.mark.parametrize("spread", [1])
def test_a_model_on_one_device_is_left_to_torch(model: Any, tokens: torch.Tensor) -> None:
    on_cpu = torch.ones(model.cfg.d_model)
    with pytest.raises(RuntimeError, match="same device") as caught:
        model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda x, hook: x + on_cpu)])
    assert not hasattr(caught.value, "__notes__")


def test_the_page_is_there() -> None:
    assert PAGE in ON_MIXED_DEVICES
    assert (Path(__file__).parents[2] / PAGE).is_file()
    assert "same device" in (Path(__file__).parents[2] / PAGE).read_text()
