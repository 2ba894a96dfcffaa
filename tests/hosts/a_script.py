"""What a user runs on every rank: it says "ready", and computes until it is told otherwise."""

from __future__ import annotations

import os
import sys
import time

import torch

import tl_devicefix
from tl_devicefix.demo.demo import load_checkpoint

tl_devicefix.join(memory="1GiB", timeout=float(os.environ.get("SECONDS_TO_LOSE", 15)))
model = load_checkpoint(torch.get_device_module("sim").device_count())
tokens = torch.arange(4, 20).view(1, 16)
with torch.no_grad():
    expected = model(tokens).cpu()
try:
    print("ready", flush=True)
    for _ in range(int(sys.argv[1])):
        with torch.no_grad():
            assert torch.equal(model(tokens).cpu(), expected)
        time.sleep(0.01)
except (RuntimeError, KeyboardInterrupt) as error:
    print(f"{time.time()} {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
