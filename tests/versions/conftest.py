"""Models over the devices of a machine that is open for a whole module."""

from spread_of_either_class import *  # noqa: F403
