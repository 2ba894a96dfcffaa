"""Estimate whether a job fits before anything is loaded, by a dry run of the job.

The installed TransformerLens allocates the job's tensors, without values. Only CPU memory and the
peak of a load are computed from sizes.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from tl_devicefix.errors import did_you_mean, shown
from tl_devicefix.fusing import fused
from tl_devicefix.patches import enabled
from tl_devicefix.placement.deciding import DeviceMap, decide, names_places
from tl_devicefix.placement.devices import CPU, DeviceLike, parameter_bytes
from tl_devicefix.placement.memory import MaxMemory, by_device, gib, parse_bytes
from tl_devicefix.placement.placement import Placement, in_short, shared_buffer_bytes
from tl_devicefix.planning.dry_run import OnDevice, memory_table, record_run, refuse_cpu
from tl_devicefix.planning.plan import (
    Blueprint,
    ConfigOrName,
    blueprint,
    check_options,
    device_request,
)
from tl_devicefix.simulation import simulate_apart
from tl_devicefix.types import Model

# The share of a GPU's memory for CUDA's context, fragmentation and kernels' workspaces.
LEFT_ON_GPUS = 0.1


@dataclass(frozen=True)
class Job:
    """The forward, cache, generation or backward that an estimate is for."""

    batch_size: int = 1
    """The number of sequences."""
    seq_len: int = 1024
    """The number of tokens in each sequence."""
    cache: str | None = None
    """The activations that `run_with_cache` keeps: "all", None, or names without "hook_"
    ("resid_post,z")."""
    max_new_tokens: int = 0
    """The number of new tokens for each sequence, with a KV cache."""
    gradients: bool = False
    """True to record gradients and take a backward from the loss."""
    fuse_blocks: bool = False
    """True if blocks are fused, so that they build no pattern unless `cache` keeps it."""

    def keeps(self, name: str) -> bool:
        """Return True if `run_with_cache` keeps the activation of this hook point."""
        return self.cache == "all" or any(part_of(part, name) for part in self.parts)

    @property
    def parts(self) -> list[str]:
        """The names in `cache`."""
        return [part.strip() for part in (self.cache or "").split(",") if part.strip()]

    def __str__(self) -> str:
        parts = [f"batch {self.batch_size}, {self.seq_len} tokens"]
        parts += [f"caching {self.cache}"] if self.cache else []
        parts += [f"generating {self.max_new_tokens}"] if self.max_new_tokens else []
        parts += ["with gradients"] if self.gradients else []
        parts += ["fused blocks"] if self.fuse_blocks else []
        return ", ".join(parts)


def part_of(part: str, name: str) -> bool:
    """Return True if `part` names the hook point `name`, as "z", "hook_z" or "attn.hook_z"."""
    short = part.removeprefix("hook_")
    return name == part or name.endswith((f".{part}", f".hook_{short}")) or name == f"hook_{short}"


@dataclass(frozen=True, repr=False)
class Estimate:
    """The memory that a job takes. Printing it shows a table, and whether it fits."""

    model: str
    """The model's name."""
    dtype: str
    """The dtype of the weights, by its name: "bfloat16"."""
    job: Job
    """The job: `batch_size`, `seq_len`, `cache`, ..."""
    devices: tuple[OnDevice, ...]
    """The bytes of each device, by index; CPU memory comes last, if blocks live there."""
    placement: Placement
    """Where each component would live."""
    advice: str = ""
    """If it does not fit: how many devices would be enough, and other changes to try."""

    @property
    def fits(self) -> bool:
        """True if each device has room for its peak."""
        return all(device.fits for device in self.devices)

    def to_dict(self) -> dict[str, object]:
        """Return the estimate as plain numbers and texts, for JSON; sizes are in bytes."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "job": asdict(self.job),
            "devices": [{**asdict(device), "headroom": device.headroom} for device in self.devices],
            "fits": self.fits,
            "advice": self.advice,
        }

    def __repr__(self) -> str:
        job = f"{self.model}, {self.dtype}: {self.job}"
        return "\n".join([job, memory_table(self.devices), self._verdict()])

    def _verdict(self) -> str:
        rows = [
            (d.capacity - d.peak, d.capacity, d) for d in self.devices if d.capacity is not None
        ]
        left, capacity, device = min(rows, key=lambda row: row[0])
        if left < 0:
            needs = f"device {device.device} needs {gib(device.peak)} but has {gib(capacity)}"
            return f"It does not fit: {needs}. {self.advice}"
        gpus = [row for row in rows if row[2].device != "cpu"]
        if tight := [row for row in gpus if row[0] < LEFT_ON_GPUS * row[1]]:
            left, capacity, device = min(tight, key=lambda row: row[0])
            return (
                f"It fits, but device {device.device} has only {gib(left)} ({left / capacity:.0%}) "
                f"left: leave {LEFT_ON_GPUS:.0%} of a GPU's memory free."
            )
        capacities = {capacity for _, capacity, _ in gpus}
        return "It fits" + (f" into {gib(capacity)} a device." if len(capacities) == 1 else ".")


def estimate(
    config_or_model_name: ConfigOrName,
    n_devices: int | None = None,
    *,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | int | str = "80GiB",
    dtype: torch.dtype | str | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    cache: str | Sequence[str] | None = None,
    max_new_tokens: int = 0,
    gradients: bool = False,
    fuse_blocks: bool = False,
    **options: object,
) -> Estimate:
    """Return the memory that a job takes on each device, and whether it fits. Loads nothing.

    With TransformerLens 4, or for a transformers config, the job runs on a TransformerBridge
    without compatibility mode; `dry_run` shows what that adds. A tied unembedding counts in full.

    Args:
        config_or_model_name: as for `plan`.
        n_devices: how many devices there are; by default as many as the other arguments name.
        device_map: as for `from_pretrained`.
        max_memory: the most to use of each device, as for `plan`: `{0: "24GiB", 1: "80GiB"}` uses
            these two devices, and with "cpu", blocks that do not fit are offloaded. Or one size
            for every device. Devices that a dict leaves out have 80 GiB. Blocks are placed by these
            sizes, and then the whole job has to fit into them.
        dtype: of the weights; by default float32, or a HookedTransformerConfig's own.
        batch_size: how many sequences.
        seq_len: how many tokens in each; by default 1024, or the model's n_ctx if that is less.
        cache: what `run_with_cache` keeps: hook names without "hook_" ("resid_post", or several
            "resid_post,z"), or "all".
        max_new_tokens: how many tokens to generate, with a KV cache.
        gradients: take gradients, from the loss back to every parameter.
        fuse_blocks: run each block as one function, which builds no pattern unless `cache` keeps
            it; see `tl_devicefix.fuse_blocks`. Assumes no padding.
        options: arguments of `from_pretrained` that change the config: `first_n_layers`, `n_ctx`.
            For a Bridge, as for `boot_transformers`: `n_ctx`, `hf_config_overrides`.

    Returns:
        The bytes that each device needs, and whether they fit; printing it shows a table.

    Raises:
        ValueError: if the arguments do not fit together, or the model's config cannot be read.
        TypeError: for an unknown argument; the message suggests a similar one.
    """
    with enabled():
        check_options(estimate, config_or_model_name, options)
        model = blueprint(config_or_model_name, dtype, options)
        seq_len = min(1024, model.n_ctx) if seq_len is None else seq_len
        if isinstance(cache, Sequence) and not isinstance(cache, str):
            cache = ",".join(map(str, cache))
        job = Job(batch_size, seq_len, cache, max_new_tokens, gradients, fuse_blocks)
        on = partial(_estimate, model, job, device_map, max_memory)
        result = on(n_devices)
        if result.fits:
            return result
        may_be_more = not (names_places(device_map) or isinstance(max_memory, Mapping))
        # Try no more devices than blocks (others would be empty), and no more than 16.
        most = min(16, model.n_layers) if may_be_more else 0
        counts = range((n_devices or 1) + 1, most + 1)
        # Each count takes a dry run, and a few more devices are usually enough: try the 1st, 2nd,
        # 4th, ... count, then bisect. A job that fits on n devices should fit on n + 1.
        below, tried = 0, 1
        while tried <= len(counts) and not on(counts[tried - 1]).fits:
            below, tried = tried, 2 * tried
        most = min(tried - 1, len(counts))
        enough = bisect_left(counts, True, below, most, key=lambda count: on(count).fits)
        fusing = "" if fuse_blocks else ", fuse_blocks"
        others = f"a smaller dtype, a smaller job{fusing} or offloaded blocks"
        if enough < len(counts):
            advice = f"It would fit on {counts[enough]} devices. You can also try {others}."
        else:
            advice = f"Try {'' if may_be_more else 'more devices, '}{others}."
        return replace(result, advice=advice)


def _estimate(
    model: Blueprint,
    job: Job,
    device_map: DeviceMap | None,
    max_memory: MaxMemory,
    n_devices: int | None,
) -> Estimate:
    """Dry-run the job on devices without limits, and compare its peaks with the real memory."""
    request = device_request(n_devices, device_map, max_memory)
    _check(job, model)
    size_by_device = _size_by_device(request.max_memory, request.n_devices)
    # If max_memory names the devices, pass no limits of others: `decide` uses all that have one.
    limits = request.max_memory if request.names_used else size_by_device
    # The simulated devices have no limit, so that the table says how much is missing.
    with simulate_apart(request.n_devices, 2**60) as machine:
        placement = decide(model.sizes(), request.spread, None, request.device_map, limits)
        refuse_cpu(placement)
        capacities = by_device(size_by_device, placement.home)
        live = model.make(placement)
        _check_cache(job, live)
        if job.fuse_blocks:
            fused.fuse_blocks(live)

        dry = record_run(machine, live, placement, partial(_run, job, model))
        if dry.error is not None:  # never out of memory: there is no limit here
            raise dry.error
        devices, room = [], model.room_to_load(placement)
        for device, row in zip(machine.devices, dry.devices):
            runs = [component for component in placement.components if component.device == device]
            if request.names_used and not runs:
                continue
            # Weights of offloaded blocks live in CPU memory.
            resident = sum(component.weights for component in runs if not component.offloaded)
            # Count a tied unembedding too: processing unties it.
            weights = max(row.weights, resident + shared_buffer_bytes(runs))
            peak, module = row.peak - row.weights + weights, row.module  # of the job
            # A load may need more than the job, such as a slice of a weight in float32.
            if runs and peak < (loading := weights + room):
                peak, module = loading, "loading, at most"
            capacity = capacities.get(device)
            devices.append(
                replace(row, weights=weights, peak=peak, module=module, capacity=capacity)
            )
        on_host = [component for component in placement.components if component.offloaded]
        if on_host:
            names, weights = in_short([c.name for c in on_host]), sum(c.weights for c in on_host)
            blocks = [module for one, module in placement.modules_of(live) if one.offloaded]
            sizes = [size for block in blocks for size in parameter_bytes(block)]
            # torch rounds each pinned tensor up to a power of two.
            pinned = sum(1 << (size - 1).bit_length() for size in sizes)
            peak = pinned + weights * job.gradients  # a gradient is as large as its parameter
            module = "outside the model" if job.gradients else "the weights, pinned"
            if peak < (loading := model.cpu_to_load(placement)):
                peak, module = loading, "loading, at most"
            devices.append(OnDevice("cpu", names, weights, peak, module, capacities.get(CPU)))
    dtype = str(model.dtype).removeprefix("torch.")
    return Estimate(model.name, dtype, job, tuple(devices), placement)


def _size_by_device(memory: MaxMemory | None, n_devices: int) -> dict[DeviceLike, int | str]:
    """Return the size of each device: one for all, or a dict's sizes and 80 GiB for the rest."""
    if not isinstance(memory, Mapping):  # `parse_bytes` refuses None
        size = parse_bytes(memory, "max_memory")  # type: ignore[arg-type]
        return dict.fromkeys(range(n_devices), size)
    return {**dict.fromkeys(range(n_devices), "80GiB"), **memory}


