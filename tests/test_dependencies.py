"""setup.cfg declares what the package imports, and the platforms that it runs on."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = [ast.parse(path.read_text()) for path in (ROOT / "tl_devicefix").rglob("*.py")]

pytestmark = pytest.mark.once


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The packages that are imported."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


def test_every_package_that_is_imported_is_declared():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = settings["options"]["install_requires"] + settings["options.extras_require"]["hosts"]
    names = {name for tree in TREES for name in imported(ast.walk(tree))}
    undeclared = names - set(re.findall(r"^\w+", declared, re.MULTILINE)) - {"tl_devicefix"}
    assert not undeclared - set(sys.stdlib_module_names)


def test_no_module_imports_what_windows_lacks():
    assert "fcntl" not in {name for tree in TREES for name in imported(tree.body)}
