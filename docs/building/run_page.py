"""Run the blocks of pages, and compare what they print with what the pages show.

    python docs/building/run_page.py README.md docs/tutorial.md

- Blocks of ```python are run in order, as one script. Blocks of ```bash are run if they show an
  output or run a script of docs/.
- A block of ```text is the whole output of the block before it. So is a table after a script.
- A line of "..." stands for omitted lines, and "..." before a file for its directory.
- `<!-- no output -->` marks a ```text that no block prints, after a block of ```py or ```bash.
- Outputs are those of the TransformerLens that the page names before them. Blocks for versions that
  are not installed are skipped.

Without arguments, all pages are run. If a page shows something else than its blocks print, the
difference is printed, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import linecache
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

_PART = re.compile(
    r"outputs\s+are\s+those\s+of\s+TransformerLens\s+(?P<version>\d+\.\d+)"
    r"|^```(?P<language>python|bash)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<text>.*?)^```\n|\n(?P<table>(?:\|[^\n]*\n)+))?"
    r"|^(?P<mark><!-- no output -->\n\n?)?```text\n",
    re.DOTALL | re.MULTILINE,
)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the language, the code and the output of each block that is run on this version.

    Raises:
        ValueError: if no block prints an output, or the page names no version before it.
    """
    of = ""
    for part in _PART.finditer(page.read_text()):
        language, code, shown = part["language"], part["code"], part["text"]
        if part["version"]:
            of = part["version"]
        elif language is None:
            if not part["mark"]:
                raise ValueError(f"{page.name}: no block prints what is shown at {part.start()}")
        else:
            is_run = language == "python" or shown is not None
            if code.startswith("python docs/"):
                is_run, shown = True, part["table"]
            if part["text"] and not of:
                raise ValueError(f"{page.name} does not name the TransformerLens of its outputs")
            if is_run and f"{version('transformer_lens')}.".startswith(of and f"{of}."):
                yield language, code, shown or ""


def differences(page: Path) -> list[str]:
    """Return the differences between what a page's blocks print and what it shows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    different = []
    for language, code, shown in blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run(code, names) if language == "python" else run_command(code)
        output = re.sub(r"\S+(?=/recall_checkpoint|/job\.py)", "...", printed.getvalue())
        pattern = re.sub(r"(?m)^\\\.\\\.\\\.\\\n", r"(?:.*\\n)*", re.escape(shown))
        if not re.fullmatch(pattern, output):
            lines = shown.splitlines(), output.splitlines()
            different += difflib.unified_diff(*lines, lineterm="")
    return different


def run(code: str, names: dict[str, Any]) -> None:
    """Run a block as the file job.py, so that tracebacks show its lines."""
    path = str(Path("job.py").resolve())
    linecache.cache[path] = len(code), None, code.splitlines(keepends=True), path
    exec(compile(code, path, "exec"), names)


def run_command(command: str) -> None:
    """Run `python -m package ...` or `python script.py ...` of the repository in this process."""
    _, *arguments = shlex.split(command.replace("\\\n", ""), comments=True)
    is_module = arguments[0] == "-m"
    arguments = arguments[is_module:]
    with mock.patch.object(sys, "argv", arguments), contextlib.suppress(SystemExit):
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(REPOSITORY / arguments[0]), run_name="__main__")


def main() -> int:
    """Compare each page that is named."""
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    os.chdir(tempfile.mkdtemp())  # some blocks write files
    status = 0
    for page in pages:
        difference = differences(page)
        n = len(list(blocks(page)))
        print("\n".join(difference) or f"{page.name}: {n} blocks print what it shows")
        status = max(status, bool(difference))
    return status


if __name__ == "__main__":
    sys.exit(main())
