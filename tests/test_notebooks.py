"""Each notebook runs without a warning, and prints the text that it was committed with."""

from __future__ import annotations

import runpy
from importlib.metadata import version
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SHOWN = "3.9."
"""The TransformerLens whose outputs the notebooks show; others print other class names."""


@pytest.mark.once
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path):
    pytest.importorskip("nbclient", reason="pip install -e '.[notebooks]'")
    pytest.importorskip("matplotlib", reason="pip install -e '.[notebooks]'")
    execute = runpy.run_path(str(NOTEBOOKS / "execute.py"))
    if version("transformer_lens").startswith(SHOWN):
        assert not execute["differences"](path)
    else:
        execute["executed"](path)
