"""`python -m tl_devicefix demo` and `selfcheck`: what they say, and their exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.utils.logging as hf_logging

import tl_devicefix
from tl_devicefix.__main__ import main
from tl_devicefix.demo import demo, selfcheck
from tl_devicefix.placement import devices

ALL_RECALLED = f"recalled {demo.N_PROMPTS} of {demo.N_PROMPTS}"


@pytest.fixture(autouse=True)
def bars_as_before():
    """Commands turn transformers' progress bars off for their process."""
    were_on = hf_logging.is_progress_bar_enabled()
    yield
    if were_on:
        hf_logging.enable_progress_bar()


def test_the_demo_loads_compares_and_shows_the_heads(capsys):
    assert main(["demo", "--n-devices", "3"]) == 0
    output = capsys.readouterr().out
    assert "using 3 simulated devices" in output
    assert "sim:0 (home)  embed, " in output
    assert "L0 on sim:0" in output
    assert "largest difference" in output
    assert ALL_RECALLED in output
    assert "L5 on sim:" in output
    assert "L5H1 attends to the answer most" in output


def test_the_demo_of_too_many_devices_is_refused(capsys):
    assert main(["demo", "--n-devices", "100"]) == 2
    assert capsys.readouterr().err.endswith("n_devices must be from 1 to 64, but is 100\n")


def test_the_demo_fails_where_the_numbers_differ(capsys, monkeypatch):
    right = demo.hf_logits
    monkeypatch.setattr(demo, "hf_logits", lambda tokens: right(tokens) * 1.01)
    assert main(["demo", "--n-devices", "2"]) == 1
    assert "TOO LARGE" in capsys.readouterr().out


def test_the_selfcheck_trusts_a_machine_that_computes_right(capsys):
    with tl_devicefix.simulate(2):
        assert main(["selfcheck"]) == 0
    output = capsys.readouterr().out
    assert "copy sim:0 -> sim:1: ok" in output
    assert "copy sim:1 -> cpu: ok" in output
    assert "parity on sim:0, sim:1: ok" in output
    assert "can be trusted" in output


def test_the_selfcheck_distrusts_a_machine_that_computes_wrong(capsys, monkeypatch):
    """Of a type that is named, as it is not the default's."""
    right = demo.hf_logits
    monkeypatch.setattr(selfcheck, "hf_logits", lambda tokens: right(tokens) * 1.01)
    with tl_devicefix.simulate(2):
        monkeypatch.setattr(devices, "simulated_device", lambda: None)
        assert main(["selfcheck", "--device", "sim"]) == 1
    output = capsys.readouterr().out
    assert "copy sim:0 -> sim:1: ok" in output
    assert "Do NOT trust" in output


class Corrupted(torch.Tensor):
    """A tensor that arrives otherwise than it was sent."""

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().cpu().as_subclass(torch.Tensor) + (torch.arange(len(self)) == 7)


def test_a_corrupted_copy_is_noticed(capsys, monkeypatch):
    cpu, randn = torch.device("cpu"), torch.randn
    monkeypatch.setattr(torch, "randn", lambda n: randn(n).as_subclass(Corrupted))
    assert not selfcheck._check_copy(cpu, cpu)
    assert "1 elements WRONG" in capsys.readouterr().out


def test_commands_apply_the_patches_that_are_not_applied(capsys):
    with tl_devicefix.disabled():
        assert main(["demo", "--n-devices", "1"]) == 0
    assert ALL_RECALLED in capsys.readouterr().out


# --------------------------------------------------------------------------------------------
# They start at once, and without a change to `import tl_devicefix`

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
        (["--help"], 0, "{demo,selfcheck,estimate,activations}", []),
        (["estimate"], 2, "the following arguments are required: model", []),
        (["estimate", "gpt2", "--n-device=4"], 2, "did you mean '--n-devices'?", []),
        (["estimate", "gpt2", "--models"], 2, "there is no argument '--models'\n", []),
        (["--version"], 0, version("tl_devicefix"), []),
        (["activations", "info", "none"], 2, "no saved activations in none", ["torch"]),
    ],
)
def test_help_lists_and_mistakes_import_nothing_large(arguments, status, says, imports, tmp_path):
    (tmp_path / "usercustomize.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    done = python("-m", "tl_devicefix", *arguments, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1].split() == ["IMPORTED", *imports]
