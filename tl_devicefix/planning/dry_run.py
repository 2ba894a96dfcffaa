"""Try a job at full size: a model without values on devices without hardware.

Tensors have devices, shapes and sizes, but no values (`simulate(..., values=False)`), so a 70B
model is made in seconds, and a function of it is checked without computing anything.
"""

from __future__ import annotations

import contextlib
import linecache
import site
import sysconfig
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from tl_devicefix.dispatch.naming import named_modules
from tl_devicefix.errors import note, shown
from tl_devicefix.fusing import fused
from tl_devicefix.patches import enabled
from tl_devicefix.placement.deciding import DeviceMap, decide_fitting
from tl_devicefix.placement.devices import CPU, DEVICE_TYPE
from tl_devicefix.placement.memory import MaxMemory, by_device, format_table, gib
from tl_devicefix.placement.placement import Placement, in_short
from tl_devicefix.planning.plan import ConfigOrName, blueprint, check_options, device_request
from tl_devicefix.simulation import Machine, Transfers, simulate_apart
from tl_devicefix.twin import OnMismatch
from tl_devicefix.types import Model


@dataclass(frozen=True)
class OnDevice:
    """The memory that a job takes on one device; all sizes are in bytes."""

    device: str
    """Its index, "0 (home)" or "1"; or "cpu"."""
    components: str
    """The components that live there, in short: "embed, blocks.0-3"."""
    weights: int
    """Weights and buffers that live there, without offloaded blocks that run there."""
    peak: int
    """The most bytes that are allocated there at once, weights included."""
    module: str
    """The component that runs at the peak; "the weights" if nothing takes more, "outside the model"
    if none runs, as in a backward; in an estimate also "loading, at most", and for the CPU
    "the weights, pinned"."""
    capacity: int | None
    """The memory of the device; None if it is not known."""

    @property
    def headroom(self) -> int | None:
        """Bytes that the peak leaves of `capacity`; negative if the job does not fit."""
        return None if self.capacity is None else self.capacity - self.peak

    @property
    def fits(self) -> bool:
        """True if there is room for the peak."""
        return self.headroom is None or self.headroom >= 0


def memory_table(devices: Sequence[OnDevice]) -> str:
    """Return a table with a line for each device."""
    rows = [("device", "components", "weights", "peak", "headroom", "peak in")]
    for row in devices:
        headroom = "" if row.headroom is None else gib(row.headroom)
        sizes = gib(row.weights), gib(row.peak), headroom
        rows.append((row.device, row.components, *sizes, row.module))
    return format_table(rows, "<<>>><")


@dataclass(frozen=True, repr=False)
class DryRun:
    """The outcome of a dry run. Printing it shows a table; all sizes are in bytes."""

    placement: Placement
    """Where each component is."""
    devices: tuple[OnDevice, ...]
    """Each device's weights, its peak during the job, and the module at the peak."""
    transfers: Transfers
    """Every copy between devices, in order. Printing them shows a line for each pair."""
    result: Any
    """The value that `run` returned; None after an error."""
    error: BaseException | None = None
    """The error that stopped it: operands on several devices, out of memory, or the job's own."""
    stopped_at: str | None = None
    """The line of your code that it stopped at, and the module that was running."""

    @property
    def runs(self) -> bool:
        """True if the job ran to its end."""
        return self.error is None

    def __repr__(self) -> str:
        pairs = ", ".join(
            " -> ".join(str(device).removeprefix(f"{DEVICE_TYPE}:") for device in pair)
            + f" {gib(moved.bytes)}"
            for pair, moved in self.transfers.by_pair().items()
        )
        transfers = f"{len(self.transfers)} transfers: {pairs or 'none'}"
        outcome = "it runs"
        if self.error is not None:
            outcome = f"it stops at {self.stopped_at}: {type(self.error).__name__}: {self.error}"
            outcome = "\n".join((outcome, *getattr(self.error, "__notes__", ())))
        return "\n".join([memory_table(self.devices), transfers, outcome])


_USUAL_MEMORY = "80GiB"


