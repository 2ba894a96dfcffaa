"""Where each component lives: the value `Placement`, deciding it, and what decides it.

And a worker a device, for what is done to each component where it lives.
"""
