"""HookedTransformer across several devices: loading, processing, moving, and running it."""
