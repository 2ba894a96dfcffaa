"""What a job takes on each device, measured by rehearsing it at full size.

No formula: it is what the installed TransformerLens allocates, on tensors without values.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tl_devicefix.attending.choosing import Attention
from tl_devicefix.placement.blueprint import Blueprint, Generation
from tl_devicefix.placement.components import shared_once
from tl_devicefix.placement.deciding import DeviceMap, decide
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.memory import by_device, capacity
from tl_devicefix.placement.placement import Placement, in_short
from tl_devicefix.simulation import Machine, simulate_apart


@dataclass(frozen=True)
class Job:
    """What is to be done with a model."""

    batch: int = 1
    """Sequences."""
    ctx: int = 1024
    """Tokens in each sequence."""
    cache: str | None = None
    """What `run_with_cache` keeps: hook names less "hook_" ("resid_post,z"), "all", or None."""
    generate: int = 0
    """New tokens for each sequence, with a KV cache."""
    gradients: bool = False
    """Whether gradients are on; then a backward from the loss is taken too."""
    gather: str | int | None = None
    """Where stacked weights (`model.W_in`) are gathered: "cpu", a device's index, or nowhere."""
    attention: str | None = None
    """How blocks attend: "sdpa", without a pattern where none is kept, or as installed."""

    def keeps(self, name: str) -> bool:
        """Whether `run_with_cache` keeps the activation of this hook point."""
        return self.cache == "all" or any(part_of(part, name) for part in self.parts)

    @property
    def parts(self) -> list[str]:
        """The names in `cache`."""
        return [part.strip() for part in (self.cache or "").split(",") if part.strip()]

    def __str__(self) -> str:
        parts = [f"batch {self.batch}, {self.ctx} tokens"]
        parts += [f"caching {self.cache}"] if self.cache else []
        parts += [f"generating {self.generate}"] if self.generate else []
        parts += ["with gradients"] if self.gradients else []
        parts += [f"gathering on {self.gather}"] if self.gather is not None else []
        parts += [f"attention {self.attention}"] if self.attention is not None else []
        return ", ".join(parts)


def part_of(part: str, name: str) -> bool:
    """Whether a hook point is meant: "z", "hook_z" and "attn.hook_z" by its name."""
    short = part.removeprefix("hook_")
    return name == part or name.endswith((f".{part}", f".hook_{short}")) or name == f"hook_{short}"


@dataclass(frozen=True)
class OnDevice:
    """What one device holds, in bytes."""

    device: str
    """Its index ("0 (home)", "1"), or "cpu"."""
    components: str
    """Which live there, in short: "embed, blocks.0-3"."""
    weights: int
    """Those that live there: not offloaded blocks that visit."""
    buffers: int = 0
    """Masks, rotary tables, and the like."""
    kv_cache: int = 0
    """Keys and values of all tokens, as generating ends."""
    cached: int = 0
    """Activations that `run_with_cache` keeps."""
    gathered: int = 0
    """The largest stack of weights."""
    working: int = 0
    """What a forward (and backward, if asked for) allocates beside all of these, at its peak."""
    loading: int = 0
    """What loading allocates beside the weights, at its peak."""
    capacity: int | None = None
    """What it has; None if that is not known."""

    @property
    def total(self) -> int:
        """The peak, of running or of loading."""
        running = self.kv_cache + self.cached + self.gathered + self.working
        return self.weights + self.buffers + max(running, self.loading)

    @property
    def loads_more(self) -> bool:
        """Whether loading takes more than running."""
        return self.loading > self.kv_cache + self.cached + self.gathered + self.working

    @property
    def headroom(self) -> int | None:
        """What is left."""
        return None if self.capacity is None else self.capacity - self.total

    @property
    def fits(self) -> bool:
        """Whether there is room for the peak."""
        return self.headroom is None or self.headroom >= 0


