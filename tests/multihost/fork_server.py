"""A process that has imported everything, and starts others that need not, as stdin says.

They are forked from it, which has no other thread, and end as any Python does. It tells their ids,
and with what they end.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
import time
from typing import Any

import torch

import tl_devicefix.demo.demo
import tl_devicefix.demo.selfcheck
import tl_devicefix.multihost.init_hosts  # noqa: F401

_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def main() -> None:
    """Start processes, and wait for them, as stdin says."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or those that are forked look at all that is here, and have copies of it
    for line in sys.stdin:
        message = json.loads(line)
        if "wait" in message:
            print(_status(message["wait"], message["seconds"]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _become(message)
            return
        print(pid, flush=True)


def _status(pid: int, seconds: float) -> int | None:
    """With what a process ends; None if it does not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            result, status = os.waitpid(pid, os.WNOHANG)
            if result:
                return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _become(message: dict[str, Any]) -> None:
    """Be the process that is wanted."""
    os.setsid()
    # Who runs the tests in the background has interrupts ignored, by all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(message["outputs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(message["environment"])
    sys.path[:0] = message["environment"].get("PYTHONPATH", "").split()
    if "NETWORK" in os.environ:
        with open(f"/run/netns/{os.environ['NETWORK']}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
    sys.argv = message["arguments"]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
