"""setup.cfg declares every package that tl_devicefix imports."""

import ast
import configparser
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.once
def test_every_package_that_is_imported_is_declared():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = settings["options"]["install_requires"] + settings["options.extras_require"]["hosts"]
    imported = set()
    for path in (ROOT / "tl_devicefix").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    undeclared = imported - set(re.findall(r"^\w+", declared, re.MULTILINE)) - {"tl_devicefix"}
    assert not undeclared - set(sys.stdlib_module_names)
