"""The page about what is compared says what the sweeps call, whatever is installed."""

from __future__ import annotations

from pathlib import Path

from table import table


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "surface.md"
    assert page.read_text() == table(), "run: python tests/surface/table.py > docs/surface.md"
