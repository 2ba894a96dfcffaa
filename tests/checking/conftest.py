"""Models to check: spread over the devices of `machine`, for one test to change as it likes."""

import pytest
from model_classes import BRIDGE

LIES = {"": 0, **{f"blocks.{layer}": device for layer, device in enumerate((0, 1, 2, 2, 3))}}


@pytest.fixture
def model(model_class, machine, request):
    """A folded Llama over four devices; each version of TransformerLens would spread it otherwise.

    Block 2 is on `device(2)`.
    """
    if model_class == BRIDGE:
        return request.getfixturevalue("boot")("llama", compatible=True, device_map=LIES)
    return request.getfixturevalue("from_pretrained")("llama", n_devices=1, device_map=LIES)
