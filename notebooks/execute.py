"""Execute the notebooks, and keep in them what they show.

    python notebooks/execute.py [NOTEBOOK ...]

Text and figures are kept. What differs at each run or on each machine is left out: times, progress
bars, and the directory that the package is installed in. A warning is an error, as no reader should
begin with one. The tests compare the text with what the cells print.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

import tl_devicefix

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar
INSTALLED = str(Path(tl_devicefix.__file__).parents[1])


def executed(path: Path) -> Any:
    """Execute a notebook and return it with its outputs.

    Raises:
        RuntimeError: if a cell wrote to stderr, as a warning does.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, timeout=600, resources=resources, store_widget_state=False).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
            cell.outputs = [_kept(output, cell.id, path) for output in shown]
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.pop("widgets", None)
    return notebook


def _kept(output: Any, cell: str, path: Path) -> Any:
    if output.get("name") == "stderr":
        raise RuntimeError(f"{path.name}, cell {cell}, wrote to stderr:\n{output['text']}")
    if "text" in output:
        output["text"] = output["text"].replace(INSTALLED, "...").splitlines(keepends=True)
    data = output.get("data", {})
    if "image/png" in data:
        data["image/png"] = _small(data["image/png"])
        data["text/plain"] = "figure"
    output.get("metadata", {}).clear()
    return output


def _small(png: str) -> str:
    """A figure in 256 colours, which is half the size and looks the same."""
    figure = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    small = io.BytesIO()
    few = figure.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    """Execute those that are named, or all."""
    parser = argparse.ArgumentParser(description="Execute the notebooks, keeping their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        print(path.name, flush=True)
        text = json.dumps(executed(path), indent=1, ensure_ascii=False, sort_keys=True)
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
