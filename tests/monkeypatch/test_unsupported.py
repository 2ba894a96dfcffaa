"""A TransformerLens that is not known is named in one sentence, and left as it is."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tl_parts import MODEL_CLASS, changed, parts_of_transformer_lens

import tl_devicefix
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.versions import (
    UnsupportedTransformerLens,
    has_hooked_transformer,
    installed,
)

VERSION = importlib.metadata.version("transformer_lens")

of_hooked_transformer = pytest.mark.skipif(
    not has_hooked_transformer(), reason="this TransformerLens has no HookedTransformer"
)


@pytest.fixture
def monkeypatch_unpatched() -> Iterator[pytest.MonkeyPatch]:
    """Change TransformerLens while it is unpatched; afterwards it is put right and patched."""
    with tl_devicefix.disabled(), pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch
        monkeypatch.undo()


@pytest.fixture
def pretend(monkeypatch_unpatched: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`pretend("5.0.0")`: that is the version of TransformerLens that is installed."""

    def pretend(version: str) -> None:
        monkeypatch_unpatched.setattr(importlib.metadata, "version", lambda _: version)
        installed.cache_clear()

    yield pretend
    monkeypatch_unpatched.undo()
    installed.cache_clear()


@pytest.fixture
def refuses() -> Callable[..., Any]:
    @contextlib.contextmanager
    def refuses(*says: str) -> Iterator[None]:
        before = parts_of_transformer_lens()
        with pytest.raises(UnsupportedTransformerLens) as caught:
            yield
        message = str(caught.value)
        assert "\n" not in message
        for text in says:
            assert text in message
        assert changed(before, parts_of_transformer_lens()) == set()
        assert not is_enabled()

    return refuses


@pytest.mark.parametrize("version", ["5.0.0", "5.0.0.dev3", "5.1b1", "6.2"])
def test_a_version_that_is_too_new_is_not_patched(
    version: str, pretend: Callable[[str], None], refuses: Any
) -> None:
    pretend(version)
    for do in (tl_devicefix.enable, tl_devicefix.enabled().__enter__, tl_devicefix.report):
        with refuses(version, "transformer_lens<5"):
            do()


def test_importing_beside_such_a_version_says_the_same(
    monkeypatch_unpatched: pytest.MonkeyPatch, pretend: Callable[[str], None], refuses: Any
) -> None:
    pretend("5.0.0")
    monkeypatch_unpatched.delenv("TL_DEVICEFIX_DISABLE", raising=False)
    with refuses("5.0.0", "transformer_lens<5"):
        importlib.reload(tl_devicefix)
    monkeypatch_unpatched.setenv("TL_DEVICEFIX_DISABLE", "1")
    importlib.reload(tl_devicefix)


def test_a_version_that_is_too_old_is_to_be_upgraded(
    pretend: Callable[[str], None], refuses: Any
) -> None:
    pretend("2.15.4")
    with refuses("2.15.4", "2.16.1 <= transformer_lens < 5", "upgrade"):
        tl_devicefix.enable()


OF_HOOKED_TRANSFORMER = ["fold_value_biases", "from_pretrained", "get_caching_hooks"]
OF_BRIDGE = ["process_weights", "boot_transformers", "get_caching_hooks"]


@pytest.mark.parametrize("name", OF_HOOKED_TRANSFORMER if has_hooked_transformer() else OF_BRIDGE)
def test_a_target_that_is_missing_is_named(
    name: str, monkeypatch_unpatched: pytest.MonkeyPatch, refuses: Any
) -> None:
    for owner in MODEL_CLASS.__mro__:
        if name in vars(owner):
            monkeypatch_unpatched.delattr(owner, name)
    with refuses(f"{MODEL_CLASS.__name__}.{name}", VERSION, "left as it was"):
        tl_devicefix.enable()


@of_hooked_transformer
def test_a_function_that_is_missing_is_named(
    monkeypatch_unpatched: pytest.MonkeyPatch, refuses: Any
) -> None:
    for path in parts_of_transformer_lens():
        module, _, name = path.partition(":")
        if name == "get_device_for_block_index":
            monkeypatch_unpatched.delattr(importlib.import_module(module), name)
    with refuses("get_device_for_block_index", VERSION, "left as it was"):
        tl_devicefix.enable()


def center_unembed(self: Any, weights: Any, twice: bool) -> None: ...


def from_pretrained(cls: Any, name: str) -> None: ...


def get_device_for_block_index(cfg: Any, index: int) -> None: ...


@of_hooked_transformer
@pytest.mark.parametrize(
    ("changed_to", "takes"),
    [
        (center_unembed, "(self, weights, twice)"),
        (from_pretrained, "(cls, name)"),
        (get_device_for_block_index, "(cfg, index)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_target_with_an_unknown_signature_is_named(
    changed_to: Any,
    takes: str,
    monkeypatch_unpatched: pytest.MonkeyPatch,
    refuses: Any,
) -> None:
    name = changed_to.__name__
    if hasattr(MODEL_CLASS, name):
        value = classmethod(changed_to) if takes.startswith("(cls") else changed_to
        monkeypatch_unpatched.setattr(MODEL_CLASS, name, value)
    else:
        for path in parts_of_transformer_lens():
            if path.endswith(f":{name}"):
                module = importlib.import_module(path.partition(":")[0])
                monkeypatch_unpatched.setattr(module, name, changed_to)
    with refuses(name, takes, VERSION, "left as it was"):
        tl_devicefix.enable()
