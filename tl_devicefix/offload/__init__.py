"""Blocks whose weights live in host memory, and are copied to a device while they run."""
