"""Everything public in the installed TransformerLens gives on n devices what it gives on one.

With a TransformerBridge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
from bridge_calls import CALLS, LEFT_OUT, NEW_IN_4, REFUSED_OVER_HOSTS
from public import RESULTS, public_names
from registry import Run
from sweeping import Sweep
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import AttentionBridge
from transformer_lens.tools.analysis import JacobianLens

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is dispatched across:UserWarning"),
]

AS_BOOTED = "llama as booted"
KINDS = {"gpt2": (3,), "llama": (1, 4), AS_BOOTED: (3,)}
"""On how many devices; in compatibility mode unless it says otherwise."""
PATCHED = ("llama", 4)
"""Where `patching` is swept: it is a forward for each layer, head and position."""
WHERE_THAT_MATTERS = ("TransformerBridge.", "JacobianLens.", "analysis.")
"""What a Bridge as booted is swept for."""
if has_hooked_transformer():  # TransformerLens 3.9, where few use the Bridge
    KINDS, PATCHED = {"gpt2": (3,), AS_BOOTED: (3,)}, ("gpt2", 3)
    WHERE_THAT_MATTERS = ("JacobianLens.",)
NEEDS_SEVERAL = ("evals.ioi_eval",)
"""What hands the model tokens from the CPU, which TransformerLens 4 does not take to one device."""
PUBLIC = public_names(
    (TransformerBridge, JacobianLens, *RESULTS),
    ("patching", "head_detector", "evals", "tools.analysis", "tools.training"),
)


def test_every_public_name_is_swept_or_left_out_with_a_reason():
    assert set(PUBLIC) - CALLS.keys() - LEFT_OUT.keys() == set()
    assert CALLS.keys() & LEFT_OUT.keys() == set()


def test_what_is_compared_exists():
    """In some version; `NEW_IN_4` says which names TransformerLens 3.9.0 lacks."""
    missing = CALLS.keys() - set(PUBLIC)
    assert missing == (NEW_IN_4 if has_hooked_transformer() else set())


@pytest.fixture(scope="module")
def runs(checkpoints, tokens, request):
    """`runs("gpt2", 4)`: a Bridge over devices of a machine that is open for the whole module.

    Without a number of devices, the unpatched one on the CPU, or over hosts (`--hosts`) this
    package's own. Booted once; calls change copies.
    """

    def boot(kind, **options):
        bridge = TransformerBridge.boot_transformers(str(checkpoints(kind.split()[0])), **options)
        if kind != AS_BOOTED:
            bridge.enable_compatibility_mode()
        return bridge

    def get(kind, n_devices=None):
        if n_devices is None:
            own = request.config.getoption("--hosts")
            with contextlib.nullcontext() if own else tl_devicefix.disabled():
                return Run(boot(kind, device="cpu"), tokens, unused=boot(kind, device="cpu"))
        bridge = boot(kind, n_devices=n_devices)
        at_home = tokens.to(bridge.cfg.device)
        return Run(bridge, at_home, unused=boot(kind, n_devices=n_devices))

    with tl_devicefix.simulate(4):
        yield cache(get)


@pytest.fixture(scope="module")
def sweep(runs, request):
    return Sweep(CALLS, runs, request.config.getoption("--hosts"), REFUSED_OVER_HOSTS, unpatched)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """TransformerLens as installed, but that it reads transformers 5.24's name of a KV cache."""
    with tl_devicefix.disabled():
        update = AttentionBridge._update_kv_cache

        def knowing(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
            return update(self, *args, **{"past_key_values": cache, **kwargs})

        with mock.patch.object(AttentionBridge, "_update_kv_cache", knowing):
            yield


NOT_IN_3 = (
    # Makes a random generator on the device, and simulated ones have none.
    ("JacobianLens.occupancy", AS_BOOTED),
)
"""What is not swept on TransformerLens 3.9."""


def every_call() -> Iterator[Any]:
    """A parameter for each call, kind and number of devices."""
    for name, cases in CALLS.items():
        for case in cases if name in PUBLIC else ():
            for kind, numbers in KINDS.items():
                if name.startswith("JacobianLens.") and kind != AS_BOOTED:
                    continue  # which refuses compatibility mode
                if not name.startswith(WHERE_THAT_MATTERS) and kind == AS_BOOTED:
                    continue
                if has_hooked_transformer() and (name, kind) in NOT_IN_3:
                    continue
                for n in numbers:
                    if name.startswith("patching.") and (kind, n) != PATCHED:
                        continue
                    if name in NEEDS_SEVERAL and n == 1:
                        continue
                    yield pytest.param(name, case, kind, n)


EVERY_CALL = list(every_call())


@pytest.mark.cover(("name", "case"), ("kind", "n_devices"))
@pytest.mark.parametrize(("name", "case", "kind", "n_devices"), EVERY_CALL)
def test_it_is_as_on_one_device(name, case, kind, n_devices, runs, sweep):
    sweep.check(name, case, kind, runs(kind, n_devices))
