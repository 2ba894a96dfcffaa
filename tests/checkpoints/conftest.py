"""Checkpoints as they lie on disk."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def write_checkpoint(tmp_path):
    """`write_checkpoint(hf_model, tensors, n_files=2)`: as transformers saves it, but any tensors.

    `file` ends in `.safetensors` or `.bin`; `listed` are the tensors that the index of a sharded
    checkpoint lists: by default those that it has. Further options are `torch.save`'s.
    """

    def write(hf_model, tensors, file="model.safetensors", n_files=1, listed=None, **options):
        hf_model.config.save_pretrained(tmp_path)
        stem, suffix = file.split(".")
        names = sorted({*tensors, *(listed or ())})
        file_of = {
            name: f"{stem}-{1 + i * n_files // len(names):05}-of-{n_files:05}.{suffix}"
            if n_files > 1
            else file
            for i, name in enumerate(names)
        }
        for shard in set(file_of.values()):
            its = {name: tensors[name] for name in tensors if file_of[name] == shard}
            if suffix == "safetensors":
                save_file(its, tmp_path / shard, metadata={"format": "pt"})
            else:
                torch.save(its, tmp_path / shard, **options)
        if n_files > 1:
            index = json.dumps({"metadata": {}, "weight_map": file_of})
            (tmp_path / f"{file}.index.json").write_text(index)
        return tmp_path

    return write
