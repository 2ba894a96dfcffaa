"""Fused blocks: one function of their weights, after `fuse_blocks(model)`."""
