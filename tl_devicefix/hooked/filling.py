"""Stream weights from a source into an empty model, component by component."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import torch
import transformers.utils.logging as hf_logging

from tl_devicefix.checkpoints import Source
from tl_devicefix.folding import Steps
from tl_devicefix.hooked.units import complete_unit, load_component, processing_units
from tl_devicefix.placement.fitting import naming_full_devices
from tl_devicefix.placement.placement import Placement


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

    with hf_logging.tqdm(total=len(units), desc="Loading components") as progress:
        # No closure: a traceback would hold it, and it the model.
        fill_one = functools.partial(_fill_one, model, source, placement, steps, progress)
        all_on_cpu = {device.type for device in placement.devices} == {"cpu"}
        at_once = min(torch.get_num_threads(), _MOST_AT_ONCE) if all_on_cpu else 1
        if at_once > 1 and not source.computes:
            _on_one_core_each(fill_one, units, at_once)
        else:
            for unit in units:
                fill_one(unit)


def _fill_one(
    model: Any, source: Source, placement: Placement, steps: Steps, progress: Any, unit: str
) -> None:
    device = placement.device_of(unit)
    with naming_full_devices(model, placement, unit):
        weights = complete_unit(model, unit, source.read(unit, device))
        load_component(model, unit, weights, steps)
    progress.update()


def _on_one_core_each(fill_one: Callable[[str], None], units: list[str], at_once: int) -> None:
    """Fill several components at once, the operations of each on one core.

    torch would split each of many small operations over all cores, and wait for the slowest every
    time: ten times as long on a machine that does something else as well.
    """
    with _setting_threads, _workers(at_once) as workers:
        # The unembedding is the largest, so not the one to wait for at the end.
        futures = [workers.submit(fill_one, unit) for unit in reversed(units)]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()


_MOST_AT_ONCE = 8
"""More do not copy faster: memory is the limit."""


# torch.set_num_threads also sets what new threads begin with: one load at a time.
_setting_threads = threading.Lock()


@contextlib.contextmanager
def _workers(count: int) -> Iterator[ThreadPoolExecutor]:
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
