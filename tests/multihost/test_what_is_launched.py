"""What a user launches on several ranks: the self-check, the example, a shell that lends again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import Launch

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_selfcheck(launch: Launch) -> None:
    launched = launch("selfcheck", 2, command=["-m", "tl_devicefix", "selfcheck"])

    assert launched.ends() == [0, 0]
    text = launched.text("said", 0)
    assert (
        "the same versions on all ranks, which have 2 devices:\nsim:0  host0/cpu:0, of rank 0, "
        in text
    )
    for pair in ("cpu -> sim:1", "sim:0 -> sim:1", "sim:1 -> sim:0", "sim:1 -> cpu"):
        assert f"copy {pair}: ok" in text
    assert "parity on sim:0, sim:1: ok" in text
    assert "can be trusted" in text
    assert launched.text("said", 1) == ""


def test_process_groups_of_the_user_s(launch: Launch) -> None:
    launched = launch("beside_a_group", 2)

    assert launched.says() == [1]
    assert launched.ends() == [0, 0]


def test_another_token_on_one_rank(launch: Launch) -> None:
    launched = launch("forwards", 2, of_rank={1: {"token": "another that is long enough"}})

    assert launched.ends() == [3, 3]
    for rank in range(2):
        text = launched.text("said", rank)
        assert f"rank {1 - rank} has another token than rank {rank}, which has that of TL_" in text
        assert "set TL_DEVICEFIX_TOKEN to the same on all ranks, as `openssl" in text
        assert "long enough" not in text + launched.text("stderr", rank)


@pytest.mark.full(reason="`nox -s package` runs it with the wheel")
def test_the_example_with_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(EXAMPLES / "several_hosts.py")],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "sim:1 (host1/cpu:0)" in done.stdout
    assert "answer: 'red'" in done.stdout
    assert done.stdout.count("text: ") == 1
