"""Saving a loaded model as safetensors, as its docstring says."""

from __future__ import annotations

import textwrap

import torch
from safetensors.torch import load_file, save_file
from transformer_lens import HookedTransformer


def test_what_is_saved_is_the_model(from_pretrained, machine, tmp_path):
    model = from_pretrained("gpt-neo", n_devices=4)  # which has global and local attention in turn
    docstring = HookedTransformer.from_pretrained.__doc__.splitlines()
    advice = textwrap.dedent("\n".join(line for line in docstring if "copied" in line))

    path = tmp_path / "model.safetensors"
    exec(advice, {"torch": torch, "save_file": save_file, "model": model, "path": path})

    state_dict, loaded = model.state_dict(), load_file(path)
    assert set(loaded) == set(state_dict)
    assert all(torch.equal(loaded[key], state_dict[key].cpu()) for key in loaded)
