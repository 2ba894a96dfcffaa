"""Attention without a pattern: where nobody looks at scores and pattern, they are not built."""
