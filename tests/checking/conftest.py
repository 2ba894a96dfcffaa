"""Models to check: spread over the devices of `machine`, for one test to change as it likes."""

import pytest
from devices import device
from model_classes import BRIDGE

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if has_hooked_transformer():
    from architectures import TOYS, build_toy

LIES = {"": 0, **{f"blocks.{layer}": device for layer, device in enumerate((0, 1, 2, 2, 3))}}


@pytest.fixture
def load(machine, from_pretrained):
    """`load("gpt2", n_devices=3)`: by default over four devices. Toys are built from configs."""

    def load(name, n_devices=4, **options):
        if name in TOYS:
            return build_toy(TOYS[name](), None, device(0), n_devices)
        return from_pretrained(name, n_devices=n_devices, **options)

    return load


@pytest.fixture
def model(model_class, machine, request):
    """A folded Llama over four devices; each version of TransformerLens would spread it otherwise.

    Block 2 is on `device(2)`.
    """
    if model_class == BRIDGE:
        return request.getfixturevalue("boot")("llama", compatible=True, device_map=LIES)
    return request.getfixturevalue("load")("llama", n_devices=1, device_map=LIES)


@pytest.fixture
def unpatched(model_class, request):
    """`unpatched("gpt2", ...)`: as TransformerLens alone loads it, on the CPU."""
    return request.getfixturevalue("bridge_references" if model_class == BRIDGE else "references")


@pytest.fixture
def reference(model_class, unpatched):
    return unpatched("llama", compatible=True) if model_class == BRIDGE else unpatched("llama")
