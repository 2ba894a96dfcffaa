"""Each output that a page shows is all that the block before it prints, on the version it names."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("bars_as_before")
PAGES = runpy.run_path(str(ROOT / "docs" / "building" / "run_page.py"))


@pytest.mark.once
@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("```py\nf()\n```\n\n```text\n1\n```\n", "no block prints"),
        ("```python\nprint(1)\n```\n\n```text\n1\n```\n", "does not name the TransformerLens"),
    ],
)
def test_an_output_without_source_or_version_is_refused(page, fault, tmp_path):
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(ValueError, match=fault):
        PAGES["differences"](tmp_path / "page.md")


@pytest.mark.parametrize("page", PAGES["PAGES"], ids=lambda page: page.name)
def test_a_page_shows_what_its_blocks_print(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not PAGES["differences"](page)
