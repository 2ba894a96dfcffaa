"""Caches, stacked weights and SVD: tensors of all devices, read on the first one."""
