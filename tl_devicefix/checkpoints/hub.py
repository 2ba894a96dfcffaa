"""Checkpoints by name: on the Hugging Face hub or in a local directory; and their tokenizers."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoTokenizer
from transformers.utils import cached_file

from tl_devicefix.misspelt import did_you_mean

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
"""A checkpoint with any of these has a tokenizer."""

_OF_REPOSITORY = ("revision", "subfolder")
_OF_ACCESS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
HUB_ARGUMENTS = (*_OF_REPOSITORY, *_OF_ACCESS)
"""Those of `from_pretrained`'s arguments that say which files to fetch, and how."""


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Select those of `HUB_ARGUMENTS` that are given."""
    return {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}


def in_one_line(error: BaseException) -> str:
    """An error's message in one line, with its type where that says more."""
    text = " ".join(str(error).split())
    speaks = isinstance(error, (OSError, RuntimeError, ValueError))
    return text if speaks and text else f"{type(error).__name__}: {text}"


def is_checkpoint_directory(model_name: str) -> bool:
    """Whether this names a local directory with a Hugging Face checkpoint in it."""
    return (Path(model_name) / "config.json").is_file()


def snapshot(name: str, listed: Collection[str] = (), **kwargs: Any) -> Path:
    """The folder in which a checkpoint's config.json is, once that is fetched.

    Of the names in `listed`, one may be meant.
    """
    try:
        config: Any = cached_file(name, "config.json", **hub_arguments(kwargs))
        return Path(config).parent
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is neither a model that TransformerLens lists nor a local directory, and it "
            f"cannot be fetched from the hub: {in_one_line(error)}"
            f"{did_you_mean(name, listed, 0.85)}"
        ) from error


def has_tokenizer(name: str, **kwargs: Any) -> bool:
    """Whether a checkpoint, in a directory or on the hub, has a tokenizer."""
    return any(
        cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **hub_arguments(kwargs),
        )
        for file in TOKENIZER_FILES
    )


def load_tokenizer(directory: str, trust_remote_code: bool) -> Any:
    """The tokenizer saved in a checkpoint directory, or None if there is none."""
    if not has_tokenizer(directory):
        return None
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def tokenizers_fetched_with(model_name: str, kwargs: dict[str, Any]) -> Iterator[None]:
    """Within it, TransformerLens fetches tokenizers as the caller wants the model fetched.

    `revision` and `subfolder` hold for the model's own repository, the rest (`cache_dir`, `token`,
    ...) for every one.
    """
    options, thread = hub_arguments(kwargs), threading.get_ident()

    class Tokenizers:
        @staticmethod
        def from_pretrained(name: str, **own: Any) -> Any:
            if threading.get_ident() == thread:  # others may construct models of their own
                own |= {k: v for k, v in options.items() if k in _OF_ACCESS or name == model_name}
            return AutoTokenizer.from_pretrained(name, **own)

    fetching = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformer_lens.")
        and vars(module).get("AutoTokenizer") is AutoTokenizer
    ]
    with contextlib.ExitStack() as stack:
        for module in fetching:
            stack.enter_context(mock.patch.object(module, "AutoTokenizer", Tokenizers))
        yield