@dataclass(frozen=True)
class Setting:
    """A model, devices, and a job: all that an estimate depends on."""

    model: Blueprint
    n_devices: int
    device_map: DeviceMap | None
    memory: dict[Any, Any]
    """What each device has, by index."""
    job: Job
    limits: dict[Any, Any] | None = None
    """What weights may take of it (`max_memory`), if that is not all, or not of each device."""

    def measure(self) -> tuple[tuple[OnDevice, ...], Placement]:
        """Rehearse the job, once, and measure what it takes on each device."""
        return self._measured

    def weights_fit(self) -> bool:
        """Whether there is room for the weights, which is found without a rehearsal."""
        with simulate_apart(self.n_devices, _UNLIMITED):
            placement = self._place()
            rooms = by_device(self.memory, placement.home)
            return all(
                room is None or _stored(placement, memory) <= room
                for memory in placement.memories
                for room in [capacity(memory, rooms)]
            )

    @cached_property
    def _measured(self) -> tuple[tuple[OnDevice, ...], Placement]:
        with simulate_apart(self.n_devices, _UNLIMITED) as machine:
            placement = self._place()
            rooms = by_device(self.memory, placement.home)
            model = self.model.make(placement)
            _check_cache(self.job, model)
            if self.job.attention is not None:
                Attention(model, self.job.attention)
            made = [machine.memory_allocated(index) for index in range(self.n_devices)]
            used = _Usage(machine)
            used.rehearse(self.model, model, self.job)
            gathered = 0 if self.job.gather is None else self.model.largest_stack(model)
            loading = self.model.room_to_load(placement)
            devices = []
            for index, device in enumerate(machine.devices):
                runs = [each for each in placement.components if each.device == device]
                here = [each for each in runs if not each.offloaded]
                planned = sum(each.weights for each in here)  # a Bridge may hold some twice
                visiting = f" + {len(runs) - len(here)} visiting" if len(runs) > len(here) else ""
                devices.append(
                    OnDevice(
                        device=str(index) + (" (home)" if device == placement.home else ""),
                        components=in_short([each.name for each in here]) + visiting,
                        weights=max(planned, made[index] - shared_once(runs)),
                        buffers=shared_once(runs),
                        kv_cache=used.kv_cache[index],
                        cached=used.cached[index],
                        gathered=gathered if self.job.gather == index else 0,
                        working=used.working[index],
                        loading=loading if runs else 0,
                        capacity=capacity(device, rooms),
                    )
                )
            on_host = [each for each in placement.components if each.stored_on == HOST]
            if on_host or self.job.gather == "cpu":
                devices.append(
                    OnDevice(
                        device="cpu",
                        components=in_short([each.name for each in on_host]),
                        weights=sum(each.weights for each in on_host),
                        working=sum(each.weights for each in on_host) if self.job.gradients else 0,
                        gathered=gathered if self.job.gather == "cpu" else 0,
                        capacity=capacity(HOST, rooms),
                    )
                )
        return tuple(devices), placement

    def _place(self) -> Placement:
        """Where the components go, on devices that are there."""
        limits = self.memory if self.limits is None else self.limits
        leaves_out = any(index not in limits for index in range(self.n_devices))
        spread = None if leaves_out or self.device_map is not None else self.n_devices
        return decide(self.model.sizes(), spread, None, self.device_map, limits)


def _stored(placement: Placement, memory: torch.device) -> int:
    """Bytes of weights and buffers that live somewhere, without those that visit."""
    running = [each for each in placement.components if each.device == memory]
    stored = sum(each.weights for each in placement.components if each.stored_on == memory)
    return stored + shared_once(running)


_UNLIMITED = 2**60
"""What simulated devices have, so that what does not fit is measured too."""


def _check_cache(job: Job, model: Any) -> None:
    for part in job.parts if job.cache != "all" else ():
        if not any(part_of(part, name) for name in model.hook_dict):
            known = {name.rpartition(".")[2].removeprefix("hook_") for name in model.hook_dict}
            close = difflib.get_close_matches(part, known, n=3) or sorted(known)
            raise ValueError(
                f"cache={job.cache!r} names {part!r}, which is no hook of this model: give 'all', "
                f"or names such as {', '.join(map(repr, close))}"
            )


class _Usage:
    """What a job allocates on each device of a machine, beside what is there now, in bytes.

    Args:
        machine: a simulated one, with a model on it.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._devices = range(len(machine.devices))
        self._base = [machine.memory_allocated(index) for index in self._devices]
        self.cached = self._held()
        self.kv_cache = self._held()
        self.working = self._held()

    def rehearse(self, blueprint: Blueprint, model: Any, job: Job) -> None:
        """Run the job on the model, and measure it."""
        if job.cache is not None or job.gradients or not job.generate:
            with torch.set_grad_enabled(job.gradients):
                self._run(model, job)
        if job.generate:
            with torch.no_grad():
                self._generate(blueprint.generation(model, job.batch, job.ctx), job)

    def _run(self, model: Any, job: Job) -> None:
        """A forward, with what it caches, and a backward."""
        tokens = torch.zeros(job.batch, job.ctx, dtype=torch.long, device=model.cfg.device)
        wanted: Any = "loss" if job.gradients else "logits"
        self._start()
        output, _kept = model.run_with_cache(
            tokens, names_filter=job.keeps, return_type=wanted, return_cache_object=False
        )
        if job.gradients:
            output.backward()
        del output, tokens
        model.zero_grad(set_to_none=True)
        self.cached = self._held()
        self._add_work(beside=self.cached)

    def _generate(self, generation: Generation, job: Job) -> None:
        """The prompt, and the last of the new tokens."""
        self._start()
        generation.prompt()
        prompt_peak = self._peak()
        generation.skip_to(job.ctx + job.generate - 1)
        self._start()
        generation.last_token()
        self.kv_cache = self._held()
        self._add_work(beside=self.kv_cache, peak=prompt_peak)
        self._add_work(beside=self.kv_cache)

    def _start(self) -> None:
        for index in self._devices:
            self._machine.reset_peak_memory_stats(index)

    def _held(self) -> list[int]:
        return [self._machine.memory_allocated(i) - self._base[i] for i in self._devices]

    def _peak(self) -> list[int]:
        return [self._machine.max_memory_allocated(i) - self._base[i] for i in self._devices]

    def _add_work(self, beside: list[int], peak: list[int] | None = None) -> None:
        """Count what was allocated at the peak, beyond what is counted elsewhere."""
        peak = self._peak() if peak is None else peak
        self.working = [
            max(known, most - other) for known, most, other in zip(self.working, peak, beside)
        ]
