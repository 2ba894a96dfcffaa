"""mkdocs hooks: make pages from files outside docs/, rewrite links to them, and check named code.

A notebook becomes a page that shows the outputs it was committed with. README, the notebooks'
README, CONTRIBUTING and CHANGELOG become pages. In the sources, links are those that work in the
repository.

Files that a page names, and names in them (`hooked_transformer/loading.py:from_pretrained`), have
to exist in the repository or in the package.
"""

from __future__ import annotations

import base64
import json
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))

GENERATED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "notebooks/README.md": "notebooks/index.md",
}
"""A page of the repository that is not in docs/, and its page on the site."""
PAGES = {
    **GENERATED,
    **{f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS},
}
SHOWN = {
    "examples/llama_70b.py": "scripts.md#llama_70b",
    "examples/save_activations_and_sweep.py": "scripts.md#save_activations_and_sweep",
    "examples/llama_70b.sbatch": "slurm.md",
    "examples/several_hosts.py": "scripts.md#several_hosts",
    "examples/several_hosts.sbatch": "slurm.md",
    "notebooks/recall.py": "scripts.md#recall",
}
"""A file of the repository that is no page -> the page that is about it."""

_LINK = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")
_CODE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)(?::(\w+(?:, \w+)*))?`")
_PLACE = re.compile(r"^::: ([\w.]+):(\w+)$", re.MULTILINE)
_CONTROL = re.compile(r"\x1b\[[0-9;]*m")


_log = logging.getLogger("mkdocs.hooks.pages")  # its warnings fail a strict build


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files elsewhere."""
    for source, page in GENERATED.items():
        text = (REPOSITORY / source).read_text()
        files.append(File.generated(config, page, content=text))
    for path in NOTEBOOKS:
        page = PAGES[f"notebooks/{path.name}"]
        text, figures = notebook_page(json.loads(path.read_text()), path.stem)
        files.append(File.generated(config, page, content=text))
        for name, content in figures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links to files of the repository to the pages that show them; check named code."""
    sources = {made: source for source, made in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_the_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.group()))
        if target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif target in PAGES or target in SHOWN:
            target = {**PAGES, **SHOWN}[target]
        else:
            return link.group()  # mkdocs reports it
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    if page.file.src_uri != "changelog.md":  # the changelog also names code that is gone
        for path, names in _CODE.findall(markdown):
            if missing := _missing(path, names):
                _log.warning("%s names %s, which does not exist", source, missing)
        if "--8 <" in markdown:  # a formatter puts the space in
            _log.warning("%s has an inclusion that is misspelt: write --8<--", source)
    return _LINK.sub(on_the_site, _PLACE.sub(_full_name, markdown))


def _full_name(reference: re.Match[str]) -> str:
    """Expand `::: tl_devicefix.planning:Job` to the module of the package that defines `Job`."""
    package, name = reference.groups()
    place = REPOSITORY / package.replace(".", "/")
    for module in sorted(place.rglob("*.py")) or [place.with_suffix(".py")]:
        if re.search(rf"^(?:(?:class|def) {name}\b|{name} = )", module.read_text(), re.MULTILINE):
            path = module.relative_to(REPOSITORY).with_suffix("")
            parts = [part for part in path.parts if part != "__init__"]
            return f"::: {'.'.join(parts)}.{name}"
    _log.warning("there is no %s in %s", name, package)
    return reference.group()


def _missing(path: str, names: str) -> str:
    """Return the named file if it does not exist, or the first name that is not in it; else ""."""
    found = [folder / path for folder in (REPOSITORY, REPOSITORY / "tl_devicefix")]
    found = [file for file in found if file.exists()]
    if not found:
        top = path.split("/")[0]
        folders = {
            each.name
            for root in (REPOSITORY, REPOSITORY / "tl_devicefix")
            for each in root.iterdir()
        }
        return path if top in folders else ""
    for name in filter(None, names.split(", ")):
        if not re.search(
            rf"^(?:\s*(?:async )?(?:def|class) )?{name}\b", found[0].read_text(), re.MULTILINE
        ):
            return f"{path}:{name}"
    return ""


def notebook_page(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its figures by their file names."""
    parts: list[str] = []
    figures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            shown = output.get("data", {})
            if "image/png" in shown:
                name = f"{stem}-{len(figures) + 1}.png"
                figures[name] = base64.b64decode(shown["image/png"])
                parts.append(f"![{_caption(cell)}]({name})")
            elif plain := "".join(output.get("text", shown.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{_CONTROL.sub('', plain)}\n```")
    return "\n\n".join(parts) + "\n", figures


def _caption(cell: dict[str, Any]) -> str:
    """Return a figure's alt text: the cell's "alt", or its name."""
    return str(cell["metadata"].get("alt", "Figure: " + str(cell["id"]).replace("-", " ")))
