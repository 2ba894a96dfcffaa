"""What would fit, for a job that does not: each change is tested by a dry run before it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tl_devicefix.attention.implementation import SDPA
from tl_devicefix.planning.usage import Setting

_MOST_DEVICES = 16

Change = tuple[str, Setting]
"""What to say, and what the estimate then depends on."""


def what_would_fit(asked: Setting) -> str:
    """The least change of each kind with which the job would fit, as a sentence."""
    kinds = _CHANGES if asked.weights_fit() else [k for k in _CHANGES if k not in _OF_THE_JOB]
    told = [words for words in (_least(list(kind(asked))) for kind in kinds) if words]
    if not told:
        return "No single change would do: combine more devices, a smaller dtype and a smaller job."
    return f"What would fit: {', or '.join(told)}."


def _least(changes: list[Change]) -> str | None:
    """The words of the first change that fits, of changes of which each frees more than the last.

    Tested is only what has room for the weights, and the last one early, as it fits if any does.
    """
    able = [change for change in changes if change[1].weights_fit()]
    if not able or not (_fits(able[0][1]) or _fits(able[-1][1])):
        return None
    return next(words for words, setting in able if _fits(setting))


def _fits(setting: Setting) -> bool:
    return all(device.fits for device in setting.measured.devices)


def _balanced(asked: Setting) -> Iterator[Change]:
    if asked.device_map is not None and asked.n_devices > 1:
        yield "device_map='balanced'", replace(asked, device_map="balanced")


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
    """With what the job takes beside the weights left free, and what then does not fit offloaded.

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
        host = asked.memory.get("cpu", sum(each.weights for each in placement.components))
        told = {index: f"{room // _MIB - 1}MiB" for index, room in limits.items()}
        told["cpu"] = host if isinstance(host, str) else f"{host // _MIB}MiB"
        tried = replace(asked, limits={**told, "cpu": host})
        if _fits(tried):
            yield f"max_memory={told!r} for the weights", tried
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


def _smaller_batch(asked: Setting) -> Iterator[Change]:
    return _halved(asked, "batch_size", least=1)


def _shorter(asked: Setting) -> Iterator[Change]:
    return _halved(asked, "seq_len", least=64)


def _halved(asked: Setting, name: str, least: int) -> Iterator[Change]:
    value = getattr(asked.job, name) // 2
    while value >= least:
        changed: dict[str, Any] = {name: value}
        yield f"{name}={value}", replace(asked, job=replace(asked.job, **changed))
        value //= 2


def _less_cached(asked: Setting) -> Iterator[Change]:
    if asked.job.cache not in (None, "resid_post"):
        yield "caching resid_post only", replace(asked, job=replace(asked.job, cache="resid_post"))
    if asked.job.cache is not None:
        yield "caching nothing", replace(asked, job=replace(asked.job, cache=None))


_OF_THE_JOB = (_without_pattern, _smaller_batch, _shorter, _less_cached)
_CHANGES = (*(_balanced, _more_devices, _smaller_dtype, _offloaded), *_OF_THE_JOB)
