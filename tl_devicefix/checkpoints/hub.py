"""Checkpoints on the Hugging Face hub: how they are fetched, and where their files then are."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoTokenizer
from transformers.utils import cached_file

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
"""A checkpoint with any of these has a tokenizer."""

_OF_REPOSITORY = ("revision", "subfolder")
_OF_ACCESS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of `from_pretrained`'s arguments that say which files to fetch, and how."""
    return {name: kwargs[name] for name in (*_OF_REPOSITORY, *_OF_ACCESS) if name in kwargs}


def snapshot(name: str, **kwargs: Any) -> Path:
    """The folder in which a checkpoint's config.json is, once that is fetched.

    Args:
        name: the checkpoint's name on the hub ("organisation/model").
        kwargs: `from_pretrained`'s arguments.

    Raises:
        ValueError: if there is none, or it cannot be fetched; with the hub's reason.
    """
    try:
        config: Any = cached_file(name, "config.json", **hub_arguments(kwargs))
        return Path(config).parent
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name!r} is no model that TransformerLens lists, no local directory, and cannot be "
            f"fetched from the hub: {reason}"
        ) from error


def has_tokenizer(name: str, **kwargs: Any) -> bool:
    """Whether a checkpoint on the hub has a tokenizer."""
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


@contextlib.contextmanager
def tokenizers_fetched_with(model_name: str, kwargs: dict[str, Any]) -> Iterator[None]:
    """Within it, TransformerLens fetches tokenizers as the caller wants the model fetched.

    `revision` and `subfolder` hold for the model's own repository, the rest (`cache_dir`, `token`,
    ...) for every one.
    """
    wanted, thread = hub_arguments(kwargs), threading.get_ident()

    class Tokenizers:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Any:
            if threading.get_ident() != thread:  # others may construct models of their own
                return AutoTokenizer.from_pretrained(name, **options)
            here = {k: v for k, v in wanted.items() if k in _OF_ACCESS or name == model_name}
            return AutoTokenizer.from_pretrained(name, **{**options, **here})

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
