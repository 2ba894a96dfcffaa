"""HookedTransformer over several devices: loading, processing, moving, and running it."""
