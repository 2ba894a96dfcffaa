"""How `python -m tl_devicefix` starts: at once, and without a change to `import tl_devicefix`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tl_devicefix

ROOT = Path(tl_devicefix.__file__).parents[1]
LARGE = ("torch", "transformer_lens", "transformers", "bitsandbytes", "peft", "datasets")
AT_EXIT = (
    "import atexit, sys; atexit.register(lambda: print('IMPORTED', "
    f"*(n for n in {LARGE} if n in sys.modules)))"
)


def python(*arguments: str, cwd: Path, path: Path = ROOT) -> Any:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), str(path)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says", "imports"),
    [
        (["--help"], 0, "{demo,selfcheck,estimate,activations,worker}", []),
        (["estimate", "--help"], 0, "--max-memory", []),
        (["estimate"], 2, "the following arguments are required: model", []),
        (["nonsense"], 2, "invalid choice: 'nonsense'", []),
        (["estimate", "--n-devices", "x"], 2, "invalid int value: 'x'", []),
        (["activations", "info", "none"], 1, "no saved activations in none", ["torch"]),
    ],
)
def test_help_lists_and_mistakes_import_nothing_large(
    arguments: list[str], status: int, says: str, imports: list[str], tmp_path: Path
) -> None:
    (tmp_path / "usercustomize.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    done = python("-m", "tl_devicefix", *arguments, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1].split() == ["IMPORTED", *imports]
