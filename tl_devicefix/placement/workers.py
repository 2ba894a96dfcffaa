"""A worker a device: what is done to components on different devices is done at once.

On each device it is done to one component after the other, in their order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch

from tl_devicefix.placement.callers_state import CallersState


def each_on_its_device(
    do: Callable[[Any], None],
    units: Sequence[Any],
    devices: Sequence[torch.device],
    done: Callable[[], Any] = lambda: None,
) -> None:
    """Do something to each unit, with a thread for each of several devices.

    An error ends it as it would have ended a loop: units after the failed one are not begun any
    more, those before it are finished, and the first error in the units' order is raised. An
    interrupt leaves all that is not begun. In either case no thread is left.

    Args:
        do: what to do to a unit; not a closure, as an error's traceback would keep what it holds.
        units: in order.
        devices: for each unit, the device where it is done.
        done: called in this thread after each unit.
    """
    of_each = dict.fromkeys(devices)
    if len(of_each) < 2:
        for unit in units:
            do(unit)
            done()
        return
    begun: list[Future[bool]] = []
    with contextlib.ExitStack() as stack:
        order = _Order(do, len(units), stack.enter_context(sharing_cores(len(of_each))))
        caller = CallersState(of_each)
        workers = {device: stack.enter_context(threads(1)) for device in of_each}
        stack.callback(order.stop)  # before the workers are waited for
        for index, (unit, device) in enumerate(zip(units, devices)):
            begun.append(workers[device].submit(order.do, index, unit, caller))
        order.begin()
        for future in as_completed(begun):
            if future.exception() is None and future.result():
                done()
    errors = [error for future in begun if (error := future.exception()) is not None]
    begun.clear()  # or an error's traceback would hold them, and they the error
    _raise_first(errors)


@contextlib.contextmanager
def threads(count: int, **options: Any) -> Iterator[ThreadPoolExecutor]:
    """So many threads, none of which is left at the end, also not by an interrupt of the waiting.

    Args:
        count: how many.
        options: those of a ThreadPoolExecutor.
    """
    pool = ThreadPoolExecutor(count, **options)
    try:
        yield pool
    finally:
        try:
            pool.shutdown(cancel_futures=True)
        except BaseException:
            pool.shutdown()
            raise


def _raise_first(errors: list[BaseException]) -> None:
    """Raise the first of some errors, if any; what is no Exception, as an interrupt, before all."""
    errors.sort(key=lambda error: isinstance(error, Exception))
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or its traceback would hold the others, and they what was being done


class _Order:
    """What several threads do to units, as far as a loop would have got.

    Args:
        do: what is done to a unit.
        count: how many there are.
        cores: how many cores torch may use in each thread.
    """

    def __init__(self, do: Callable[[Any], None], count: int, cores: int) -> None:
        self._do, self._cores = do, cores
        self._end = count
        self._ending = threading.Lock()
        self._begins = threading.Event()

    def begin(self) -> None:
        """Let the threads begin: all are there, and an interrupt finds them."""
        self._begins.set()

    def do(self, index: int, unit: Any, caller: CallersState) -> bool:
        """Do it to one unit, in a worker; say whether it was begun."""
        self._begins.wait()
        if index >= self._end:
            return False
        try:
            caller.run(self._on_its_cores, unit)
        except BaseException as error:
            self.stop(index if isinstance(error, Exception) else 0)
            raise
        return True

    def _on_its_cores(self, unit: Any) -> None:
        torch.set_num_threads(self._cores)
        self._do(unit)

    def stop(self, before: int = 0) -> None:
        """Have no unit be begun from this one on."""
        with self._ending:
            self._end = min(self._end, before)
        self._begins.set()


# torch.set_num_threads also sets what new threads begin with: one load at a time.
_setting_threads = threading.Lock()


@contextlib.contextmanager
def sharing_cores(workers: int) -> Iterator[int]:
    """Within it, threads may call `torch.set_num_threads` for themselves; yields a worker's share.

    torch would split each of many small operations over all cores, and wait for the slowest every
    time: ten times as long on a machine that does something else as well.
    """
    with _setting_threads:
        threads = torch.get_num_threads()
        try:
            yield max(1, threads // workers)
        finally:
            torch.set_num_threads(threads)
