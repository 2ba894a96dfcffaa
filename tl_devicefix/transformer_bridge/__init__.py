"""TransformerBridge across several devices.

A Bridge wraps a Hugging Face model and runs its modules; a HookedTransformer defines its own.
Code that does not depend on this difference is in other packages.
"""
