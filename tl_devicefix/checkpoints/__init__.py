"""Where weights come from: read one component at a time, in HookedTransformer's format."""
