"""The forward of a model on several devices, whose results are on the first one (home).

A model whose processing was interrupted is refused: only some of its weights are processed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tl_devicefix.around import Around
from tl_devicefix.dispatch.carrying import bring_home, carry
from tl_devicefix.dispatch.mixing import pausing_modes
from tl_devicefix.dispatch.scheduler import current_run, moving_to, refuse_in_run, run_ahead
from tl_devicefix.dispatch.user_modules import WATCH, Watch, move_in_parts
from tl_devicefix.errors import noting_mixed_devices
from tl_devicefix.offload import offload_blocks, prefetching
from tl_devicefix.placement.devices import CPU
from tl_devicefix.placement.placement import Placement
from tl_devicefix.types import Model

T = TypeVar("T")
_UNFINISHED = "_tl_devicefix_unfinished"

WHY_REFUSED = (
    "this model's weights are only partly processed, since processing was interrupted: load the "
    "model again"
)


def align(model: Model, placement: Placement, brings_home: Callable[[str], bool]) -> None:
    """Make a model run across the devices of `placement`, replacing any earlier alignment.

    A model in one memory gets no hooks. A component's output comes home if `brings_home(name)` is
    True.
    """
    unalign(model)
    if len(placement.memories) > 1:
        carry(model, placement, brings_home)
        offload_blocks(model, placement.here)
        watch = model.__dict__[WATCH] = Watch()
        watch.bring_in(model, placement.here)


def unalign(model: Model) -> None:
    """Undo `align`."""
    if model.__dict__.pop(WATCH, None) is not None:
        for module in model.modules():
            Around.detach(module)


def is_aligned(model: Model) -> bool:
    """Return True if the model runs across several devices, or has offloaded blocks."""
    return WATCH in model.__dict__


def run_forward(original: Callable[..., T], self: Model, *args: object, **kwargs: Any) -> T:
    """Run the forward of either class, and bring its results home, even with `stop_at_layer`.

    The caller has entered `one_forward`.
    """
    # A torch hook would be skipped: `generate` and `run_with_hooks` call `forward` directly.
    refuse_unfinished(self)
    refuse_in_run(self)
    with pausing_modes(self):
        return _forward(original, self, *args, **kwargs)


def _forward(original: Callable[..., T], self: Model, *args: object, **kwargs: Any) -> T:
    if not is_aligned(self):
        return original(self, *args, **kwargs)
    placement: Placement = vars(self)["placement"]
    move_in_parts(self, placement.here)
    run = current_run()
    # A hook may run the model again: afterwards, the run goes on with the device it had.
    with contextlib.nullcontext() if run is None else run.preserve_device():
        with contextlib.ExitStack() as stack:
            stack.enter_context(noting_mixed_devices())
            if CPU in placement.memories:
                layers = kwargs.get("start_at_layer"), kwargs.get("stop_at_layer")
                stack.enter_context(prefetching(self, *layers, is_in_flight=run is not None))
            output = original(self, *args, **kwargs)
        ahead = run_ahead()
        if ahead is not None:
            ahead.return_home()
        with moving_to(placement.home):
            return bring_home(output, placement.home)


@contextlib.contextmanager
def changing_weights(model: Model) -> Iterator[None]:
    """Mark the weights as partly processed within a `with` block; after an error, for good."""
    model.__dict__[_UNFINISHED] = True
    yield  # no `finally`: after an error, some weights stay processed and others not
    del model.__dict__[_UNFINISHED]


def is_unfinished(model: Model) -> bool:
    """Return True if only some of the model's weights are processed."""
    return _UNFINISHED in model.__dict__


def refuse_unfinished(model: Model) -> None:
    """Refuse a model of which only some weights are processed."""
    if is_unfinished(model):
        raise RuntimeError(WHY_REFUSED)
