"""Whether a job fits, before anything is loaded: `estimate(...)`, a table of its memory.

If it does not fit, changes are tested by a dry run, and those that would fit are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tl_devicefix.attention.implementation import SDPA, check_attn_implementation
from tl_devicefix.patches import enabled
from tl_devicefix.placement.deciding import DeviceMap
from tl_devicefix.placement.devices import Hosts
from tl_devicefix.placement.memory import MaxMemory, format_table, gib
from tl_devicefix.placement.placement import BetweenHosts, Placement, in_words
from tl_devicefix.planning.blueprints import Blueprint, blueprint, check_options
from tl_devicefix.planning.plan import described, rooms
from tl_devicefix.planning.usage import Job, OnDevice, Setting

LEFT_ON_GPUS = 0.1
"""The share of a GPU's memory for CUDA's context, fragments and the work space of kernels."""


@dataclass(frozen=True, repr=False)
class Estimate:
    """The memory that a job takes. Printing it shows a table, and whether it fits."""

    model: str
    """Its name."""
    dtype: str
    """That of the weights, by its name: "bfloat16"."""
    job: Job
    """What is to be done with the model: `batch_size`, `seq_len`, `cache`, ..."""
    devices: tuple[OnDevice, ...]
    """What each device holds, in bytes; home first, and host memory last if blocks live there."""
    placement: Placement
    """Where each component would live."""
    advice: str = ""
    """What would fit, if this does not."""
    between_hosts: dict[str, BetweenHosts] = field(default_factory=dict)
    """What goes from host to host, in bytes by their names: in "a forward", "its backward", in
    "the cache, read at home", "the prompt" and "a generated token"; empty if there is one host."""

    @property
    def fits(self) -> bool:
        """Whether each device has room for its peak."""
        return all(device.fits for device in self.devices)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain numbers and texts, for JSON; sizes are in bytes."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "job": asdict(self.job),
            "devices": [
                {**asdict(device), "total": device.total, "headroom": device.headroom}
                for device in self.devices
            ],
            "between_hosts": {
                what: {" -> ".join(pair): size for pair, size in sums.items()}
                for what, sums in self.between_hosts.items()
            },
            "fits": self.fits,
            "advice": self.advice,
        }

    def __repr__(self) -> str:
        columns = ["weights", "buffers", "kv_cache", "cached", "gathered", "working", "total"]
        shown = [name for name in columns if any(getattr(device, name) for device in self.devices)]
        if any(device.loads_more for device in self.devices):
            shown.insert(-1, "loading")
        rows = [("device", "components", *(name.replace("_", " ") for name in shown), "headroom")]
        for device in self.devices:
            sizes = (gib(getattr(device, name)) for name in shown)
            left = "" if device.headroom is None else gib(device.headroom)
            rows.append((device.device, device.components, *sizes, left))
        sums = (gib(sum(getattr(device, name) for device in self.devices)) for name in shown)
        rows.append(("total", "", *sums, ""))
        lines = [f"{self.model}, {self.dtype}: {self.job}", format_table(rows, "<<>")]
        if self.between_hosts:
            lines.append("between hosts:")
            lines += [f"- {what}: {in_words(sums)}" for what, sums in self.between_hosts.items()]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        over = [device for device in self.devices if not device.fits]
        if not over:
            return self._with_little_left()
        worst = min(over, key=lambda device: device.headroom or 0)
        needs = f"device {worst.device} needs {gib(worst.total)} but has {gib(worst.capacity or 0)}"
        return f"It does not fit: {needs}. {self.advice}"

    def _with_little_left(self) -> str:
        """It fits; a GPU also needs memory that a dry run does not count."""
        shares = {
            device: (device.headroom or 0) / device.capacity
            for device in self.devices
            if device.capacity and device.device != "cpu"
        }
        least = min(shares, key=shares.__getitem__, default=None)
        if least is None or shares[least] >= LEFT_ON_GPUS:
            capacities = {device.capacity for device in self.devices if device.device != "cpu"}
            capacity = capacities.pop() if len(capacities) == 1 else None
            return "It fits." if capacity is None else f"It fits into {gib(capacity)} a device."
        return (
            f"It fits, but device {least.device} has only {gib(least.headroom or 0)} "
            f"({shares[least]:.0%}) left: leave {LEFT_ON_GPUS:.0%} of a GPU's memory free."
        )


def estimate(
    config_or_model_name: Any,
    n_devices: int | None = None,
    *,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | int | str = "80GiB",
    memory: MaxMemory | int | str | None = None,
    dtype: torch.dtype | str | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    cache: str | None = None,
    max_new_tokens: int = 0,
    gradients: bool = False,
    gather: str | int | None = None,
    attn_implementation: str | None = None,
    hosts: Hosts | None = None,
    **options: Any,
) -> Estimate:
    """Estimate what a job takes on each device, and whether it fits; nothing is loaded.

    With TransformerLens 4, and for a transformers config, that is on a TransformerBridge as it is
    booted, but with an unembedding of its own; what compatibility mode takes, `dry_run` shows.

    Args:
        config_or_model_name: as for `plan`.
        n_devices: how many devices there are; by default as many as the other arguments name.
        device_map: as for `from_pretrained`.
        max_memory: the most to use of each device, as for `plan`, which places the weights just so:
            `{0: "24GiB", 1: "80GiB"}`, of which the devices are used that are named; with "cpu",
            blocks that do not fit are offloaded there. Here, also one size for each ("80GiB"). The
            weights are placed within it, and all that the job takes has to stay within it, unless
            `memory` says what there is for all. Devices that are not named have 80 GiB.
        memory: what each device has, if that is more than what the weights may take of it.
        dtype: of the weights; by default float32, as for `from_pretrained`.
        batch_size: how many sequences.
        seq_len: how many tokens in each; by default 1024, or the model's n_ctx if that is less.
        cache: what `run_with_cache` keeps: hook names less "hook_" ("resid_post", or several
            "resid_post,z"), or "all".
        max_new_tokens: how many tokens to generate, with a KV cache.
        gradients: take gradients, from the loss back to every parameter.
        gather: where stacked weights are gathered: "cpu" or a device's index. The largest counts.
        attn_implementation: "sdpa" for a model that builds no pattern where none is kept, see
            `tl_devicefix.set_attn_implementation`; nothing is taken to be padded.
        hosts: over how many hosts the devices are divided, as for `plan`: what goes from host to
            host is estimated too.
        options: what the config depends on, as for `from_pretrained`: `first_n_layers`, `n_ctx`.
            For a Bridge, as for `boot_transformers`: `n_ctx`, `hf_config_overrides`.

    Returns:
        Each device's need in bytes, and whether it fits; printing it shows a table.

    Raises:
        ValueError: if the arguments do not fit together, or the model's config cannot be had.
        TypeError: if there is no such argument; it names what may be meant.
    """
    with enabled():
        check_options(estimate, config_or_model_name, options)
        check_attn_implementation(attn_implementation)
        model = blueprint(config_or_model_name, dtype, options)
        seq_len = min(1024, model.n_ctx) if seq_len is None else seq_len
        job = Job(
            batch_size, seq_len, cache, max_new_tokens, gradients, gather, attn_implementation
        )
        request = described(n_devices, hosts, device_map, max_memory, memory)
        _check(job, model, request.n_devices)
        has = request.max_memory if memory is None else request.memory
        limits = None
        if request.names_used:
            limits = request.max_memory
        elif memory is not None:
            limits = rooms(request.max_memory, request.n_devices)
        capacities = rooms(has, request.n_devices)
        asked = Setting(
            model, request.n_devices, request.device_map, capacities, job, limits, hosts
        )
        devices, placement, between_hosts = asked.measured
        advice = "" if all(device.fits for device in devices) else what_would_fit(asked)
    dtype_name = str(model.dtype).removeprefix("torch.")
    return Estimate(model.name, dtype_name, job, devices, placement, advice, between_hosts)


def _check(job: Job, model: Blueprint, n_devices: int) -> None:
    for name, least in (("batch_size", 1), ("seq_len", 1), ("max_new_tokens", 0)):
        value = getattr(job, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an int of {least} or more, but is {value!r}")
    if not isinstance(job.cache, str | None) or job.cache == "":
        raise ValueError(
            f"cache must be 'all' or names of hooks such as 'resid_post,z', but is {job.cache!r}"
        )
    if not (job.gather in (None, "cpu") or job.gather in range(n_devices)):
        raise ValueError(
            f"gather must be 'cpu' or a device's index below {n_devices}, but is {job.gather!r}"
        )
    if job.seq_len + job.max_new_tokens > model.n_ctx:
        n_tokens = job.seq_len + job.max_new_tokens
        is_fixed = any(size.name == "pos_embed" for size in model.sizes())
        raise ValueError(
            f"seq_len and max_new_tokens are {n_tokens} tokens together, more than the model's "
            f"n_ctx of {model.n_ctx}: lower them" + f", or pass n_ctx={n_tokens}" * (not is_fixed)
        )


_MOST_DEVICES = 16

Change = tuple[str, Setting]
"""What to say, and what the estimate then depends on."""


def what_would_fit(asked: Setting) -> str:
    """The least change of each kind with which the job would fit, as a sentence."""
    kinds = _CHANGES if asked.weights_fit() else [k for k in _CHANGES if k not in _OF_THE_JOB]
    suggestions = [words for words in (_least(list(kind(asked))) for kind in kinds) if words]
    if not suggestions:
        return "No single change would do: combine more devices, a smaller dtype and a smaller job."
    return f"What would fit: {', or '.join(suggestions)}."


def _least(changes: list[Change]) -> str | None:
    """The words of the first change that fits; each change frees more than the one before.

    Tested is only what has room for the weights, and the last one early, as it fits if any does.
    """
    able = [change for change in changes if change[1].weights_fit()]
    if not able or not (_fits(able[0][1]) or _fits(able[-1][1])):
        return None
    return next(words for words, setting in able if _fits(setting))


def _fits(setting: Setting) -> bool:
    return all(device.fits for device in setting.measured.devices)


def _more_devices(asked: Setting) -> Iterator[Change]:
    sizes = {size for key, size in asked.memory.items() if key != "cpu"}
    limits, hosts = asked.limits or {}, asked.hosts
    limits_are_all = all(asked.memory.get(key) == size for key, size in limits.items())
    if len(sizes) > 1 or isinstance(asked.device_map, Mapping) or not limits_are_all:
        return
    if isinstance(hosts, list | tuple):  # of which there are no more of one kind
        return
    step = asked.n_devices // (hosts or asked.n_devices)
    most = min(_MOST_DEVICES * (hosts or 1), asked.model.n_layers)
    for n in range(asked.n_devices + step, most + 1, step):
        memory = {**asked.memory, **dict.fromkeys(range(n), *sizes)}
        more = replace(asked, n_devices=n, memory=memory, hosts=hosts and n // step)
        if asked.limits is None:
            yield f"n_devices={n}" + (f", hosts={n // step}" if hosts else ""), more
        else:  # by which the devices are named
            yield f"max_memory={memory!r}", replace(more, limits=memory)


def _smaller_dtype(asked: Setting) -> Iterator[Change]:
    if asked.model.dtype.itemsize > 2:
        yield "dtype=bfloat16", replace(asked, model=asked.model.in_dtype(torch.bfloat16))


def _offloaded(asked: Setting) -> Iterator[Change]:
    """Leave free the memory that the job takes beside weights; offload blocks that do not fit.

    That changes which blocks a device runs, and with them what it takes: hence some attempts.
    """
    if isinstance(asked.device_map, Mapping):
        return
    tried = asked
    for _ in range(4):
        devices, placement, _ = tried.measured
        limits: dict[Any, Any] = {
            index: (device.capacity or 0) - (device.total - device.weights - device.buffers)
            for index, device in enumerate(devices[: asked.n_devices])
            if asked.limits is None or index in asked.limits
        }
        if min(limits.values()) < _MIB:
            return
        host = asked.memory.get("cpu", sum(component.weights for component in placement.components))
        max_memory = {index: f"{room // _MIB - 1}MiB" for index, room in limits.items()}
        max_memory["cpu"] = host if isinstance(host, str) else f"{host // _MIB}MiB"
        tried = replace(asked, limits={**max_memory, "cpu": host})
        if _fits(tried):
            yield f"max_memory={max_memory!r} for the weights", tried
            return


_MIB = 2**20


def _without_pattern(asked: Setting) -> Iterator[Change]:
    if asked.job.attn_implementation == SDPA:
        return
    tried = replace(asked, job=replace(asked.job, attn_implementation=SDPA))
    try:
        _fits(tried)
    except ValueError:  # nothing in the model attends as TransformerLens's blocks do
        return
    yield f"attn_implementation={SDPA!r}", tried


def _halved(name: str, least: int, asked: Setting) -> Iterator[Change]:
    value = getattr(asked.job, name) // 2
    while value >= least:
        changed: dict[str, Any] = {name: value}
        yield f"{name}={value}", replace(asked, job=replace(asked.job, **changed))
        value //= 2


def _less_cached(asked: Setting) -> Iterator[Change]:
    if asked.job.cache is not None:
        yield "caching nothing", replace(asked, job=replace(asked.job, cache=None))


_OF_THE_JOB = (
    _without_pattern,
    partial(_halved, "batch_size", 1),
    partial(_halved, "seq_len", 64),
    _less_cached,
)
_CHANGES = (_more_devices, _smaller_dtype, _offloaded, *_OF_THE_JOB)
