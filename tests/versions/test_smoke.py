"""The first things that users do, on the installed TransformerLens: `nox -s versions`.

Each result is compared with the same library unpatched, on one CPU.
"""

from functools import cache

import pytest
from comparison import assert_agrees
from either_class import BRIDGE

HOOK = "blocks.2.hook_resid_post"
GREEDY = {"do_sample": False, "stop_at_eos": False, "max_new_tokens": 3, "verbose": False}

pytestmark = [
    # GPT-2: LayerNorm and positions; Llama: grouped heads; Gemma 2: soft caps, windows, four norms.
    pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma-2"]),
    pytest.mark.parametrize("n_devices", [1, 4]),
]


@pytest.fixture(scope="module")
def pairs(machine, cls):
    pass
