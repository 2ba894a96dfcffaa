"""Whether a job fits, before anything is loaded: `estimate(...)`, a table of what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tl_devicefix.advice import what_would_fit
from tl_devicefix.fitting import MaxMemory, gib
from tl_devicefix.patches import patched
from tl_devicefix.placement import DeviceMap, Placement
from tl_devicefix.rehearsal import config_at_full_size
from tl_devicefix.usage import Job, OnDevice, Setting


@dataclass(frozen=True, repr=False)
class Estimate:
    """What a job takes. Printing it shows a table, and whether it fits."""

    model: str
    dtype: str
    job: Job
    devices: tuple[OnDevice, ...]
    placement: Placement
    advice: str = ""
    """What would fit, if this does not."""

    @property
    def fits(self) -> bool:
        """Whether each device has room for its peak."""
        return all(device.fits for device in self.devices)

    def to_dict(self) -> dict[str, Any]:
        """All of it, as plain numbers and texts, in bytes."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "job": asdict(self.job),
            "devices": [
                {**asdict(each), "total": each.total, "headroom": each.headroom}
                for each in self.devices
            ],
            "fits": self.fits,
            "advice": self.advice,
        }

    def __repr__(self) -> str:
        columns = ("weights", "buffers", "kv_cache", "cached", "gathered", "working", "total")
        shown = [name for name in columns if any(getattr(each, name) for each in self.devices)]
        rows = [("device", "components", *(name.replace("_", " ") for name in shown), "headroom")]
        for each in self.devices:
            left = "" if each.headroom is None else _signed(each.headroom)
            sizes = (gib(getattr(each, name)) for name in shown)
            rows.append((each.device, each.components, *sizes, left))
        sums = (gib(sum(getattr(each, name) for each in self.devices)) for name in shown)
        rows.append(("total", "", *sums, ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        aligned = ("<", "<", *(">" for _ in rows[0][2:]))
        lines = [
            "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligned, widths)).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.model}, {self.dtype}: {self.job}", *lines, self._verdict()])

    def _verdict(self) -> str:
        over = [each for each in self.devices if not each.fits]
        if not over:
            return "It fits."
        worst = min(over, key=lambda each: each.headroom or 0)
        needs = f"device {worst.device} needs {gib(worst.total)} but has {gib(worst.capacity or 0)}"
        return f"It does not fit: {needs}. {self.advice}"


def _signed(size: int) -> str:
    return gib(size) if size >= 0 else f"-{gib(-size)}"


def estimate(
    config_or_model_name: Any,
    n_devices: int | None = None,
    *,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | int | str = "80GiB",
    dtype: torch.dtype | str | None = None,
    batch: int = 1,
    ctx: int | None = None,
    cache: str | None = None,
    generate: int = 0,
    gradients: bool = False,
    gather: str | int | None = None,
    **options: Any,
) -> Estimate:
    """Estimate what a job takes on each device, and whether it fits; nothing is loaded.

    Args:
        config_or_model_name: as for `plan`.
        n_devices: how many devices there are; by default those that `max_memory` names, or 1.
        device_map: as for `from_pretrained`.
        max_memory: what each device has ("80GiB"), or a dict: `{0: "24GiB", 1: "80GiB"}`; with
            "cpu", blocks that do not fit are offloaded there.
        dtype: of the weights; by default float32, as for `from_pretrained`.
        batch: how many sequences.
        ctx: how many tokens in each; by default 1024, or n_ctx if that is less.
        cache: what `run_with_cache` keeps: the end of hook names ("resid_post"; several with
            commas between), or "all".
        generate: how many new tokens, with a KV cache.
        gradients: take gradients, from the loss back to every parameter.
        gather: where stacked weights are gathered: "cpu" or a device's index. The largest counts.
        options: what the config depends on, as for `from_pretrained`: `first_n_layers`, `n_ctx`.

    Raises:
        ValueError: if the arguments do not fit together, or the model's config cannot be had.
    """
    with patched():
        cfg = config_at_full_size(config_or_model_name, dtype, options)
        ctx = min(1024, cfg.n_ctx) if ctx is None else ctx
        job = Job(batch, ctx, cache, generate, gradients, gather)
        _check(job, cfg)
        named = max_memory if isinstance(max_memory, Mapping) else {}
        n_devices = n_devices or len([each for each in named if each not in ("cpu", "disk")]) or 1
        asked = Setting(cfg, n_devices, device_map, max_memory, job)
        devices, placement = asked.measure()
        fits = all(device.fits for device in devices)
        advice = "" if fits else what_would_fit(asked)
    name = str(getattr(config_or_model_name, "model_name", config_or_model_name))
    return Estimate(name, str(cfg.dtype).removeprefix("torch."), job, devices, placement, advice)


def _check(job: Job, cfg: Any) -> None:
    for name, least in (("batch", 1), ("ctx", 1), ("generate", 0)):
        value = getattr(job, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} is no number of {_COUNTED[name]}: give an int")
    if not (job.gather in (None, "cpu") or isinstance(job.gather, int)):
        raise ValueError(f"gather={job.gather!r} is no place to gather: give 'cpu' or an index")
    if job.ctx + job.generate > cfg.n_ctx:
        raise ValueError(
            f"{job.ctx + job.generate} tokens are more than the model's n_ctx of {cfg.n_ctx}: "
            "lower ctx or generate, or give n_ctx"
        )


_COUNTED = {"batch": "sequences", "ctx": "tokens", "generate": "new tokens"}
