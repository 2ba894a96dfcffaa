"""The devices of the tests: simulated, or real ones with `TL_DEVICEFIX_TEST_DEVICE=cuda pytest`.

The fixture `machine` has either, and `device(1)` names its second one. On real devices, a test is
skipped if it calls `tl_devicefix.simulate` itself, asks for what only a simulation can tell, or
needs more devices than there are (docs/testing_on_gpus.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

import tl_devicefix
from tl_devicefix.placement import devices

TYPE = os.environ.get("TL_DEVICEFIX_TEST_DEVICE", "")
"""The type of real devices; empty for simulated ones."""
LEAST = 1e-4 if TYPE else 0.0
"""No tolerance is smaller, because a GPU sums in another order than the CPU."""
_OF_DTYPE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}

_in_their_place = tl_devicefix.simulate(4)  # they count as real ones if TYPE is "sim"


def device(index: int) -> str:
    """Return the name of a device: `device(1)` is "sim:1", or "cuda:1" where devices are real."""
    if TYPE and "PYTEST_CURRENT_TEST" in os.environ:  # not while tests are collected
        _skip_if_missing(index + 1)
    return f"{TYPE or 'sim'}:{index}"


def device_count() -> int:
    """Return how many real devices there are."""
    return int(torch.get_device_module(TYPE).device_count())


def _skip_if_missing(count: int) -> None:
    if count > device_count():
        pytest.skip(f"needs {count} devices of type {TYPE!r}, and {device_count()} are here")


def skip_simulation(*_: Any, **__: Any) -> NoReturn:
    """Skip the test, in place of entering a simulation."""
    pytest.skip("simulates devices, and real ones are in use")


class RealMachine:
    """The first real devices, as many as there are, in place of a simulated machine."""

    def __init__(self, n_devices: int) -> None:
        indices = range(min(n_devices, device_count()))
        self.devices = [devices.with_index(torch.device(TYPE, index)) for index in indices]

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"machine.{name} is exact on simulated devices only")


@contextmanager
def real_machine(n_devices: int, memory: Any = None) -> Iterator[RealMachine]:
    """Within it, `n_devices` devices seem to exist, and using a missing one skips the test.

    The first is the default device.
    A test that asks for four devices and uses one runs on a machine with one GPU.
    """
    if memory is not None:
        skip_simulation()
    home = devices.with_index(torch.device(TYPE, 0))
    module = torch.get_device_module(TYPE)
    if hasattr(module, "set_device"):  # an earlier test may have chosen another
        module.set_device(0)
    real_existing, real_count = devices._existing, devices.device_count

    def existing(wanted: torch.device, named: str) -> torch.device:
        index = wanted.index or 0
        if wanted.type != TYPE or index >= n_devices:
            return real_existing(wanted, named)
        _skip_if_missing(index + 1)
        return wanted

    def count(device_type: str) -> int:
        if device_type != TYPE:
            return real_count(device_type)
        _skip_if_missing(n_devices)
        return n_devices

    default = {"simulated_device": mock.Mock(return_value=home)}
    with mock.patch.multiple(devices, _existing=existing, device_count=count, **default):
        loading = sys.modules.get("tl_devicefix.transformer_bridge.loading", devices)
        with mock.patch.multiple(loading, **default):
            yield RealMachine(n_devices)


def use_real_devices() -> None:
    """Compute in one order and in float32, compare as GPUs round, and simulate nothing."""
    if TYPE == "sim":
        _in_their_place.__enter__()
    tl_devicefix.simulate = skip_simulation  # type: ignore[assignment]
    torch.testing.assert_close = _assert_close
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling would touch the memory of models that have no values.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


_torchs_assert_close = torch.testing.assert_close


def _assert_close(actual: Any, expected: Any, **options: Any) -> None:
    least = _OF_DTYPE.get(getattr(actual, "dtype", None), LEAST)  # type: ignore[arg-type]
    for name in ("rtol", "atol"):
        options[name] = max(options.get(name) or 0.0, least)
    _torchs_assert_close(actual, expected, **options)
