"""Where each component lives: `Placement`, and how it is decided and checked.

`workers.py` processes components where they live, with a thread for each device.
"""
