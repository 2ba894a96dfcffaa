"""Several simulated devices on one CPU, for tests and dry runs.

``with simulate(4) as machine:`` offers devices ``sim:0`` to ``sim:3``. Every operation runs on
the CPU, so its numbers are the CPU's; what is simulated is the placement: mixed devices raise,
transfers are recorded, and memory is accounted for on each device.

Read in this order: ``machine`` (what is measured), ``tensor``
(how an operation runs), ``operations`` (those that run otherwise), ``executor`` (what computes
them), ``geometry`` (shapes of results, without values or before there are any), ``backend`` (how
torch learns of the device type), ``backward`` (errors there), ``session`` (entering and leaving).
With ``asynchronous=True``, devices run behind the host: ``ordering`` (launches, races between them,
times), ``streams`` (as torch code sees them), ``timeline`` (what took time).
"""

from tl_devicefix.simulation.machine import Machine, Moved, Transfer, Transfers
from tl_devicefix.simulation.ordering import RaceError
from tl_devicefix.simulation.session import (
    simulate,
    simulate_apart,
    simulated_sites,
)
from tl_devicefix.simulation.timeline import Busy, Timeline, labelled

__all__ = [
    "Busy",
    "Machine",
    "Moved",
    "RaceError",
    "Timeline",
    "Transfer",
    "Transfers",
    "labelled",
    "simulate",
    "simulate_apart",
    "simulated_sites",
]
