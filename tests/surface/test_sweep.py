"""Everything public in the installed TransformerLens gives on n devices what it gives on one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest
from hooked_calls import CALLS, LEFT_OUT, NEW_IN_3, REFUSED_OVER_HOSTS, WITHOUT_DEVICES
from packaging.version import Version
from public import RESULTS, public_names
from registry import Run
from spread_of_either_class import *  # noqa: F403
from sweeping import Sweep
from transformer_lens import HookedTransformer

KINDS = {"gpt2": (1, 3, 4), "llama": (1, 3, 4), "phi-3": (3,)}
"""On how many devices. LayerNorm; RMSNorm with grouped-query attention; RMSNorm without."""
PUBLIC = public_names(
    (HookedTransformer, *RESULTS), ("patching", "head_detector", "evals", "train")
)


def test_every_public_name_is_swept_or_left_out_with_a_reason():
    assert set(PUBLIC) - CALLS.keys() - LEFT_OUT.keys() == set()
    assert CALLS.keys() & LEFT_OUT.keys() == set()


def test_what_is_compared_exists():
    """In some version; `NEW_IN_3` says which names TransformerLens 2.18.0 lacks."""
    missing = (CALLS.keys() | LEFT_OUT.keys()) - set(PUBLIC)
    assert missing & CALLS.keys() <= NEW_IN_3
    if Version(version("transformer_lens")) >= Version("3.9"):
        assert missing == set()


@pytest.fixture(scope="module")
def sweep(references, from_pretrained, tokens, request):
    over_hosts = request.config.getoption("--hosts")  # with this package's own on one CPU
    load = cache(lambda kind: from_pretrained(kind, device="cpu")) if over_hosts else references
    return Sweep(CALLS, lambda kind: Run(load(kind), tokens), over_hosts, REFUSED_OVER_HOSTS)


@pytest.fixture
def run(kind, n_devices, models, tokens):
    return Run(models(kind, n_devices), tokens)


REFUSED = (
    "SVDInterpreter.get_singular_vectors",
    "HookedTransformer.set_use_attn_in",
    "HookedTransformer.W_gate",
)
"""What TransformerLens itself does not do for some of the models."""

SEVERAL_AT_ONCE = pytest.mark.full("it calls those of each kind of activation, run by default")


def every_call() -> Iterator[Any]:
    """A parameter for each call, kind and number of devices."""
    for name, cases in CALLS.items():
        fails = name not in WITHOUT_DEVICES and name not in REFUSED
        is_patching = name.startswith("patching.")
        several = [SEVERAL_AT_ONCE] if is_patching and name.endswith("_every") else []
        for case in cases if name in PUBLIC else ():
            for kind, numbers in KINDS.items():
                # Patching is a forward for each layer, head and position: not everywhere.
                for n in numbers if not is_patching else (numbers[-1],):
                    marks = [pytest.mark.fails_unpatched] if fails and n > 1 else []
                    yield pytest.param(name, case, kind, n, marks=[*marks, *several])


@pytest.mark.cover(("name", "case"), ("kind", "n_devices"))
@pytest.mark.parametrize(("name", "case", "kind", "n_devices"), list(every_call()))
def test_it_is_as_on_one_device(name, case, kind, n_devices, run, sweep):
    sweep.check(name, case, kind, run)
