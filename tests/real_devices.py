"""The tests on real devices: `TL_DEVICEFIX_TEST_DEVICE=cuda pytest` (docs/testing_on_gpus.md).

`simulate(n)` then gives the first n real devices of that type, and "sim:1" in a test means the
second. A test that asks for what only a simulation has is skipped. Tolerances are a GPU's.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

import tl_devicefix
from tl_devicefix.placement import devices
from tl_devicefix.simulation import Machine
from tl_devicefix.simulation.executor import CpuExecutor

TYPE = os.environ.get("TL_DEVICEFIX_TEST_DEVICE", "")
"""The type of the devices; empty for simulated ones."""

LEAST = 1e-4 if TYPE else 0.0
"""No tolerance is smaller: a GPU sums in another order than the CPU."""

_OF_DTYPE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}

NOT_RUN = ("simulation", "racing", "placement/test_hosts.py") if TYPE else ()
"""Tests that are of simulated devices themselves."""

_OF_SIMULATED_ONES = {
    "test_bytes_on_answers_after_the_machine_was_left": "only a simulated machine can be left",
    "test_the_demo_loads_compares_and_shows_the_heads": "the demo prints simulated devices",
    "test_dry_run_refuses_weights_that_do_not_fit": "a dry run names its simulated devices",
}


def device_count() -> int:
    """How many devices of the type there are."""
    return int(torch.get_device_module(TYPE).device_count())


def _skip_as_too_few(count: int) -> NoReturn:
    pytest.skip(f"needs {count} devices of type {TYPE!r}, but this machine has {device_count()}")


class _Devices(list[torch.device]):
    """The devices that a simulated machine would have; to use one that is not here skips."""

    def __init__(self, count: int) -> None:
        indices = range(min(count, device_count()))
        super().__init__(devices.with_index(torch.device(TYPE, i)) for i in indices)
        self._count = count

    def _check(self) -> None:
        if self._count > device_count():
            _skip_as_too_few(self._count)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or not 0 <= index < device_count():
            self._check()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[torch.device]:
        self._check()
        return super().__iter__()

    def __len__(self) -> int:
        self._check()
        return super().__len__()


_OF_MACHINES = frozenset(dir(Machine([], CpuExecutor())))


class RealMachine:
    """What tests use of `tl_devicefix.simulation.Machine`, as far as real devices have it."""

    def __init__(self, n_devices: int) -> None:
        self.devices = _Devices(n_devices)

    def __getattr__(self, name: str) -> NoReturn:
        if name not in _OF_MACHINES:
            raise AttributeError(f"no machine has {name!r}")
        pytest.skip(f"machine.{name} is exact on simulated devices only")


@contextmanager
def simulate(n_devices: int, memory: Any = None, **options: Any) -> Iterator[RealMachine]:
    """In place of `tl_devicefix.simulate`: the machine has as many devices, and is the default."""
    if memory is not None or options:
        pytest.skip("only simulated devices can have a given size, or no values")
    module = torch.get_device_module(TYPE)
    if hasattr(module, "set_device"):  # which an earlier test may have done
        module.set_device(0)
    home = devices.with_index(torch.device(TYPE, 0))
    real_existing, real_count = devices._existing, devices.device_count

    def existing(device: torch.device, named: str) -> torch.device:
        index = device.index or 0
        if device.type != TYPE or index >= n_devices:
            return real_existing(device, named)
        return device if index < device_count() else _skip_as_too_few(index + 1)

    def count(device_type: str) -> int:
        if device_type != TYPE:
            return real_count(device_type)
        return n_devices if n_devices <= device_count() else _skip_as_too_few(n_devices)

    with ExitStack() as stack:
        for owner in (devices, sys.modules.get("tl_devicefix.transformer_bridge.loading")):
            if owner is not None:
                stack.enter_context(mock.patch.object(owner, "simulated_device", return_value=home))
        stack.enter_context(mock.patch.object(devices, "_existing", existing))
        stack.enter_context(mock.patch.object(devices, "device_count", count))
        yield RealMachine(n_devices)


def skip_what_names_others(items: list[pytest.Item]) -> None:
    """Mark tests that name a device that is not here, in their code or their parameters."""
    for item in items:
        name = getattr(item, "originalname", "")
        if name in _OF_SIMULATED_ONES:
            item.add_marker(pytest.mark.skip(reason=_OF_SIMULATED_ONES[name]))
        texts = list(_texts(getattr(getattr(item, "function", None), "__code__", None)))
        params = list(getattr(getattr(item, "callspec", None), "params", {}).values())
        texts += map(repr, params)
        indices = [int(i) for text in texts for i in re.findall(rf"\b{TYPE}:(\d+)", text)]
        if max(indices, default=0) >= device_count():
            reason = f"names {TYPE}:{max(indices)}, but this machine has {device_count()} {TYPE!r}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, CodeType | tuple):
        for item in value.co_consts if isinstance(value, CodeType) else value:
            yield from _texts(item)


class _Named(ast.NodeTransformer):
    """Text that names a simulated device names a real one; not code for another process."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and "simulate" not in node.value:
            text = re.sub(r"\bsim:|^sim$", lambda match: match[0].replace("sim", TYPE), node.value)
            return ast.copy_location(ast.Constant(text), node)
        return node


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        return compile(_Named().visit(tree), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules in this folder with the names of real devices in them."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(fullname, path)
        origin = None if spec is None else spec.origin
        if origin is None or Path(__file__).parent not in Path(origin).parents:
            return None
        loader = _Loader(fullname, origin)
        return importlib.util.spec_from_file_location(fullname, origin, loader=loader)


def assert_close(actual: Any, expected: Any, **options: Any) -> None:
    """In place of `torch.testing.assert_close`."""
    dtype = actual.dtype if isinstance(actual, torch.Tensor) else torch.float32
    least = _OF_DTYPE.get(dtype, LEAST)
    for name in ("rtol", "atol"):
        options[name] = max(options.get(name) or 0.0, least)
    _assert_close(actual, expected, **options)


_assert_close = torch.testing.assert_close

if TYPE == "sim":  # in the place of real ones, to try this module
    _in_their_place = tl_devicefix.simulate(4)
    _in_their_place.__enter__()

if TYPE:
    sys.meta_path.insert(0, _Finder())
    tl_devicefix.simulate = simulate  # type: ignore[assignment]
    torch.testing.assert_close = assert_close
    # Sums in one order, and in float32 where that is asked for.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Models at their full size without values are of memory that is never touched.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
