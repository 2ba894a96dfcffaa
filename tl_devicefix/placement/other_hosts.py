"""Other hosts whose devices a placement may use, and what a load asks them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from tl_devicefix.placement.placement import Placement
from tl_devicefix.placement.sites import DEVICE_TYPE


@runtime_checkable
class OtherHosts(Protocol):
    """Hosts that `init_hosts` has joined."""

    def note_held(self, placement: Placement) -> list[int]:
        """Note what each rank holds, or will, for as long as a placement lives.

        Returns:
            The ranks, but for rank 0.
        """

    def check_checkpoint(self, model_name: str, placement: Placement, **kwargs: Any) -> None:
        """Have each rank that a placement uses compare its files of a checkpoint with rank 0's.

        Raises:
            ValueError: if one has not the same, naming the rank, what it is to hold, and the file.
        """

    def wait_for(self, placement: Placement) -> None:
        """At the end of a load, wait until each rank has done its part.

        Raises:
            RuntimeError: what failed there, as where there was no memory; or a rank is lost.
        """


def other_hosts() -> OtherHosts | None:
    """Those whose devices are in use now, if there are any."""
    module = getattr(torch, DEVICE_TYPE, None)  # there once such devices were entered
    hosts = None if module is None else module.executor()
    return hosts if isinstance(hosts, OtherHosts) else None
