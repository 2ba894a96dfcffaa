"""Run the lines of README.md that are said to be run, and compare what they print.

    python docs/building/readme.py README.md

Exit status 1, and the difference, if README says something else.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
from pathlib import Path


def main() -> int:
    """Compare the first block of Python with the first block of text."""
    readme = Path(sys.argv[1]).read_text()
    code, said = (
        re.search(rf"```{kind}\n(.*?)```", readme, re.DOTALL) for kind in ("python", "text")
    )
    if code is None or said is None:
        print(f"{sys.argv[1]} has no block of Python and of text")
        return 1
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code[1], {})
    printed = re.sub(r"(?<= )\S*(?=/recall_checkpoint)", "...", shown.getvalue())
    difference = list(difflib.unified_diff(said[1].splitlines(), printed.splitlines(), lineterm=""))
    print("\n".join(difference) or "README prints what it says")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
