"""The self-check: may this machine's devices be trusted with a spread model?

Some boards corrupt copies between two devices without an error, so every pair is compared through
the CPU before any model is.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import platform
from itertools import permutations

import torch

from tl_devicefix.demo.demo import (
    N_FACTS,
    SEED,
    TOLERANCE,
    hf_logits,
    largest_difference,
    load_checkpoint,
)
from tl_devicefix.demo.recall_task import recall_prompts
from tl_devicefix.placement.devices import consecutive, default_device, device_count, resolve
from tl_devicefix.simulation import simulate

_COPY_ELEMENTS = 4_000_003
"""Elements of each test copy (16 MB of float32); odd, so that the last vector access is partial."""
_SIMULATED = 4
_PACKAGES = ("transformer_lens", "torch", "transformers", "accelerate", "tl_devicefix")


def run_selfcheck(device_type: str | None = None) -> bool:
    """Check copies between all devices, and the demo's parity on 1 to n of them.

    Args:
        device_type: of the devices; by default the one that TransformerLens would choose.

    Returns:
        Whether everything agreed, so that this machine can be trusted.

    Raises:
        ValueError: if there is no device of this type.
    """
    _show_versions()
    accelerator = default_device() if device_type is None else resolve(device_type)
    if accelerator.type == "cpu":
        print(f"\nno accelerator here: checking the CPU, and {_SIMULATED} simulated devices")
        checks = [_check_parity(1, accelerator)]
        with simulate(_SIMULATED) as machine:
            home = machine.devices[0]
            checks += [_check_parity(n, home) for n in range(2, _SIMULATED + 1)]
        return _verdict(checks, "The package works here; there is no accelerator to distrust.")
    n_devices = device_count(accelerator.type)
    devices = consecutive(torch.device(accelerator.type, 0), n_devices)
    checks = [_check_copy(*pair) for pair in permutations([torch.device("cpu"), *devices], 2)]
    checks += [_check_parity(n, devices[0]) for n in range(1, n_devices + 1)]
    return _verdict(checks, "This machine can be trusted.")


def _verdict(checks: list[bool], good: str) -> bool:
    print(f"\n{good}" if all(checks) else "\nDo NOT trust this machine: see WRONG above.")
    return all(checks)


def _show_versions() -> None:
    print(f"Python {platform.python_version()} on {platform.platform()}")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES))


def _check_copy(source: torch.device, target: torch.device) -> bool:
    """Whether a copy between two devices arrives as it left, both ends read through the CPU."""
    sent = torch.randn(_COPY_ELEMENTS)
    received = sent.to(source).to(target).cpu()
    wrong = int((received != sent).sum())
    print(f"copy {source} -> {target}: " + ("ok" if wrong == 0 else f"{wrong} elements WRONG"))
    return wrong == 0


def _check_parity(n_devices: int, home: torch.device) -> bool:
    """Whether the shipped checkpoint gives on n devices what transformers gives on the CPU."""
    with contextlib.redirect_stdout(io.StringIO()):
        model = load_checkpoint(n_devices, home)
    tokens = model.to_tokens([p.text for p in recall_prompts(8, seed=SEED, n_facts=N_FACTS)])
    difference = largest_difference(model(tokens), hf_logits(tokens))
    names = ", ".join(str(device) for device in model.placement.devices)
    verdict = "ok" if difference < TOLERANCE else "WRONG"
    print(f"parity on {names}: {verdict} (largest difference {difference:.1e})")
    return difference < TOLERANCE
