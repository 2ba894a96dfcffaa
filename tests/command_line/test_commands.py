"""`python -m tl_devicefix demo` and `selfcheck`: what they say, and their exit status."""

import pytest
import torch
from devices import TYPE

import tl_devicefix
from tl_devicefix.__main__ import main
from tl_devicefix.demo import demo, selfcheck
from tl_devicefix.placement import devices

pytestmark = pytest.mark.usefixtures("bars_as_before")
of_simulated = pytest.mark.skipif(bool(TYPE), reason="on real devices, the demo simulates none")


@pytest.mark.once
@of_simulated
def test_the_demo_loads_and_compares_the_checkpoint(capsys):
    with tl_devicefix.disabled():  # a command applies the patches
        assert main(["demo", "--n-devices", "3"]) == 0
    output = capsys.readouterr().out
    for says in (
        *("using 3 simulated devices", "sim:0 (home)  embed, ", "largest difference"),
        f"recalled {demo.N_PROMPTS} of {demo.N_PROMPTS}",
    ):
        assert says in output


@pytest.mark.once
@of_simulated
def test_demo_fails_on_too_many_devices_or_wrong_numbers(capsys, monkeypatch):
    assert main(["demo", "--n-devices", "100"]) == 2
    assert capsys.readouterr().err.endswith("n_devices must be an int from 1 to 64, but is 100\n")
    right = demo.hf_logits
    monkeypatch.setattr(demo, "hf_logits", lambda tokens: right(tokens) * 1.01)
    assert main(["demo", "--n-devices", "2"]) == 1
    assert "TOO LARGE" in capsys.readouterr().out


def test_the_selfcheck_trusts_a_machine_that_computes_right(capsys, monkeypatch):
    monkeypatch.setattr(selfcheck, "_COPY_ELEMENTS", 5003)
    with tl_devicefix.simulate(2):
        assert main(["selfcheck"]) == 0
    output = capsys.readouterr().out
    assert "copy sim:0 -> sim:1: ok" in output
    assert "copy sim:1 -> cpu: ok" in output
    assert "parity on sim:0, sim:1: ok" in output
    assert "can be trusted" in output


@pytest.mark.once
def test_the_selfcheck_distrusts_a_machine_that_computes_wrong(capsys, monkeypatch):
    """Of a type that is named, as it is not the default's."""
    right = demo.hf_logits
    monkeypatch.setattr(selfcheck, "_COPY_ELEMENTS", 5003)
    monkeypatch.setattr(selfcheck, "hf_logits", lambda tokens: right(tokens) * 1.01)
    with tl_devicefix.simulate(2):
        monkeypatch.setattr(devices, "simulated_device", lambda: None)
        assert main(["selfcheck", "--device", "sim"]) == 1
    output = capsys.readouterr().out
    assert "copy sim:0 -> sim:1: ok" in output
    assert "Do NOT trust" in output


class Corrupted(torch.Tensor):
    """A tensor that arrives otherwise than it was sent."""

    def cpu(self, *args, **kwargs):
        return super().cpu().as_subclass(torch.Tensor) + (torch.arange(len(self)) == 7)


def test_selfcheck_notices_a_corrupted_copy(capsys, monkeypatch):
    cpu, randn = torch.device("cpu"), torch.randn
    monkeypatch.setattr(torch, "randn", lambda n: randn(n).as_subclass(Corrupted))
    assert not selfcheck._check_copy(cpu, cpu)
    assert "1 elements WRONG" in capsys.readouterr().out


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--help", "{demo,selfcheck,estimate}"),
        ("--version", tl_devicefix.__version__),
        ("estimate", "the following arguments are required: model"),
        ("estimate gpt2 --max-memory 0=1GiB,", "'0=1GiB,' is not DEVICE=SIZE, as in 0=24GiB"),
    ],
)
def test_help_and_mistakes_print_usage_and_exit_status(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    printed = capsys.readouterr()
    assert ended.value.code == (0 if "--" in arguments[:2] else 2)
    assert says in printed.out + printed.err
