"""The forward of a model on several devices, whose results are at home.

A model whose processing was interrupted is refused, because its weights are mixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tl_devicefix.dispatch.carrying import bring_home, carry, is_output_read
from tl_devicefix.dispatch.mixing import allow_mixing_in_hooks, forbid_mixing_in_hooks
from tl_devicefix.dispatch.scheduler import current_run, going_to, refuse_in_run
from tl_devicefix.dispatch.user_modules import IsOwn, detach, look_through, watch
from tl_devicefix.offload.visiting import keep_resident, offload_blocks, sending_ahead
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.placement import Placement
from tl_devicefix.tracebacks import noting_mixed_devices

_HANDLES = "_tl_devicefix_handles"
_UNFINISHED = "_tl_devicefix_unfinished"

WHY_REFUSED = (
    "this model's weights are only partly processed, because that was interrupted: load the model "
    "again"
)


def align(
    model: Any,
    placement: Placement,
    brings_home: Callable[[str], bool],
    is_own: IsOwn | None = None,
) -> None:
    """Make a model run over the devices of `placement`, replacing any earlier alignment.

    A model on one device gets no hooks, unless blocks are offloaded. Outputs of the components for
    which `brings_home` is True come home; without `is_own`, users attach no modules of torch's.
    """
    unalign(model)
    if len(placement.memories) > 1:
        model.__dict__[_HANDLES] = carry(model, placement, brings_home)
        offload_blocks(model, placement.here)
        watch(model, placement.here, is_own)
        allow_mixing_in_hooks(model, placement.here)


def add_hooks(model: Any, handles: list[Any]) -> None:
    """Register hooks that `unalign` removes."""
    model.__dict__[_HANDLES] += handles


def unalign(model: Any) -> None:
    """Undo `align`."""
    for handle in model.__dict__.pop(_HANDLES, ()):
        handle.remove()
    detach(model)
    keep_resident(model)
    forbid_mixing_in_hooks(model)


def is_aligned(model: Any) -> bool:
    """Return True if the model runs over several devices, or has offloaded blocks."""
    return _HANDLES in model.__dict__


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of either class, and bring its results home, also with `stop_at_layer`.

    A patch, not a hook, because `generate` and `run_with_hooks` call `forward` directly. It runs
    within `one_forward`.
    """
    refuse_unfinished(self)
    refuse_in_run(self)
    if not is_aligned(self):
        return original(self, *args, **kwargs)
    placement: Placement = self.placement
    look_through(self, placement.here)
    run = current_run()
    with contextlib.nullcontext() if run is None else run.coming_back():
        with contextlib.ExitStack() as stack:
            stack.enter_context(noting_mixed_devices())
            if HOST in placement.memories:
                layers = kwargs.get("start_at_layer"), kwargs.get("stop_at_layer")
                stack.enter_context(sending_ahead(self, *layers))
            output = original(self, *args, **kwargs)
        if not is_output_read():
            return output
        with going_to(placement.home):
            return bring_home(output, placement.home)


@contextlib.contextmanager
def changing_weights(model: Any) -> Iterator[None]:
    """Mark the model's weights as mixed within a `with` block, and for good after an error."""
    model.__dict__[_UNFINISHED] = True
    yield
    del model.__dict__[_UNFINISHED]


def is_unfinished(model: Any) -> bool:
    """Return True if only some of the model's weights are processed."""
    return _UNFINISHED in model.__dict__


def refuse_unfinished(model: Any) -> None:
    """Refuse a model of which only some weights are processed."""
    if is_unfinished(model):
        raise RuntimeError(WHY_REFUSED)
