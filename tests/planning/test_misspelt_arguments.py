"""Arguments that do not exist are refused by every call, which says what may be meant."""

from __future__ import annotations

from typing import Any

import pytest
from dry_run_jobs import NAME, TINY

from tl_devicefix import dry_run, estimate
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

CALLS = {
    "estimate": lambda model, **options: estimate(model, seq_len=8, **options),
    "dry_run": lambda model, **options: dry_run(model, lambda model: None, **options),
}

hooked = pytest.mark.skipif(not has_hooked_transformer(), reason="there is no HookedTransformer")
bridged = pytest.mark.skipif(not has_bridge(), reason="there is no TransformerBridge")


@pytest.mark.parametrize("call", CALLS)
def test_a_near_miss_is_named(call: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{call} has .*'n_device'.*; did you mean 'n_devices'\?$"
    ):
        CALLS[call](NAME, n_device=4)


@pytest.mark.parametrize("call", CALLS)
@hooked
def test_a_config_says_all(call: str) -> None:
    from transformer_lens import HookedTransformerConfig

    cfg = HookedTransformerConfig(
        n_layers=1, d_model=8, n_ctx=8, d_head=4, d_vocab=9, act_fn="relu"
    )
    with pytest.raises(TypeError, match="no argument 'n_ctx' beside a config"):
        CALLS[call](cfg, n_ctx=4)


@pytest.mark.parametrize("call", CALLS)
@hooked
def test_what_the_config_depends_on_passes(call: str) -> None:
    options: dict[str, Any] = {"first_n_layers": 1, "fold_ln": False}
    # And what the hub is asked with, which it is not here.
    options |= {"revision": "main", "local_files_only": True, "token": None}

    CALLS[call]("gpt2", **options)


@pytest.mark.parametrize("call", CALLS)
@bridged
def test_a_bridge_is_meant(call: str) -> None:
    with pytest.raises(TypeError, match="'n_ctxt' for a TransformerBridge; did you mean 'n_ctx'"):
        CALLS[call](TINY, n_ctxt=4)


@pytest.mark.parametrize(
    ("misspelt", "says"),
    [
        ({"n_device": 4}, r"no argument 'n_device'; did you mean 'n_devices'\?$"),
        ({"bogus": True}, "^boot_transformers has no argument 'bogus'$"),
    ],
)
@bridged
def test_a_bridge_is_not_booted(misspelt: dict[str, Any], says: str) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    with pytest.raises(TypeError, match=says):
        TransformerBridge.boot_transformers("gpt2", **misspelt)
