"""The hub's cache, laid out by hand, so that checkpoints load by name without a network.

models--organisation--name/refs/REVISION names a commit, and snapshots/COMMIT has its files.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import transformers.utils.hub
from transformers import PreTrainedModel


class HubCache:
    """A directory of checkpoints that count as downloaded from the hub."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(
        self,
        name: str,
        hf_model: PreTrainedModel,
        tokenizer: Any = None,
        revision: str = "main",
    ) -> Path:
        """Save a checkpoint; returns the folder with its files."""
        snapshot = self.folder(name, revision)
        hf_model.save_pretrained(snapshot)
        if tokenizer is not None:
            tokenizer.save_pretrained(snapshot)
        return snapshot

    def folder(self, name: str, revision: str = "main") -> Path:
        """Make the folder of a checkpoint's files."""
        repository = self.directory / f"models--{name.replace('/', '--')}"
        commit = commit_of(name, revision)
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        return snapshot


def commit_of(name: str, revision: str) -> str:
    """The commit that a revision names: as on the hub, forty hexadecimal digits."""
    return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()


def go_offline(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let the hub's library see only a cache, as with HF_HUB_OFFLINE=1 and HF_HUB_CACHE.

    The library reads the environment when it is imported, so its constants are replaced.
    """
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    if hasattr(transformers.utils.hub, "TRANSFORMERS_CACHE"):  # transformers 4
        patch.setattr(transformers.utils.hub, "TRANSFORMERS_CACHE", str(cache))
        patch.setattr(transformers.utils.hub, "_is_offline_mode", True)

    resolve = socket.getaddrinfo

    def resolve_here(host: Any, *args: Any, **options: Any) -> Any:
        assert host == "127.0.0.1", f"the network is asked: {host}"
        return resolve(host, *args, **options)

    patch.setattr(socket, "getaddrinfo", resolve_here)
