"""Models to check: spread over the devices of `machine`, for one test to change as it likes."""

import pytest

LIES = {"": 0, **{f"blocks.{layer}": device for layer, device in enumerate((0, 1, 2, 2, 3))}}


@pytest.fixture
def model(load):
    """A folded Llama over four devices; each version of TransformerLens would spread it otherwise.

    Block 2 is on `device(2)`.
    """
    return load("llama", folded=True, device_map=LIES)
