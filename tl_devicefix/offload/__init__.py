"""Blocks that live in host memory and visit a device while they run."""
