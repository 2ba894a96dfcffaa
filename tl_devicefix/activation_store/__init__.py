"""Activations of many batches: written to disk while devices compute, read back as caches."""
