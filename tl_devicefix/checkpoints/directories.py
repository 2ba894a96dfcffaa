"""Local directories with a Hugging Face checkpoint, and the tokenizer in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tl_devicefix.checkpoints.hub import TOKENIZER_FILES


def is_checkpoint_directory(model_name: str) -> bool:
    """Whether this names a local directory with a Hugging Face checkpoint in it."""
    return (Path(model_name) / "config.json").is_file()


def _has_tokenizer(path: str) -> bool:
    return any((Path(path) / file).is_file() for file in TOKENIZER_FILES)


def load_tokenizer(path: str) -> Any:
    """The tokenizer saved in a checkpoint directory, or None if there is none."""
    return AutoTokenizer.from_pretrained(path) if _has_tokenizer(path) else None
