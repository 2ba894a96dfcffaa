"""Running across several devices: carrying the residual stream, and hooks that mix devices."""
