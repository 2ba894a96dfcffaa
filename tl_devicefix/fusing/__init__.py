"""Blocks as one function of their weights, for a model that was fused by `fuse_blocks`."""
