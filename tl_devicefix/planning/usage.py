"""The memory that a job takes on each device, measured by a dry run at full size.

No formula: it is what the installed TransformerLens allocates, on tensors without values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tl_devicefix.attention.implementation import set_attn_implementation
from tl_devicefix.gathering.caches import CacheAtHome
from tl_devicefix.gathering.gathering import STACKED
from tl_devicefix.placement.deciding import DeviceMap, decide
from tl_devicefix.placement.devices import DEVICE_TYPE, HOST, Hosts
from tl_devicefix.placement.in_use import gather_on
from tl_devicefix.placement.memory import by_device, capacity
from tl_devicefix.placement.placement import (
    BetweenHosts,
    Placement,
    by_hosts,
    in_short,
    shared_once,
)
from tl_devicefix.planning.blueprints import Blueprint, Generation
from tl_devicefix.planning.plan import UNLIMITED
from tl_devicefix.simulation import Machine, Transfer, simulate_apart


@dataclass(frozen=True)
class Job:
    """A job: the forward, cache, generation or backward that an estimate is about."""

    batch_size: int = 1
    """Sequences."""
    seq_len: int = 1024
    """Tokens in each sequence."""
    cache: str | None = None
    """What `run_with_cache` keeps: hook names less "hook_" ("resid_post,z"), "all", or None."""
    max_new_tokens: int = 0
    """New tokens for each sequence, with a KV cache."""
    gradients: bool = False
    """Whether gradients are on; then a backward from the loss is taken too."""
    gather: str | int | None = None
    """Where stacked weights (`model.W_in`) are gathered: "cpu", a device's index, or nowhere."""
    attn_implementation: str | None = None
    """How blocks attend: "sdpa", without a pattern where none is kept, or as installed."""

    def keeps(self, name: str) -> bool:
        """Whether `run_with_cache` keeps the activation of this hook point."""
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
        parts += [f"gathering on {self.gather}"] if self.gather is not None else []
        parts += (
            [f"attn_implementation {self.attn_implementation}"] if self.attn_implementation else []
        )
        return ", ".join(parts)


def part_of(part: str, name: str) -> bool:
    """Whether `part` names a hook point: "z", "hook_z" and "attn.hook_z" by its name."""
    short = part.removeprefix("hook_")
    return name == part or name.endswith((f".{part}", f".hook_{short}")) or name == f"hook_{short}"


@dataclass(frozen=True)
class OnDevice:
    """The memory that a job needs on one device; all sizes are in bytes."""

    device: str
    """Its index ("0 (home)", "1"), with its host if there are several, or "cpu"."""
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
        """Bytes that are left of `capacity`; negative if the job does not fit."""
        return None if self.capacity is None else self.capacity - self.total

    @property
    def fits(self) -> bool:
        """Whether there is room for the peak."""
        return self.headroom is None or self.headroom >= 0


class Measured(NamedTuple):
    """The results of a dry run of a job."""

    devices: tuple[OnDevice, ...]
    placement: Placement
    between_hosts: dict[str, BetweenHosts]
    """What goes from host to host: in a forward, its backward, ..."""


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
    hosts: Hosts | None = None
    """Over how many, or which, the devices are divided, if they are."""

    def weights_fit(self) -> bool:
        """Whether there is room for the weights, which is known without a dry run."""
        with simulate_apart(self.n_devices, UNLIMITED, self.hosts):
            placement = self._place()
            rooms = {memory: self._capacity(memory, placement) for memory in placement.memories}
        return all(
            room is None or placement.bytes_on(memory) <= room for memory, room in rooms.items()
        )

    @cached_property
    def measured(self) -> Measured:
        """What the job takes on each device, by one dry run; also of what does not fit."""
        with simulate_apart(self.n_devices, UNLIMITED, self.hosts) as machine:
            placement = self._place()
            model = self.model.make(placement)
            _check_cache(self.job, model)
            if self.job.attn_implementation is not None:
                set_attn_implementation(model, self.job.attn_implementation)
            made = [machine.memory_allocated(index) for index in range(self.n_devices)]
            used = _Usage(machine, placement)
            used.dry_run(self.model, model, self.job)
            devices = [
                self._on_device(index, placement, made[index], used)
                for index in range(self.n_devices)
            ]
            on_host = [
                component for component in placement.components if component.stored_on == HOST
            ]
            if on_host or self.job.gather == "cpu":
                weights = sum(component.weights for component in on_host)
                devices.append(
                    OnDevice(
                        device="cpu",
                        components=in_short([component.name for component in on_host]),
                        weights=weights,
                        working=weights if self.job.gradients else 0,
                        capacity=self._capacity(HOST, placement),
                    )
                )
            if self.job.gather is not None:
                at = -1 if self.job.gather == "cpu" else int(self.job.gather)
                devices[at] = replace(devices[at], gathered=_largest_stack(machine, model))
        return Measured(tuple(devices), placement, used.between_hosts)

    def _on_device(self, index: int, placement: Placement, made: int, used: _Usage) -> OnDevice:
        device = torch.device(DEVICE_TYPE, index)
        runs = [component for component in placement.components if component.device == device]
        # A Bridge may hold some twice.
        planned = sum(component.weights for component in runs if not component.offloaded)
        return OnDevice(
            device=placement.label(device).removeprefix(f"{DEVICE_TYPE}:"),
            components=placement.held_in(device),
            weights=max(planned, made - shared_once(runs)),
            buffers=shared_once(runs),
            kv_cache=used.kv_cache[index],
            cached=used.cached[index],
            working=used.working[index],
            loading=self.model.room_to_load(placement) if runs else 0,
            capacity=self._capacity(device, placement),
        )

    def _capacity(self, device: torch.device, placement: Placement) -> int | None:
        return capacity(device, by_device(self.memory, placement.home, "memory"))

    def _place(self) -> Placement:
        """Place the components on the devices that are simulated now."""
        limits = self.memory if self.limits is None else self.limits
        leaves_out = any(index not in limits for index in range(self.n_devices))
        spread = None if leaves_out or self.device_map is not None else self.n_devices
        return decide(self.model.sizes(), spread, None, self.device_map, limits)


