"""What is replaced for running: hook points, of either class."""

from __future__ import annotations

from tl_devicefix.dispatch import hooking
from tl_devicefix.monkeypatch.patch import Patch

PATCHES = (
    Patch(
        "add_hook",
        hooking.add_hook,
        ("self", "hook", "dir", "is_permanent"),
        "a hook may use tensors of all the model's devices",
        owner="HookPoint",
        until="4",
    ),
)
