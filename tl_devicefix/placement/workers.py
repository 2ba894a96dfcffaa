"""Process components of different devices at the same time, with a thread for each device.

Each device processes its components one after the other, in order.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatching

_Unit = TypeVar("_Unit")
_Result = TypeVar("_Result")

# The lock is held
# 1. while an empty or a tiny model is made: torch, transformers, accelerate and this package
#    replace classes' methods and settings for that;
# 2. while components move to devices: `torch.set_num_threads` also applies to Python threads that
#    start later;
# 3. while TransformerLens reads a config: its name for AutoConfig is replaced for that;
# 4. while hosts join: a load that began meanwhile would miss them.
# The workers of a load may not take it: the thread that waits for them holds it.
one_load = threading.RLock()
"""The lock of loads, which change what all threads see."""


def each_on_its_device(
    do: Callable[[_Unit], None],
    units: Sequence[_Unit],
    devices: Sequence[torch.device],
    done: Callable[[], object] = lambda: None,
) -> None:
    """Call `do` for each unit, in a thread for each device if there are several.

    After an error or an interrupt, units that have not begun are cancelled, and no thread is left.
    If several units fail, the error of the first one is raised. `do` must be no closure:
    tracebacks would keep its cells alive. `done` is called in this thread after each unit.
    """
    distinct = dict.fromkeys(devices)
    if len(distinct) < 2:
        for unit in units:
            do(unit)
            done()
        return
    begun: list[Future[None]] = []
    with one_load, contextlib.ExitStack() as stack:
        # The threads share the cores. Otherwise torch splits each small operation across all cores
        # and waits for the slowest one: ten times slower on a busy machine.
        all_cores = torch.get_num_threads()
        stack.callback(torch.set_num_threads, all_cores)
        cores = max(1, all_cores // len(distinct))
        caller = CallersState(distinct)
        on_cores = {"initializer": torch.set_num_threads, "initargs": (cores,)}
        workers = {device: stack.enter_context(threads(1, **on_cores)) for device in distinct}
        # Cancel before the pools end: while we wait for one, the others would go on.
        stack.callback(lambda: [future.cancel() for future in begun])
        for unit, device in zip(units, devices):
            begun.append(workers[device].submit(caller.run, do, unit))
        for future in as_completed(begun):
            if future.exception() is not None:
                break
            done()
    errors = list(filter(None, (future.exception() for future in begun if not future.cancelled())))
    del future
    begun.clear()  # break the cycle error -> traceback -> futures -> error
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # the traceback of one would keep the others alive


@contextlib.contextmanager
def threads(count: int, **options: Any) -> Iterator[ThreadPoolExecutor]:
    """Make a pool of threads, all of which end with the `with` block, even after an interrupt."""
    pool = ThreadPoolExecutor(count, **options)
    try:
        yield pool
    finally:
        try:
            pool.shutdown(cancel_futures=True)
        except BaseException:  # an interrupt while it waited: wait again, then raise it
            pool.shutdown()
            raise


class CallersState:
    """A snapshot of this thread's torch settings, to run functions in other threads with them.

    It holds gradient and inference mode, autocast, the modes of torch functions and operations
    (`torch.set_default_device`, `mix_devices`), the current devices and streams, and context
    variables such as the device of `gather_on`.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = tuple(devices)
        types = tuple(dict.fromkeys(device.type for device in devices))
        self._context = contextvars.copy_context()
        self._set = list(_current_devices_and_streams(devices))
        self._enter: list[Callable[[], contextlib.AbstractContextManager[object]]] = [
            functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
            functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            # Set autocast only where it is enabled: some device types do not support it.
            *map(_autocast, filter(torch.is_autocast_enabled, dict.fromkeys((*types, "cpu")))),
        ]
        # Push modes without `__enter__`, whose effects belong to the caller's thread.
        self._modes = [
            *((_push_mode, _pop_mode, mode) for mode in _get_current_function_mode_stack()),
            *(
                (dispatching._push_mode, dispatching._pop_mode, mode)
                for mode in dispatching._get_current_dispatch_mode_stack()
            ),
        ]

    def run(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Call a function in this thread with these settings."""
        # Copy it: only one thread at a time may run within a context. Use no lambda: after an
        # error, its cells would keep the arguments alive even once the frames are cleared.
        return self._context.copy().run(self._run, function, args)

    def _run(self, function: Callable[..., _Result], args: tuple[object, ...]) -> _Result:
        for setting in self._set:
            setting()
        with contextlib.ExitStack() as stack:
            for enter in self._enter:
                stack.enter_context(enter())
            for push, pop, mode in self._modes:
                push(mode)
                stack.callback(pop)
            return function(*args)


def _current_devices_and_streams(devices: Iterable[torch.device]) -> Iterator[Callable[[], object]]:
    modules = {d: torch.get_device_module(d.type) for d in devices if d.type != "cpu"}
    for device, module in modules.items():
        if hasattr(module, "set_stream"):
            yield functools.partial(module.set_stream, module.current_stream(device))
    # Devices come after streams: setting a stream makes its device current.
    for module in dict.fromkeys(modules.values()):
        if hasattr(module, "current_device"):
            yield functools.partial(module.set_device, module.current_device())


def _autocast(kind: str) -> Callable[[], contextlib.AbstractContextManager[object]]:
    dtype, caching = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    return functools.partial(torch.autocast, kind, dtype, True, caching)
