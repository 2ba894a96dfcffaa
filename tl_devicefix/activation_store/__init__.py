"""Activations of many batches, written to disk while devices compute, and read back as caches."""
