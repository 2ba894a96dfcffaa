"""Models over the devices of a machine that is open for a whole module."""

import pytest


@pytest.fixture(scope="module")
def machine(simulated):
    with simulated(4) as machine:
        yield machine


@pytest.fixture(scope="module")
def loaded():
    return {}


@pytest.fixture
def once(model_class, machine, loaded):
    """`once(over_devices, "llama")`: loaded once for the tests of a module, not to be changed."""

    def load(method, *args, **options):
        options = {**getattr(method, "keywords", {}), **options}
        name = getattr(method, "func", method).__qualname__  # `on_one` is a partial of `boot`
        key = model_class, name, args, repr(options)
        if key not in loaded:
            loaded[key] = method(*args, **options)
        loaded[key].zero_grad()
        return loaded[key]

    return load
