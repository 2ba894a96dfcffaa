"""What a user runs on every rank: it harvests without end to the directory that is named."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.demo.demo import load_checkpoint

NAMES = ["blocks.0.hook_resid_post", "blocks.7.hook_resid_post"]


def batches() -> Iterator[torch.Tensor]:
    """Without end."""
    for number in itertools.count():
        yield torch.arange(number, number + 32).view(2, 16) % 100


if __name__ == "__main__":
    tl_devicefix.init_hosts(memory="1GiB")
    model = load_checkpoint(torch.get_device_module("sim").device_count())
    try:
        options: dict[str, Any] = {"shard_size": "64KiB", "progress": False}
        tl_devicefix.save_activations(model, batches(), NAMES, directory=sys.argv[1], **options)
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)
