"""Run the Python of a page in order, and compare the text that it prints with the page's.

    python docs/building/run_page.py README.md docs/tutorial.md

All blocks of a page that begin with ```python are run, as one script. A block of ```text after one
is the whole of its output. Exit status 1, and the difference, if a page says something else.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def differences(page: str) -> list[str]:
    """The differences between the output of a page's blocks and the output that it shows."""
    names: dict[str, object] = {"__name__": "__main__"}
    different = []
    for code, shown in BLOCK.findall(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "<page>", "exec"), names)
        output = re.sub(r"\S+(?=/recall_checkpoint)", "...", printed.getvalue())
        different += difflib.unified_diff(shown.splitlines(), output.splitlines(), lineterm="")
    return different


def main() -> int:
    """Compare each page that is named."""
    status = 0
    for name in sys.argv[1:]:
        difference = differences(Path(name).read_text())
        print("\n".join(difference) or f"{name} prints the output that it shows")
        status = max(status, bool(difference))
    return status


if __name__ == "__main__":
    sys.exit(main())
