"""The self-check: test whether a model may be split across this machine's devices.

Some machines corrupt copies between two devices without an error. So copies between all pairs of
devices are compared on the CPU before a model runs.
"""

from __future__ import annotations

import contextlib
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
    recall_prompts,
)
from tl_devicefix.monkeypatch.versions import versions
from tl_devicefix.placement.devices import (
    consecutive,
    default_device,
    device_count,
    module_with_streams,
    resolve,
)

# 18 MB of float32; odd, so that the last vector access is partial.
_COPY_ELEMENTS = 4_500_003
_SMALL = 1023
# The size of a matrix, and how many products of it keep a stream busy for long enough.
_BUSY = 4096, 20
_TRIED_DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float64, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_MAX_DEVICES = 8  # devices at a time: the shipped checkpoint has eight blocks
_PACKAGES = ("transformer_lens", "torch", "transformers", "accelerate", "tl_devicefix")


def run_selfcheck(device_type: str | None = None) -> bool:
    """Check copies, gradients between streams, and the demo's parity on up to 8 devices at a time.

    By default, the devices are those that TransformerLens would choose. Returns True if all is ok.
    """
    print(f"Python {platform.python_version()} on {platform.platform()}")
    print(", ".join(f"{name} {version}" for name, version in versions(_PACKAGES).items()))
    accelerator = default_device() if device_type is None else resolve(device_type)
    if accelerator.type == "cpu":
        raise ValueError(
            "the CPU needs no check: pass --device for an accelerator; the demo shows whether the "
            "package works"
        )
    n_devices = device_count(accelerator.type)
    devices = consecutive(torch.device(accelerator.type, 0), n_devices)
    # Check ordered pairs: a copy may be wrong in one direction only.
    checks = [_check_copy(*pair) for pair in permutations([torch.device("cpu"), *devices], 2)]
    checks += [_check_parity(n, devices[0]) for n in range(1, min(n_devices, _MAX_DEVICES) + 1)]
    checks += [_check_streams(device) for device in devices if module_with_streams(device)]
    # Then check the devices after the first eight, eight at a time.
    for start in range(_MAX_DEVICES, n_devices, _MAX_DEVICES):
        checks.append(_check_parity(min(n_devices - start, _MAX_DEVICES), devices[start]))
    is_good = all(checks)
    verdict = "This machine can be trusted." if is_good else "Do NOT trust it: see WRONG above."
    print(f"\n{verdict}")
    return is_good


def _check_copy(source: torch.device, target: torch.device) -> bool:
    """Return True if copies from one device to the other arrive intact, as read on the CPU."""
    large, numbers = torch.randn(_COPY_ELEMENTS), torch.arange(_SMALL)
    # torch has other code to copy non-contiguous, empty and 0-dimensional tensors.
    views = [numbers.view(33, 31).T, numbers[:0], numbers[7]]
    dtypes = set(_TRIED_DTYPES)
    if "mps" in (source.type, target.type):
        dtypes.remove(torch.float64)  # which MPS lacks
    wrong = sum(
        int((sent.to(source).to(target).cpu() != sent).sum())
        for sent in (large, *map(numbers.to, dtypes), *views)
    )
    print(f"copy {source} -> {target}: " + ("ok" if wrong == 0 else f"{wrong} elements WRONG"))
    return wrong == 0


def _check_streams(device: torch.device) -> bool:
    """Return True if a gradient keeps its memory until another stream has read it."""
    # Autograd calls `recordDataPtrOnStream` of the device's guard. A backend may lack it, and then
    # concurrent runs get wrong gradients without an error.
    module = torch.get_device_module(device.type)
    size, products = _BUSY
    main, side = module.current_stream(device), module.Stream(device)
    matrix = torch.ones(size, size, device=device)
    product, weight = torch.empty_like(matrix), torch.full((_COPY_ELEMENTS,), 5.0, device=device)
    x = torch.ones(_COPY_ELEMENTS, device=device, requires_grad=True)
    written: list[torch.Tensor] = []

    def keep_busy(gradient: torch.Tensor) -> None:  # delays the stream that reads the gradient
        for _ in range(products):
            torch.mm(matrix, matrix, out=product)

    def write(gradient: torch.Tensor) -> None:  # on the main stream, into freed memory
        written.extend(torch.zeros_like(weight) for _ in range(4))

    read_last = x * 3
    read_last.register_hook(write)
    side.wait_stream(main)
    with module.stream(side):
        read_late = x * 2
    main.wait_stream(side)
    read_late.register_hook(keep_busy)
    ((read_late * weight).sum() + read_last.sum()).backward()
    assert x.grad is not None
    # d/dx of 2 x * 5 + 3 x. Where zeros were written before a gradient was read, x.grad is smaller.
    wrong = int((x.grad != 2 * 5 + 3).sum())
    print(f"gradients between streams of {device}: " + ("ok" if wrong == 0 else f"{wrong} WRONG"))
    return wrong == 0


def _check_parity(n_devices: int, home: torch.device) -> bool:
    """Return True if the shipped checkpoint gives transformers' numbers on n devices."""
    # TransformerLens prints a line for each load.
    with contextlib.redirect_stdout(io.StringIO()):
        model = load_checkpoint(n_devices, home)
    tokens = model.to_tokens([p.text for p in recall_prompts(8, seed=SEED, n_facts=N_FACTS)])
    difference = largest_difference(model(tokens), hf_logits(tokens))
    names = ", ".join(str(device) for device in model.placement.devices)
    verdict = "ok" if difference < TOLERANCE else "WRONG"
    print(f"parity on {names}: {verdict} (largest difference {difference:.1e})")
    return difference < TOLERANCE
