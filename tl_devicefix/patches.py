"""The table of patches, which modules register with `@patches`: apply it, undo it, and show it.

For a model, the report shows which forward each block runs.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, overload

from packaging.version import Version

from tl_devicefix.fusing.listening import is_counting, stop_counting
from tl_devicefix.monkeypatch import applying
from tl_devicefix.monkeypatch.applying import disabled, is_enabled
from tl_devicefix.monkeypatch.patch import Patch, registered
from tl_devicefix.monkeypatch.versions import check_version, installed
from tl_devicefix.placement.memory import format_table
from tl_devicefix.placement.placement import in_short

if TYPE_CHECKING:
    from tl_devicefix.types import Model

__all__ = ["disable", "disabled", "enable", "enabled", "is_enabled", "report", "table"]


def table() -> tuple[Patch, ...]:
    """Return every patch for the installed TransformerLens.

    Raises:
        UnsupportedTransformerLens: if the installed version is not supported.
    """
    check_version()
    # Import these late: an unsupported version may lack names that they import.
    for module in ("dispatch.mixing", "gathering", "pipelining.patching"):
        importlib.import_module(f"tl_devicefix.{module}")
    from tl_devicefix.adapters import adapters

    adapters()
    return registered()


def enable() -> None:
    """Patch TransformerLens, unless it is patched already. Importing this package calls it.

    Raises:
        UnsupportedTransformerLens: if this TransformerLens cannot be patched. It stays unchanged.
    """
    if is_enabled():
        return
    applying.apply_patches(table())


def disable() -> None:
    """Undo all patches: TransformerLens gets the objects back that `enable` replaced.

    A model that is split across devices still runs, but you read its caches and weights on their
    blocks' devices, and hooks that you add before you call `enable` again may not mix devices.
    """
    applying.remove_patches()
    stop_counting()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Patch TransformerLens within a `with` block. After it, all is as it was before.

    Yields:
        Nothing.
    """
    were_enabled = is_enabled()
    enable()
    try:
        yield
    finally:
        if not were_enabled:
            disable()


class PatchReport(tuple[Patch, ...]):
    """The patches for the installed TransformerLens, one for each target.

    Its repr is one line: `report()` has printed the table, and a notebook would show it again.
    """

    version: Version
    """The version of TransformerLens."""
    is_enabled: bool
    """True if the patches were in place when the report was made."""

    def __repr__(self) -> str:
        return f"PatchReport({len(self)} patches of transformer_lens {self.version})"


class ModelReport(dict[str, str]):
    """Each block's name -> "fused", "fused, with a pattern: ...", "not fused" or "not fused: ...".

    Its repr is one line, like that of `PatchReport`.
    """

    def __repr__(self) -> str:
        return f"ModelReport({len(self)} blocks)"


@overload
def report() -> PatchReport: ...
@overload
def report(model: Model) -> ModelReport: ...
def report(model: Model | None = None) -> PatchReport | ModelReport:
    """Print the patches of TransformerLens, or which blocks of a model are fused.

        tl_devicefix.report()       # what is replaced, for which versions, and why
        tl_devicefix.report(model)  # each block of this model: fused, or why not

    Args:
        model: a HookedTransformer or a TransformerBridge.

    Returns:
        What is printed, as an object. Without a model, this is a tuple of patches, each with
        `target`, `since`, `until` and `why`; the tuple has `version` and `is_enabled`. For a model,
        it is a dict from each block's name to "fused", "fused, with a pattern: ...", "not fused" or
        "not fused: ...", with the reason in place of the dots.

    Raises:
        UnsupportedTransformerLens: if the installed version is not supported.
        TypeError: if the model is of another class.
    """
    if model is not None:
        return _report_of_model(model)
    patch_report = PatchReport(table())
    patch_report.version, patch_report.is_enabled = installed(), is_enabled()
    print(f"tl_devicefix on transformer_lens {installed()}: {_state()}")
    rows = [(patch.target, f"{patch.since} - {patch.until}", patch.why) for patch in patch_report]
    if is_counting():
        rows.append(
            ("torch.nn.Module", "", "torch reports assigned modules while blocks are fused")
        )
    print(format_table([("target", "TL versions", "why"), *rows], "<<<"))
    return patch_report


def _state() -> str:
    return "enabled" if is_enabled() else "disabled"


def _report_of_model(model: Model) -> ModelReport:
    # Import these late, as in `table`: they need a supported TransformerLens.
    from tl_devicefix.adapters import adapter_of
    from tl_devicefix.dispatch.naming import by_shortest_name
    from tl_devicefix.fusing.fused import is_known_block, report_of

    adapter_of(model)  # refuses a model of another class
    blocks = by_shortest_name(model, is_known_block)
    model_report = ModelReport({name: report_of(block) for name, block in blocks.items()})
    kind = type(model).__name__
    print(f"{kind}, tl_devicefix on transformer_lens {installed()}: {_state()}")
    groups = itertools.groupby(model_report, model_report.__getitem__)
    rows = [(in_short(list(names)), block) for block, names in groups]
    print(format_table([("block", "runs"), *rows], "<<"))
    return model_report