def dry_run(
    config_or_model_name: ConfigOrName,
    run: Callable[[Any], object],
    n_devices: int | None = None,
    *,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    dtype: torch.dtype | str | None = None,
    memory: int | str | Sequence[int | str] = _USUAL_MEMORY,
    tokenizer: PreTrainedTokenizerBase | None = None,
    cls: type | None = None,
    fuse_blocks: bool = False,
    on_mismatch: OnMismatch | None = None,
    **options: object,
) -> DryRun:
    """Try a function on a model at its full size, without its weights and without devices.

    The model is placed as a load would place it, on `n_devices` simulated devices, with tensors
    that have no values. The dry run checks devices and shapes of each operation, and counts memory
    and transfers. It computes nothing, so a number that you read from a tensor is 0.

    Args:
        config_or_model_name: as for `plan`: a name, a local checkpoint directory, or a config.
        run: your function of the model, as you write it for a loaded one: a forward,
            `run_with_cache`, `generate`, a `sweep`, hooks, a backward, an optimizer's step.
        n_devices: how many devices to split the model across; by default the devices that
            `max_memory` names, or else as many as the other arguments name.
        device_map: as for `plan`; the devices are 0 to `n_devices - 1`.
        max_memory: as for `plan`: it limits the weights. If you leave out `memory`, a job that
            takes more gives a warning.
        dtype: of the weights; by default float32, or a HookedTransformerConfig's own.
        memory: the memory of each device: one size for all ("80GiB"), or one for each.
        tokenizer: a loaded tokenizer, if `run` passes text. A local directory brings its own.
        cls: HookedTransformer (the default), a subclass of it, or TransformerBridge (the default
            for a transformers config, and with TransformerLens 4). A Bridge is not in compatibility
            mode: `run` may call `enable_compatibility_mode()`, whose memory then counts.
        fuse_blocks: run each block as one function, which builds no pattern unless a hook sees it;
            see `tl_devicefix.fuse_blocks`. Assumes no padding.
        on_mismatch: what to do if a load would not give transformers' numbers: "warn", "refuse" or
            "ignore", as for `from_pretrained`.
        options: arguments of `from_pretrained` that change the config: `fold_ln`, `first_n_layers`,
            `n_ctx`. For a Bridge, as for `boot_transformers`: `n_ctx`, `hf_config_overrides`.

    Returns:
        The outcome. If `run` failed, its `error` and `stopped_at` say why and where.

    Raises:
        ValueError: if the model does not fit, or the arguments contradict each other.
        TypeError: for an unknown argument; the message suggests a similar one.
    """
    check_options(dry_run, config_or_model_name, options, cls)
    if not callable(run):
        raise TypeError(
            "run must be a function of the model, such as lambda model: model(tokens), but is "
            f"{shown(run)}"
        )
    with enabled():
        planned = blueprint(config_or_model_name, dtype, options, cls)
        planned.check_numbers(on_mismatch)
    grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())  # restore it after `run`
    at_least = len(memory) if isinstance(memory, list | tuple) else 1  # one size per device
    request = device_request(n_devices, device_map, max_memory, at_least)
    with enabled(), simulate_apart(request.n_devices, memory) as machine, grad_mode:
        devices = request.spread, None, request.device_map, request.max_memory
        placement = decide_fitting(planned.sizes(), *devices)
        refuse_cpu(placement)
        model = planned.make(placement, tokenizer)
        if fuse_blocks:
            fused.fuse_blocks(model)
        outcome = record_run(machine, model, placement, run)
        if memory == _USUAL_MEMORY:
            limits = by_device(request.max_memory, placement.home, placement.devices)
            _warn_of_limits(outcome, [limits.get(device) for device in machine.devices])
    if tokenizer is None and outcome.error is not None and "tokenizer" in str(outcome.error):
        note(outcome.error, "pass tokenizer= to dry_run, or tokens instead of text")
    return outcome


def _warn_of_limits(outcome: DryRun, limits: Sequence[int | None]) -> None:
    """Warn if a job takes more than a `max_memory`, which limits the weights only."""
    over = [
        f"device {row.device} peaks at {gib(row.peak)}, above its max_memory of {gib(limit)}"
        for row, limit in zip(outcome.devices, limits)
        if limit is not None and row.peak > limit
    ]
    if over:
        warnings.warn(
            f"{', '.join(over)}: max_memory limits the weights only, so give the size of the "
            "devices as memory",
            stacklevel=3,
        )


