"""Local directories with a Hugging Face checkpoint, its config.json, and the tokenizer in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from tl_devicefix.checkpoints.hub import TOKENIZER_FILES
from tl_devicefix.placement.components import check_count
from tl_devicefix.placement.memory import is_out_of_memory


def is_checkpoint_directory(model_name: str) -> bool:
    """Whether this names a local directory with a Hugging Face checkpoint in it."""
    return (Path(model_name) / "config.json").is_file()


def read_config(name: str, directory: Path | None, **kwargs: Any) -> Any:
    """What transformers reads of a checkpoint's config.json.

    Args:
        name: a local directory, or the checkpoint's name on the hub.
        directory: where its config.json is on this machine, if that is known.
        kwargs: as `AutoConfig.from_pretrained` takes them.

    Raises:
        ValueError: if it cannot be read.
    """
    with reading_config(name):
        if directory is not None:
            fields = json.loads((directory / "config.json").read_text())
            _check_counts(fields)
            if not isinstance(architectures := fields.get("architectures") or [], list):
                raise ValueError(f"architectures={architectures!r} must be a list of names")
        return AutoConfig.from_pretrained(name, **kwargs)


@contextlib.contextmanager
def reading_config(name: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Within it, whatever wrong values of a config.json make Python raise is one sentence of it.

    Args:
        name: of the checkpoint.
        errors: what wrong values may raise; a value may be anything.

    Raises:
        ValueError: in that case.
    """
    try:
        yield
    except (ImportError, NotImplementedError):  # nothing is wrong with it
        raise
    except errors as error:
        if is_out_of_memory(error):
            raise
        is_strict = type(error).__name__.startswith("StrictDataclass")
        said = (is_strict and error.__cause__) or error
        reason = " ".join(str(said).split())
        if not is_strict and not isinstance(error, (ValueError, OSError)):
            reason = f"{type(error).__name__}: {reason}"
        if not isinstance(error, OSError):
            reason = f"{reason.removesuffix('.')}; correct it there, or fetch the file again"
        raise ValueError(f"config.json of {name!r} cannot be read: {reason}") from error


def _check_counts(fields: dict[str, Any]) -> None:
    """Check what transformers makes lists and modules of, for ever if there are so many.

    Raises:
        ValueError: naming the field.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif name in _COUNTS:
            check_count(name, value)


_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_labels"),
)


def _has_tokenizer(path: str) -> bool:
    return any((Path(path) / file).is_file() for file in TOKENIZER_FILES)


def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The tokenizer saved in a checkpoint directory, or None if there is none.

    Args:
        path: of the directory.
        trust_remote_code: whether a tokenizer's own code, in that directory, may run.
    """
    if not _has_tokenizer(path):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
