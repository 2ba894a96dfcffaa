"""Each notebook runs without a warning, and prints the text that it was committed with."""

import contextlib
import importlib
import io
import json
import runpy
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import tl_devicefix

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
RUN = runpy.run_path(str(ROOT / "docs" / "building" / "run_page.py"))["run"]
SHOWN = "3.9."
"""The TransformerLens whose outputs the notebooks show; others print other class names."""


def printed(cell, names):
    """What a cell writes to stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        RUN(cell["source"], names)
    return stdout.getvalue()


def shown(cell):
    """What a cell shows of stdout."""
    return "".join(line for output in cell["outputs"] for line in output.get("text", ()))


@pytest.mark.once
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path, tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot", reason="pip install -e '.[notebooks]'")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    monkeypatch.syspath_prepend(NOTEBOOKS)
    monkeypatch.chdir(tmp_path)
    installed = str(Path(tl_devicefix.__file__).parents[1])
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    devices = importlib.import_module("recall")._devices
    with devices, torch.enable_grad(), tl_devicefix.batch_sweeps(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # of libraries; Jupyter hides them too
        for cell in cells:
            output = printed(cell, names).replace(installed, "...")
            if version("transformer_lens").startswith(SHOWN):
                assert output == shown(cell), cell["id"]
