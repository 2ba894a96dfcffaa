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
        caller = {device: _CallersState(device) for device in of_each}
        workers = {device: stack.enter_context(ThreadPoolExecutor(1)) for device in of_each}
        stack.callback(order.stop)  # before the workers are waited for
        for index, (unit, device) in enumerate(zip(units, devices)):
            begun.append(workers[device].submit(order.do, index, unit, caller[device]))
        for future in as_completed(begun):
            if future.exception() is None and future.result():
                done()
    _raise_first([error for future in begun if (error := future.exception()) is not None])


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

    def do(self, index: int, unit: Any, caller: _CallersState) -> bool:
        """Do it to one unit, in a worker; say whether it was begun."""
        if index >= self._end:
            return False
        try:
            torch.set_num_threads(self._cores)
            with caller.carried():
                self._do(unit)
        except BaseException as error:
            self.stop(index if isinstance(error, Exception) else 0)
            raise
        return True

    def stop(self, before: int = 0) -> None:
        """Have no unit be begun from this one on."""
        with self._ending:
            self._end = min(self._end, before)


class _CallersState:
    """What torch keeps by thread, and loading depends on, as the calling thread has it.

    Inference mode makes other tensors. What a device is given goes to the stream that the caller
    uses, so that it is in order with what the caller does before and after.

    Args:
        device: the device of a worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._streams = torch.get_device_module(device) if device.type != "cpu" else None
        if not hasattr(self._streams, "set_stream"):
            self._streams = None
        self._stream = self._streams.current_stream(device) if self._streams else None

    @contextlib.contextmanager
    def carried(self) -> Iterator[None]:
        """Within it, this thread has it too."""
        if self._streams is not None:
            self._streams.set_stream(self._stream)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            yield


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
