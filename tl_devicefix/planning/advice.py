"""What would fit, for a job that does not: each is rehearsed before it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    found = [words for words in (_first_fitting(asked, kind) for kind in _CHANGES) if words]
    if not found:
        return "No single change would do: combine more devices, a smaller dtype and a smaller job."
    return f"What would: {', or '.join(found)}."


def _first_fitting(asked: Setting, changes: Callable[[Setting], Iterator[Change]]) -> str | None:
    """The words of the first change of a kind with which the job fits."""
    if changes in _OF_THE_JOB and not asked.weights_fit():
        return None  # whatever is done with them
    if changes is _offloaded:  # each attempt learns of the one before
        return next((words for words, setting in changes(asked) if _fits(setting)), None)
    # Rehearsed is only what has room for the weights.
    able = [change for change in changes(asked) if change[1].weights_fit()]
    return _least(able)


def _least(changes: Sequence[Change]) -> str | None:
    """The words of the first change that fits, of changes of which each frees more than the last.

    So few are rehearsed: the first, the last, and halfway between those of which one fits.
    """
    if not changes:
        return None
    too_little, enough = 0, len(changes) - 1
    if _fits(changes[0][1]):
        return changes[0][0]
    if not enough or not _fits(changes[enough][1]):
        return None
    while enough - too_little > 1:
        halfway = (too_little + enough) // 2
        if _fits(changes[halfway][1]):
            enough = halfway
        else:
            too_little = halfway
    return changes[enough][0]


def _fits(setting: Setting) -> bool:
    return all(device.fits for device in setting.measure().devices)


def _balanced(asked: Setting) -> Iterator[Change]:
    if asked.device_map is not None and asked.n_devices > 1:
        yield "device_map='balanced'", replace(asked, device_map="balanced")


def _more_devices(asked: Setting) -> Iterator[Change]:
    sizes = {size for key, size in asked.memory.items() if key != "cpu"}
    if len(sizes) > 1 or isinstance(asked.device_map, Mapping) or not _limits_are_all(asked):
        return
    hosts = asked.hosts
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


def _limits_are_all(asked: Setting) -> bool:
    """Whether weights may take all that each device has."""
    limits = asked.limits or {}
    return all(asked.memory.get(key) == size for key, size in limits.items())


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
        devices, placement, _ = tried.measure()
        limits: dict[Any, Any] = {
            index: (each.capacity or 0) - (each.total - each.weights - each.buffers) - _SPARE
            for index, each in enumerate(devices[: asked.n_devices])
            if asked.limits is None or index in asked.limits
        }
        if min(limits.values()) < 0:
            return
        host = sum(each.weights for each in placement.components)
        limits["cpu"] = asked.memory.get("cpu", host)
        told = ", ".join(f"{key!r}: {_as_given(size)!r}" for key, size in limits.items())
        tried = replace(asked, limits=limits)
        yield f"max_memory={{{told}}} for the weights", tried


_SPARE = 2**20
"""What is lost in rounding to MiB."""


def _as_given(size: int | str) -> str:
    return size if isinstance(size, str) else f"{size // 2**20}MiB"


def _without_pattern(asked: Setting) -> Iterator[Change]:
    if asked.job.attn_implementation == SDPA:
        return
    tried = replace(asked, job=replace(asked.job, attn_implementation=SDPA))
    try:
        tried.measure()
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
