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

__all__ = ["apply", "is_applied", "patched", "report", "restore", "table", "unpatched"]


def table() -> tuple[Patch, ...]:
    """Every patch for the installed TransformerLens.

    Raises:
        UnsupportedTransformerLens: if it is not one that is known.
    """
    check_version()
    # Imported here, as they import what only a TransformerLens that is known has.
    from tl_devicefix.reading.patches import PATCHES as OF_READING
    from tl_devicefix.running.patches import PATCHES as OF_RUNNING

    patches = [*OF_READING, *OF_RUNNING]
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


def report() -> None:
    """Print a table of what is replaced, for which TransformerLens versions, and why."""
    patches = table()
    state = "applied" if is_applied() else "not applied"
    print(f"tl_devicefix on transformer_lens {installed()}: {state}")
    rows = [("target", "TL versions", "why")]
    for patch in patches:
        if patch.replacement is None:
            continue
        rows.append((patch.target, f"{patch.since} - {patch.until}", patch.why))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for target, versions, why in rows:
        print(f"{target:<{widths[0]}}  {versions:<{widths[1]}}  {why}")
