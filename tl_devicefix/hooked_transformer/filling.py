"""Stream weights from a source into an empty model, component by component on each device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import as_completed
from typing import Any

import torch
import transformers.utils.logging as hf_logging

from tl_devicefix.checkpoints.source import Source
from tl_devicefix.hooked_transformer.units import complete_unit, load_component, processing_units
from tl_devicefix.offload.staging import Staging
from tl_devicefix.placement.fitting import naming_full_devices
from tl_devicefix.placement.placement import Placement
from tl_devicefix.placement.workers import each_on_its_device, sharing_cores, threads
from tl_devicefix.weight_processing import Steps


def fill(model: Any, source: Source, placement: Placement, steps: Steps) -> None:
    """Read, process and store every component of a model, each on its planned device.

    Args:
        model: a HookedTransformer whose parameters are on meta.
        source: where its weights come from.
        placement: where they go.
        steps: how they are processed on the way (`Steps.applicable`).

    Raises:
        ValueError: if the source has not the weights that the model's config asks for.
        torch.OutOfMemoryError: saying which device has no room, and what would fit.
    """
    model.placement = placement
    units = processing_units(model.cfg)

    bar = hf_logging.tqdm(total=len(units), desc="Loading components")
    with bar as progress, contextlib.ExitStack() as stack:
        # An offloaded block is folded where it runs.
        devices = [placement.device_of(unit) for unit in units]
        staging = {d: stack.enter_context(Staging(d)) for d in placement.devices}
        # No closure: a traceback would hold it, and it the model.
        fill_one = functools.partial(_fill_one, model, source, placement, steps, staging)
        at_once = min(torch.get_num_threads(), _MOST_AT_ONCE)
        if source.computes:
            for unit in units:
                fill_one(unit)
                progress.update()
        elif at_once > 1 and {device.type for device in devices} == {"cpu"}:
            _on_one_core_each(fill_one, units, at_once, progress.update)
        else:
            each_on_its_device(fill_one, units, devices, progress.update)


def _fill_one(
    model: Any,
    source: Source,
    placement: Placement,
    steps: Steps,
    staging: Mapping[torch.device, Staging],
    unit: str,
) -> None:
    device = placement.device_of(unit)
    with naming_full_devices(model, placement, unit):
        weights = complete_unit(model, unit, source.read(unit, device))
        load_component(model, unit, weights, steps, staging[device])


def _on_one_core_each(
    fill_one: Callable[[str], None], units: list[str], at_once: int, done: Callable[[], Any]
) -> None:
    """Fill several components of the CPU at once, the operations of each on one core."""
    on_one_core = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with sharing_cores(at_once), threads(at_once, **on_one_core) as workers:
        # The unembedding is the largest, so not the one to wait for at the end.
        futures = [workers.submit(fill_one, unit) for unit in reversed(units)]
        for future in as_completed(futures):
            future.result()
            done()


_MOST_AT_ONCE = 8
"""More do not copy faster: memory is the limit."""