def _check_cache(job: Job, model: Any) -> None:
    for part in job.parts if job.cache != "all" else ():
        if not any(part_of(part, name) for name in model.hook_dict):
            hook_names = {name.rpartition(".")[2].removeprefix("hook_") for name in model.hook_dict}
            close = difflib.get_close_matches(part, hook_names, n=3) or sorted(hook_names)
            raise ValueError(
                f"cache={job.cache!r} names {part!r}, but this model has no such hook: give 'all', "
                f"or names such as {', '.join(map(repr, close))}"
            )


def _largest_stack(machine: Machine, model: Any) -> int:
    """Bytes that the largest stacked weight (`model.W_in`) of a model takes, as it is made."""
    before = machine.memory_allocated(0)
    machine.reset_peak_memory_stats(0)
    with gather_on(f"{DEVICE_TYPE}:0"), torch.no_grad():
        for name in STACKED:
            # Blocks may have none, or none that can be stacked.
            with suppress(AttributeError, ValueError, NotImplementedError):
                getattr(model, name)
    return machine.max_memory_allocated(0) - before


class _Usage:
    """Bytes that a job allocates on each device of a machine, beyond those allocated now."""

    def __init__(self, machine: Machine, placement: Placement) -> None:
        self._machine, self._placement = machine, placement
        self.between_hosts: dict[str, BetweenHosts] = {}
        self._devices = range(len(machine.devices))
        self._base = [machine.memory_allocated(index) for index in self._devices]
        self.cached = self._held()
        self.kv_cache = self._held()
        self.working = self._held()

    def dry_run(self, blueprint: Blueprint, model: Any, job: Job) -> None:
        """Run the job on the model, and measure it."""
        if job.cache is not None or job.gradients or not job.max_new_tokens:
            with torch.set_grad_enabled(job.gradients):
                self._run(model, job)
        if job.max_new_tokens:
            with torch.no_grad():
                self._generate(blueprint.generation(model, job.batch_size, job.seq_len), job)

    def _run(self, model: Any, job: Job) -> None:
        """A forward, with what it caches, and a backward."""
        tokens = torch.zeros(job.batch_size, job.seq_len, dtype=torch.long, device=model.cfg.device)
        return_type: Any = "loss" if job.gradients else "logits"
        self._start()
        output, kept = model.run_with_cache(
            tokens, names_filter=job.keeps, return_type=return_type, return_cache_object=False
        )
        self._note_crossings("a forward")
        if job.cache is not None:
            self._note_crossings("the cache, read at home", self._to_home(kept))
        if job.gradients:
            self._machine.reset_transfers()
            output.backward()
            self._note_crossings("its backward")
        del output, tokens
        model.zero_grad(set_to_none=True)
        self.cached = self._held()
        self._add_work(beside=self.cached)

    def _generate(self, generation: Generation, job: Job) -> None:
        """The prompt, and the last of the new tokens."""
        self._start()
        generation.prompt()
        self._note_crossings("the prompt")
        prompt_peak = self._peak()
        generation.skip_to(job.seq_len + job.max_new_tokens - 1)
        self._start()
        generation.last_token()
        self._note_crossings("a generated token")
        self.kv_cache = self._held()
        self._add_work(beside=self.kv_cache, peak=prompt_peak)
        self._add_work(beside=self.kv_cache)

    def _note_crossings(self, what: str, moved: Iterable[Any] | None = None) -> None:
        """Note what went from host to host: by default, all transfers since the start."""
        if self._placement.sites:
            transfers = self._machine.transfers if moved is None else moved
            sizes = ((transfer, transfer.bytes) for transfer in transfers)
            self.between_hosts[what] = by_hosts(sizes, self._placement.sites)

    def _to_home(self, kept: Any) -> Iterator[Transfer]:
        """The transfers of reading the whole cache at home."""
        activations = kept.stored() if isinstance(kept, CacheAtHome) else kept
        for activation in activations.values():
            yield Transfer(
                activation.device, self._placement.home, activation.nbytes, activation.shape
            )

    def _start(self) -> None:
        self._machine.reset_transfers()
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
            max(previous, most - other) for previous, most, other in zip(self.working, peak, beside)
        ]
