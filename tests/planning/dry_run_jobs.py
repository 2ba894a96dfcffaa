"""Jobs of dry runs, and of a model with values beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

Job = Callable[[Any], Any]
TOKENS = torch.arange(18).reshape(2, 9) % 30 + 5
TINY = transformers.GPT2Config(n_layer=4, n_embd=8, n_head=2, vocab_size=11, n_positions=16)
NAME: Any = "gpt2" if has_hooked_transformer() else TINY
"""A model that needs no network: a HookedTransformer by its name, or a Bridge by its config."""
a_bridge_by_name = pytest.mark.skipif(
    has_hooked_transformer(), reason="names are loaded as a TransformerBridge in TransformerLens 4"
)


def forward(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS)


def keep_all(model: Any) -> Any:
    with torch.no_grad():
        return model.run_with_cache(TOKENS)


def generate(model: Any) -> None:
    model.generate(TOKENS.to(model.cfg.device), max_new_tokens=3, stop_at_eos=False, verbose=False)


def backward(model: Any) -> None:
    model(TOKENS, return_type="loss").backward()


def steer(model: Any) -> Any:
    vector = torch.ones(model.cfg.d_model, device=model.cfg.device)
    hook = ("blocks.4.hook_resid_post", lambda activation, hook: activation + vector)
    with torch.no_grad():
        return model.run_with_hooks(TOKENS, fwd_hooks=[hook])


def analyse(model: Any) -> Any:
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        return cache.accumulated_resid(apply_ln=True), cache.stack_head_results(), model.W_Q


def fold(bridge: Any) -> Any:
    """A Bridge's, which is booted before it is folded."""
    bridge.enable_compatibility_mode()
    return forward(bridge)


JOBS = (forward, keep_all, generate, backward, steer)
CASES: list[tuple[str, int, Job]] = [("llama", 1, generate), *(("llama", 3, job) for job in JOBS)]
"""An architecture, over how many devices, and what is done with it."""
if has_hooked_transformer():
    CASES += [("llama", 3, analyse), ("gpt2", 3, analyse), ("pythia", 3, backward)]
    CASES += [("gpt2", 1, keep_all), ("gemma-2", 3, keep_all)]
else:
    CASES += [("llama", 3, fold)]
    CASES += [(n, 3, job) for n in ("gpt2", "gemma-2", "pythia") for job in (keep_all, fold)]


def n_transfers(transfers: Iterable[Any]) -> int:
    """How many there are; a Bridge's without those of tokens.

    These accelerate takes by way of a device that it takes by chance.
    """
    least = 0 if has_hooked_transformer() else 2 * TOKENS.nbytes
    return sum(item.bytes > least for item in transfers)


def peaks_of(machine: Any, run: Callable[[], Any]) -> list[int]:
    """What each device had at most while something ran and its result was kept."""
    devices = range(len(machine.devices))
    for index in devices:
        machine.reset_peak_memory_stats(index)
    _kept = run()
    return [machine.max_memory_allocated(index) for index in devices]
