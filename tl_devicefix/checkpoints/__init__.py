"""Sources of weights: read one component at a time, in HookedTransformer's format."""
