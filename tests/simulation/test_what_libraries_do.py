"""Libraries that make tensors and parameters on devices, or leave `simulate` open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import tl_devicefix
from tl_devicefix.demo import selfcheck
from tl_devicefix.placement.workers import each_on_its_device
from tl_devicefix.simulation.backend import DeviceModule

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}


@pytest.mark.parametrize("options", [{}, {"values": False}, {"asynchronous": True}], ids=str)
def test_safetensors_reads_a_file_to_a_device(options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file(TENSORS, file)
    with tl_devicefix.simulate(3, **options):
        with safetensors.safe_open(file, framework="pt", device="sim:1") as opened:
            read = [opened.get_tensor("a"), opened.get_slice("a")[:, 1:]]
        read.append(safetensors.torch.load_file(file, device="sim:1")["a"])
        on_the_cpu = safetensors.torch.load_file(file)

        assert [tensor.device for tensor in read] == [torch.device("sim:1")] * 3
        assert [tensor.shape for tensor in read] == [(2, 3), (2, 2), (2, 3)]
        if options.get("values", True):
            assert torch.equal(read[1].cpu(), TENSORS["a"][:, 1:])
        assert torch.equal(on_the_cpu["a"], TENSORS["a"])
        with pytest.raises(RuntimeError, match="device sim:3 does not exist"):
            safetensors.safe_open(file, "pt", "sim:3")
    assert safetensors.safe_open is safetensors.torch.safe_open is safe_open


def test_the_selfcheck_looks_whether_gradients_keep_their_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_check_copy", "_check_parity"):
        monkeypatch.setattr(selfcheck, name, lambda *_: True)
    monkeypatch.setattr(selfcheck, "_BUSY", (2, 1))
    monkeypatch.setattr(selfcheck, "_COPY_ELEMENTS", 3)
    with tl_devicefix.simulate(2, asynchronous=True):
        assert selfcheck.run_selfcheck("sim")
        assert "gradients between streams of sim:1: ok" in capsys.readouterr().out
        register = torch.Tensor.register_hook
        monkeypatch.setattr(
            torch.Tensor, "register_hook", lambda x, _: register(x, torch.zeros_like)
        )
        assert not selfcheck.run_selfcheck("sim")
        assert "gradients between streams of sim:1: 3 WRONG" in capsys.readouterr().out


LEFT_OPEN = """
import os, torch
from tl_devicefix.simulation import simulate

child = os.fork()
entered = simulate(2, asynchronous=bool(child))
entered.__enter__()
torch.ones(3, device="sim:1").cpu()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_script_may_end_within_simulate() -> None:
    root = Path(tl_devicefix.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN],
        env={**os.environ, "PYTHONPATH": str(root), "TL_DEVICEFIX_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    ignored = done.stderr.partition("Exception ignored")[2]
    assert not any(ours in ignored for ours in ("callbacks", "simulat"))  # others may say it too


def test_workers_run_on_a_type_of_device_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(_unit: int) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    seen: list[Any] = []
    with tl_devicefix.simulate(2) as machine:
        monkeypatch.delattr(DeviceModule, "get_amp_supported_dtype")
        each_on_its_device(note, [0, 1], machine.devices)
        with torch.autocast("cpu", torch.float16):
            each_on_its_device(note, [0, 1], machine.devices)

    assert [enabled for enabled, _ in seen] == [False, False, True, True]
    assert seen[-1][1] == torch.float16
