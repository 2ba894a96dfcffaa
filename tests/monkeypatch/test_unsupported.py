"""A TransformerLens that is not known is named in one sentence, and left as it is."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from tl_parts import MODEL_CLASS, changed, parts_of_transformer_lens

import tl_devicefix
from tl_devicefix.monkeypatch import versions
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.versions import UnsupportedTransformerLens, installed

VERSION = importlib.metadata.version("transformer_lens")


@pytest.fixture
def monkeypatch_unpatched():
    """Change TransformerLens while it is unpatched; afterwards it is put right and patched."""
    with tl_devicefix.disabled(), pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch
        monkeypatch.undo()
        installed.cache_clear()


@contextlib.contextmanager
def refuses(*says: str) -> Iterator[None]:
    before = parts_of_transformer_lens()
    with pytest.raises(UnsupportedTransformerLens) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert all(text in message for text in says), message
    assert changed(before, parts_of_transformer_lens()) == set()
    assert not is_enabled()


@pytest.mark.parametrize("version", ["5.0.0.dev3", "2.15.4"])
def test_a_version_that_is_too_new_or_too_old_is_not_patched(version, monkeypatch_unpatched):
    monkeypatch_unpatched.setattr(importlib.metadata, "version", lambda _: version)
    installed.cache_clear()
    for do in (tl_devicefix.enable, tl_devicefix.enabled().__enter__, tl_devicefix.report):
        with refuses(version, "install 'transformer_lens>=2.16.1,<5'"):
            do()


def places_of(name: str) -> list[Any]:
    """Modules and classes of TransformerLens that have something of a name."""
    places = [owner for owner in MODEL_CLASS.__mro__ if name in vars(owner)]
    modules = (path.partition(":") for path in parts_of_transformer_lens())
    return places or [importlib.import_module(module) for module, _, its in modules if its == name]


def load_and_process_state_dict(self: Any, weights: Any, twice: bool) -> None: ...


def from_pretrained(cls: Any, name: str) -> None: ...


def get_device_for_block_index(cfg: Any, index: int) -> None: ...


MISSING = ["process_weights", "boot_transformers", "get_caching_hooks"]
CHANGED: list[tuple[str, Any, str]] = []
if versions.has_hooked_transformer():
    MISSING = ["load_and_process_state_dict", "from_pretrained", "get_device_for_block_index"]
    CHANGED = [
        ("load_and_process_state_dict", load_and_process_state_dict, "(self, weights, twice)"),
        ("from_pretrained", classmethod(from_pretrained), "(cls, name)"),
        ("get_device_for_block_index", get_device_for_block_index, "(cfg, index)"),
    ]


@pytest.mark.parametrize(
    ("name", "instead", "takes"), [*((name, None, "") for name in MISSING), *CHANGED]
)
def test_a_target_that_is_missing_or_has_an_unknown_signature_is_named(
    name, instead, takes, monkeypatch_unpatched
):
    for place in places_of(name):
        monkeypatch_unpatched.delattr(place, name)
        if instead is not None:
            monkeypatch_unpatched.setattr(place, name, instead, raising=False)
    with refuses(name, takes, VERSION, "nothing was replaced"):
        tl_devicefix.enable()