def refuse_cpu(placement: Placement) -> None:
    """Refuse components that run on the CPU: its memory is not measured."""
    names = [component.name for component in placement.components if component.device == CPU]
    if names:
        raise ValueError(
            f"{in_short(names)} would run on the CPU, whose memory is not counted: leave "
            "device_map out, and take the peak of one device for the CPU's"
        )


def record_run(
    machine: Machine, model: Model, placement: Placement, run: Callable[[Model], object]
) -> DryRun:
    """Run the function, and record its memory and transfers on each device."""
    devices = range(len(machine.devices))
    weights = tuple(machine.memory_allocated(index) for index in devices)
    # Reset the counters: building the model used them too.
    for index in devices:
        machine.reset_peak_memory_stats(index)
    machine.reset_transfers()
    at_peak = dict.fromkeys(devices, "the weights")
    running: Running = defaultdict(list)

    def note_peak(index: int) -> None:
        names = running[threading.get_ident()]
        at_peak[index] = names[-1] if names else "outside the model"

    result, error, stopped_at = None, None, None
    machine.on_peak = note_peak
    try:
        with _noting_what_runs(model, placement, running):
            result = run(model)
    except Exception as caught:  # noqa: BLE001  # the job's own errors are what is reported
        error, stopped_at = caught, _where(caught, model)
        traceback.clear_frames(caught.__traceback__)  # their variables hold tensors
    finally:
        machine.on_peak = None
    return DryRun(
        placement=placement,
        devices=tuple(
            OnDevice(
                device=placement.label(device).removeprefix(f"{DEVICE_TYPE}:"),
                components=placement.components_on(device),
                weights=weights[index],
                peak=machine.max_memory_allocated(index),
                module=at_peak[index],
                capacity=machine.mem_get_info(index)[1],
            )
            for index, device in enumerate(machine.devices)
        ),
        transfers=Transfers(machine.transfers),
        result=result,
        error=error,
        stopped_at=stopped_at,
    )


Running: TypeAlias = "dict[int, list[str]]"
"""Thread -> the names of the components that run in it, innermost last."""


@contextlib.contextmanager
def _noting_what_runs(model: Model, placement: Placement, running: Running) -> Iterator[None]:
    """Note in `running` which components run."""
    # Only components are hooked: hooks on modules within them would keep more memory alive.

    def entering(name: str) -> Callable[..., None]:
        # Use a lambda: `is_of_user` takes a partial for a user's hook.
        return lambda *_: running[threading.get_ident()].append(name)

    def leave(*_: object) -> None:
        running[threading.get_ident()].pop()

    with contextlib.ExitStack() as stack:
        for component, module in placement.modules_of(model):
            before = entering(component.name)
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            # Call `leave` after errors too: `run` may catch one and go on.
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


_LIBRARY_DIRS = (
    *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
    *(site.getusersitepackages(), str(Path(__file__).parents[1])),
)


def _where(error: BaseException, model: Model) -> str:
    """Return the last line of the user's code that an error passed, and the module that ran."""
    frames = list(traceback.walk_tb(error.__traceback__))
    while error.__cause__ is not None:  # an error in a hook is raised again, from torch's
        error = error.__cause__
        frames += traceback.walk_tb(error.__traceback__)
    lines = [frame for frame in frames if not frame[0].f_code.co_filename.startswith(_LIBRARY_DIRS)]
    frame, number = (lines or frames)[-1]  # a library's line if none is the user's
    line = linecache.getline(frame.f_code.co_filename, number).strip()
    names = {module: name for name, module in named_modules(model) if name}
    # A module runs if one of its methods has a frame in the traceback.
    selves = (caller.f_locals.get("self") for caller, _ in frames)
    inside = [names[one] for one in selves if isinstance(one, torch.nn.Module) and one in names]
    within = f", within {inside[-1]}" if inside else ""
    return f"{frame.f_code.co_filename}:{number} ({line}){within}"
