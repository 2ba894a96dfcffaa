"""Several simulated devices on one CPU, for tests and rehearsals.

``with simulate(4) as machine:`` offers devices ``sim:0`` to ``sim:3``. Every operation runs on
the CPU, so its numbers are the CPU's; what is simulated is the placement: mixed devices raise,
transfers are recorded, and memory is accounted for on each device.

Read in this order: ``machine`` and ``transfers`` (what is measured), ``sites`` (of which host a
device is), ``tensor`` (how an operation runs; without values, ``known_shapes``), ``backend`` (how
torch learns of the device type; with ``autocasting``), ``session`` (entering and leaving; with
``generators``).
With ``asynchronous=True``, devices run behind the host: ``asynchronous`` (what becomes of an
operation), ``giving`` (how it is given to a device), ``queues`` (the threads that run them),
``geometry`` (what the host knows before), ``ordering`` (what is ordered after what, and races),
``device_memory`` and ``pool`` (memory), ``pinned`` (the host's), ``streams`` (what torch code sees
of it). Where they take time: ``speed`` (how long), ``timeline`` (what took time, and when),
``drawing`` (its picture).
"""

from tl_devicefix.simulation.machine import Machine
from tl_devicefix.simulation.ordering import RaceError
from tl_devicefix.simulation.session import simulate, simulate_apart
from tl_devicefix.simulation.timeline import Busy, Timeline, draw, labelled
from tl_devicefix.simulation.transfers import Moved, Transfer, Transfers, by_pair

__all__ = [
    "Busy",
    "Machine",
    "Moved",
    "RaceError",
    "Timeline",
    "Transfer",
    "Transfers",
    "by_pair",
    "draw",
    "labelled",
    "simulate",
    "simulate_apart",
]