def _check(job: Job, model: Blueprint) -> None:
    for name, least in (("batch_size", 1), ("seq_len", 1), ("max_new_tokens", 0)):
        value = getattr(job, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an int of {least} or more, but is {shown(value)}")
    if not isinstance(job.cache, str | None) or (job.cache is not None and not job.parts):
        raise ValueError(
            "cache must be 'all' or names of hooks such as 'resid_post,z', but is "
            f"{shown(job.cache)}"
        )
    if job.seq_len + job.max_new_tokens > model.n_ctx:
        n_tokens = job.seq_len + job.max_new_tokens
        raise ValueError(
            f"seq_len and max_new_tokens are {n_tokens} tokens together, more than the model's "
            f"n_ctx of {model.n_ctx}: lower them, or, unless its position embeddings are learnt, "
            f"set n_ctx to {n_tokens}"
        )


def _check_cache(job: Job, model: Model) -> None:
    for part in job.parts if job.cache != "all" else ():
        if not any(part_of(part, name) for name in model.hook_dict):
            short = {name.rpartition(".")[2].removeprefix("hook_") for name in model.hook_dict}
            raise ValueError(
                f"cache={job.cache!r} names {part!r}, but this model has no such hook"
                f"{did_you_mean(part, short)}"
            )


def _run(job: Job, blueprint: Blueprint, model: Model) -> object:
    """Do the job, and return the results that its user would keep."""
    kept = None
    if job.cache is not None or job.gradients or not job.max_new_tokens:
        with torch.set_grad_enabled(job.gradients):
            kept = _run_forward(job, model)
    if job.max_new_tokens:
        with torch.no_grad():
            # Skip to the last token: with a full KV cache, memory is largest there.
            n_cached = job.seq_len + job.max_new_tokens - 1
            blueprint.generate(model, job.batch_size, job.seq_len, n_cached)  # type: ignore[arg-type]
    return kept


def _run_forward(job: Job, model: Model) -> object:
    # [batch, pos]
    tokens = torch.zeros(job.batch_size, job.seq_len, dtype=torch.long, device=model.cfg.device)
    with warnings.catch_warnings():
        if job.cache == "all":  # asks for no hook by name
            warnings.filterwarnings("ignore", ".* skipped .* gated-off hook")
        output, kept = model.run_with_cache(
            tokens,
            names_filter=job.keeps if job.cache else [],
            return_type="loss" if job.gradients else "logits",
            return_cache_object=False,
        )
    if job.gradients:
        assert isinstance(output, torch.Tensor)  # the loss
        output.backward()
        model.zero_grad(set_to_none=True)  # so that generating does not count gradients
    return kept
