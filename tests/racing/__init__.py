"""A race detector: simulated devices that run behind the host, as real ones do.

    host        launch A ───── launch B ───── launch C ─────── wait for stream 1 ── write x: fine
                   │              │              │                     │
    stream 0    A writes x ── event E            │                     │
                                  │  └─ wait ──┐ │                     │
    stream 1                   B reads x       C reads x ──────────────┘
                               a race          fine: C runs after E, so after A

Within `asynchronous(n)`, `torch.get_device_module("sim")` has CUDA's streams and events. Two uses
of memory that nothing orders raise a `RaceError`, in every run, because we check the order that
the code guarantees and not the one that happened.

Not found: changes of pinned memory behind torch's back (numpy, files), or by other threads than the
one that entered; races between Python's threads, which count as one host. A backward runs on the
caller's current stream, and not on the forward's as on CUDA. Stricter than CUDA: streams may not
write different halves of one storage, and an operation whose shape needs values does not wait.
"""

from racing.machine import asynchronous
from racing.ordering import HOST, RaceError

__all__ = ["HOST", "RaceError", "asynchronous"]
