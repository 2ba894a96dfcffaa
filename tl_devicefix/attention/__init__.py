"""Attention by `scaled_dot_product_attention`, chosen for a model, and KV caches that grow."""
