"""Ranks as a launcher starts them, of a server that has imported everything: a second, not ten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import free_port

HERE = Path(__file__).parent
WITHIN = 60.0
"""Seconds within which ranks are told, say something, and end: more than any machine takes."""


class ForkServer:
    """The process that starts others."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def tell(self, **message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline().replace("None", "null"))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Launched:
    """`a_script.py` on several ranks, or another command: `what` is the function of rank 0.

    `started` are the ranks that are started, by default all; `environment` is beside what a
    launcher sets for all of them, `of_rank` for one; options are `init_hosts`'.
    """

    def __init__(
        self,
        server: ForkServer,
        directory: Path,
        what: str,
        world_size: int = 3,
        *,
        started: list[int] | None = None,
        of_rank: dict[int, dict[str, str]] | None = None,
        port: int | None = None,
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._server, self._directory = server, directory
        self._go = directory / "go"
        self.port = free_port() if port is None else port
        self._n_read = 0
        self.pids: dict[int, int] = {}
        for rank in range(world_size) if started is None else started:
            launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
            launcher |= {"WORLD_SIZE": str(world_size), "RANK": str(rank)} | (environment or {})
            arguments = [str(HERE / "a_script.py"), what, str(self._go), json.dumps(options)]
            self.pids[rank] = server.tell(
                environment=launcher | (of_rank or {}).get(rank, {}),
                arguments=command or arguments,
                outputs=[str(directory / f"{kind}-{rank}") for kind in ("said", "stderr")],
            )

    def says(self, rank: int = 0) -> list[Any]:
        """The next that a rank says."""
        until = time.monotonic() + WITHIN
        while time.monotonic() < until:
            lines = self.text("said", rank).split("\n")[:-1]
            text = [line for line in lines if line.startswith("[")]
            if len(text) > self._n_read:
                self._n_read += 1
                result: list[Any] = json.loads(text[self._n_read - 1])
                return result
            time.sleep(0.02)
        for item in self.pids:  # where they are: see `faulthandler` in `fork_server.py`
            self.signal(item, signal.SIGUSR1)
        time.sleep(0.5)
        where = "\n".join(f"rank {item}:\n{self.text('stderr', item)}" for item in self.pids)
        raise AssertionError(f"rank {rank} says nothing. {where}")

    def error(self, since: float) -> str:
        """The one error with which rank 0 ends, soon after a time."""
        when, kind, error = self.says()
        assert when - since < WITHIN
        return f"{kind}: {error}"

    def text(self, kind: str, rank: int) -> str:
        path = self._directory / f"{kind}-{rank}"
        return path.read_text() if path.exists() else ""

    def until_it_says(self, text: str, rank: int) -> None:
        until = time.monotonic() + WITHIN
        while text not in self.text("said", rank):
            assert time.monotonic() < until, self.text("stderr", rank)
            time.sleep(0.02)

    def until_ready(self) -> None:
        assert self.says() == ["ready"]

    def go_on(self) -> float:
        """Let rank 0 go on where it pauses; returns when that was."""
        self._go.touch()
        return time.time()

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a rank a signal; returns when that was."""
        os.kill(self.pids[rank], number)
        return time.time()

    def ends(self, *ranks: int) -> list[int | None]:
        """With what ranks end, within a minute together: by default, all that there are."""
        until, result = time.monotonic() + WITHIN, []
        for rank in ranks or list(self.pids):
            left = max(until - time.monotonic(), 0.1)
            result.append(self._server.tell(wait=self.pids[rank], seconds=left))
            if result[-1] is not None:
                del self.pids[rank]
        return result

    def kill(self) -> None:
        """Leave nobody behind."""
        for rank in list(self.pids):
            os.kill(self.pids[rank], signal.SIGKILL)
            self._server.tell(wait=self.pids.pop(rank), seconds=5)


Launch = Callable[..., Launched]
