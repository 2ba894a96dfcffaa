"""What is spread over devices is read at home: caches, stacked weights, SVD."""
