"""Saving a loaded model as safetensors, as the docs say it, and loading it again."""

from __future__ import annotations

import contextlib
import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from transformer_lens import HookedTransformer

import tl_devicefix

NAMES = ("llama", "gpt-neo")  # the last has global and local attention in turn


@pytest.fixture
def model(name, where, from_pretrained):
    simulated = tl_devicefix.simulate(4) if "n_devices" in where else contextlib.nullcontext()
    with simulated:
        yield from_pretrained(name, **where)


def advice() -> str:
    """The lines on safetensors of `help(HookedTransformer.from_pretrained)`."""
    lines = textwrap.dedent(HookedTransformer.from_pretrained.__doc__ or "").splitlines()
    messages = [line for line in lines if "copied" in line]
    assert len(messages) == 2
    return textwrap.dedent("\n".join(messages))


def same(file: Path, model: Any, tokens: torch.Tensor, strict: bool = True) -> None:
    """Check that TransformerLens alone, given this file, computes what the model does."""
    cfg = copy.deepcopy(model.cfg)
    cfg.tokenizer_name, cfg.device, cfg.n_devices = None, "cpu", 1
    with tl_devicefix.disabled(), torch.no_grad():
        loaded = HookedTransformer(cfg)
        left_out, unknown = loaded.load_state_dict(load_file(file), strict=strict)
        assert not unknown
        assert not {name.rpartition(".")[2] for name in left_out} - {
            *("mask", "IGNORE", "rotary_sin", "rotary_cos")
        }
        expected = loaded(tokens)
    torch.testing.assert_close(model(tokens).cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [{"device": "cpu"}, {"n_devices": 4}], ids=str)
@torch.no_grad()
def test_what_is_saved_is_the_model(model, tokens, tmp_path):
    """By the docs' advice every tensor, and by safetensors' own `save_model` what is not shared."""
    path = tmp_path / "model.safetensors"
    exec(advice(), {"torch": torch, "save_file": save_file, "model": model, "path": path})
    state_dict, loaded = model.state_dict(), load_file(path)
    assert set(loaded) == set(state_dict)
    assert all(torch.equal(loaded[key], state_dict[key].cpu()) for key in loaded)
    same(path, model, tokens)

    save_model(model, str(path))
    expected = model(tokens)
    for parameter in model.parameters():
        parameter.zero_()
    assert load_model(model, path) == (set(), [])
    assert torch.equal(model(tokens), expected)
    same(path, model, tokens, strict=False)
