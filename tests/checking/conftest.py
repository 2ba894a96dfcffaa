"""A model to check, across the devices of `machine`; each test may change its own."""

import pytest

LIES = {"": 0, **{f"blocks.{layer}": device for layer, device in enumerate((0, 1, 2, 2, 3))}}


@pytest.fixture
def model(load):
    """A folded Llama across four devices, split alike on each version of TransformerLens.

    Block 2 is on `device(2)`.
    """
    return load("llama", folded=True, device_map=LIES)
