"""The whole table of patches, put together from the rooms' own; apply it, undo it, and show it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from packaging.version import Version

from tl_devicefix.patching import applying
from tl_devicefix.patching.applying import is_applied, restore, unpatched
from tl_devicefix.patching.patch import Patch
from tl_devicefix.patching.versions import (
    check_version,
    has_bridge,
    has_hooked_transformer,
    installed,
)

__all__ = [
    "PatchReport",
    "apply",
    "is_applied",
    "patched",
    "report",
    "restore",
    "table",
    "unpatched",
]


def table() -> tuple[Patch, ...]:
    """Every patch for the installed TransformerLens.

    Raises:
        UnsupportedTransformerLens: if it is not one that is known.
    """
    check_version()
    # Imported here, as they import what only a TransformerLens that is known has.
    from tl_devicefix.flights.patches import PATCHES as OF_FLIGHTS
    from tl_devicefix.reading.patches import PATCHES as OF_READING
    from tl_devicefix.running.patches import PATCHES as OF_RUNNING

    patches = [*OF_READING, *OF_RUNNING, *OF_FLIGHTS]
    if has_hooked_transformer():
        from tl_devicefix.hooked.patches import PATCHES as OF_HOOKED_TRANSFORMER

        patches += OF_HOOKED_TRANSFORMER
    if has_bridge():
        from tl_devicefix.bridge.patches import PATCHES as OF_BRIDGE

        patches += OF_BRIDGE
    return tuple(patch for patch in patches if installed() >= Version(patch.since))


def apply() -> None:
    """Replace everything in the table; does nothing if that is done already.

    Raises:
        UnsupportedTransformerLens: if this TransformerLens cannot be patched; it is untouched.
    """
    if not is_applied():
        applying.apply(table())


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Apply the patches within a `with` block, and leave them as they were after it."""
    were_applied = is_applied()
    apply()
    try:
        yield
    finally:
        if not were_applied:
            restore()


class PatchReport(tuple[Patch, ...]):
    """What is replaced in the installed TransformerLens: a tuple of patches, one for each target.

    Printing it shows a line; `report()` has printed the table.
    """

    version: Version
    """That of TransformerLens."""
    is_applied: bool
    """Whether the patches were in place when the report was made."""

    def __repr__(self) -> str:
        # One line, so that a notebook does not show the table twice.
        return f"PatchReport({len(self)} patches of transformer_lens {self.version}, {self.state})"

    @property
    def state(self) -> str:
        """Whether they are in place, as a person would say it."""
        return "applied" if self.is_applied else "not applied"


def report() -> PatchReport:
    """Print a table of what is replaced, for which TransformerLens versions, and why.

    Returns:
        The same for programs: each patch's `target`, `since`, `until` and `why`, and of all
        together the `version` and `is_applied`.

    Raises:
        UnsupportedTransformerLens: if this TransformerLens is not one that is known.
    """
    told = PatchReport(patch for patch in table() if patch.replacement is not None)
    told.version, told.is_applied = installed(), is_applied()
    print(f"tl_devicefix on transformer_lens {told.version}: {told.state}")
    rows = [("target", "TL versions", "why")]
    rows += [(patch.target, f"{patch.since} - {patch.until}", patch.why) for patch in told]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for target, versions, why in rows:
        print(f"{target:<{widths[0]}}  {versions:<{widths[1]}}  {why}")
    return told
