"""The tests' options and marks, without an import of TransformerLens.

So the controller of pytest-xdist, which runs no test itself, is ready in a second.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

pytest.register_assert_rewrite("shared_fixtures", "comparison", "offloads", "local_hosts")


def pytest_report_header() -> str:
    on = os.environ.get("TL_DEVICEFIX_TEST_DEVICE", "simulated")
    return f"transformer_lens {version('transformer_lens')}, {on} devices"


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, meaning in {
        "--unpatched": "run only tests marked fails_unpatched, without the patches, where each has "
        "to fail: it is reported as passed if it does, and as failed if not",
        "--asynchronous": "run on simulated devices that run behind the host (tests/racing)",
        "--hosts": "run tests/surface with all blocks but the first device's on other hosts, which "
        "are threads of this process",
        "--both": "run tests of either class, on a TransformerLens that has both",
        "--full": "run every combination of what tests are parametrised by, and what other "
        "versions run; by default, each value runs (tests/parameters.py)",
    }.items():
        parser.addoption(option, action="store_true", help=meaning)


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "fails_unpatched: holds with tl_devicefix and fails without, unless n_devices is 1",
        "full: runs with --full only; its reason says what else runs",
        "hooked: of HookedTransformer alone",
        "bridge: of TransformerBridge alone; where there are HookedTransformers too, "
        "TransformerLens 4 runs it by default, unless the mark says `in_3=True`",
        "fuses: on TransformerLens versions with blocks of the model's class that can be fused",
        "once: knows nothing of TransformerLens; by default, TransformerLens 3 alone runs it",
    ):
        config.addinivalue_line("markers", marker)
    hands_out_tests = config.getoption("tx", None) and not config.option.collectonly
    if hasattr(config, "workerinput") or not hands_out_tests:
        config.pluginmanager.import_plugin("shared_fixtures")
