"""A race detector: simulated devices that run behind the host, as real ones do.

Within `asynchronous(n)`, `torch.get_device_module("sim")` has CUDA's streams and events, and two
uses of memory that nothing orders raise a `RaceError`, in every run: the order that the code
guarantees is checked, not the one that happened.

Not found: changes of pinned memory behind torch's back (numpy, files), or by other threads than the
one that entered; races between Python's threads, which count as one host. A backward runs on the
caller's current stream, and not on the forward's as on CUDA. Streams that write different halves of
one storage are refused, though a GPU may allow that.
"""

from racing.machine import asynchronous
from racing.ordering import RaceError

__all__ = ["RaceError", "asynchronous"]
