"""Read at home from all devices: caches, stacked weights, SVD."""
