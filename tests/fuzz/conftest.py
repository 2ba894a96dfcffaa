"""The installed TransformerLens, in a process of its own, and the seeds of random cases."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from models import IS_BRIDGE


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="how many seeds of random cases")
    parser.addoption("--seed", type=int, help="the first of them")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        # Missing if the whole suite runs: pytest parses options before it loads this file.
        first = metafunc.config.getoption("--seed", None) or 0
        cases = metafunc.config.getoption("--cases", None) or (6 if IS_BRIDGE else 18)
        metafunc.parametrize("seed", range(first, first + cases))


@pytest.fixture(scope="session")
def elsewhere():
    """An executor with a process in which importing the package is an error."""
    prepare = "import sys, torch; sys.modules['tl_devicefix'] = None; torch.set_num_threads(1)"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, exec, (prepare,)) as executor:
        yield executor
