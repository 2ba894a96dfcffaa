"""TransformerBridge over several devices: what differs from HookedTransformer.

A Bridge wraps a Hugging Face model, whose modules it runs; HookedTransformer has modules of its
own. What does not depend on that (placement, gathering, simulation, checks) is shared.
"""
