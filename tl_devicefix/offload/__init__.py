"""Blocks that live in host memory and visit a device while they run; copies from the host to it."""
