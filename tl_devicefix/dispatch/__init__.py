"""Running over several devices: carrying the residual stream, and hooks that mix devices."""
