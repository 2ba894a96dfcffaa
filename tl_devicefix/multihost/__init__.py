"""Devices of other hosts: the script runs on rank 0, and every other rank lends it its devices.

Each device of each rank is one of a `tl_devicefix.simulation` machine, whose operations run where
the tensors are: those of rank 0 at once, those of another rank when the commands get there. Read in
this order: ``init_hosts`` (how ranks join, and what becomes of it all when one is lost),
``far_devices`` (what becomes of an operation), ``commands`` (how it is said), ``rpc_worker`` (who
does it), ``peers`` and ``transport`` (how it gets there), ``blocks`` and ``built_blocks`` (those
that are one command), ``rendezvous`` (how ranks find each other).
"""
