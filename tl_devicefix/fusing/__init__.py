"""Fused blocks: after `fuse_blocks(model)`, each runs as one function of its weights."""
