"""Where each component lives: the value `Placement`, deciding it, and what decides it."""
