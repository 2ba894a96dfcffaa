"""Several simulated devices on one CPU, for tests and dry runs.

``with simulate(4) as machine:`` offers devices ``sim:0`` to ``sim:3``. Every operation runs on
the CPU, so its numbers are the CPU's. Only the placement is simulated: mixed devices raise,
transfers are recorded, and memory is accounted for on each device.

Read in this order: ``machine`` (measurements), ``executor`` (computing), ``tensor`` (how an
operation runs), ``backend`` (registration with torch), ``backward`` (errors in a backward pass),
``session`` (entering and leaving).
"""

from tl_devicefix.simulation.machine import Machine, Moved, Transfer, Transfers
from tl_devicefix.simulation.session import simulate, simulate_apart

__all__ = ["Machine", "Moved", "Transfer", "Transfers", "simulate", "simulate_apart"]
