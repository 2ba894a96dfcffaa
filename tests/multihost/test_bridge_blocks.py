"""A Bridge's block of another rank that nobody looks into is run by one command, as it is here."""

from __future__ import annotations

import gc
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_models import N_LAYERS
from test_traffic import names
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.models.llama import modeling_llama

from tl_devicefix.multihost.init_hosts import Ranks
from tl_devicefix.simulation.machine import Machine

FAR = N_LAYERS - 1

Run = Callable[[Any, torch.Tensor], Any]


@pytest.fixture
def boot_over(boot: Any, machine: Machine) -> Callable[..., Any]:
    """`boot_over("llama")`: a new Bridge over four devices, half of them of the other rank."""
    return lambda name: boot(name, n_devices=4)


def n_far(bridge: Any) -> int:
    return sum(next(block.parameters()).device.index >= 2 for block in bridge.blocks)


def logits(bridge: Any, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        return bridge(tokens).cpu()


def gradients(bridge: Any, result: torch.Tensor) -> list[torch.Tensor]:
    result.backward()
    grads = [item.grad.cpu() for item in bridge.parameters() if item.grad is not None]
    bridge.zero_grad(set_to_none=True)
    return [result.detach().cpu(), *grads]


def loss_and_gradients(bridge: Any, tokens: torch.Tensor) -> Any:
    return gradients(bridge, bridge(tokens, return_type="loss"))


def gradients_through_a_cache(bridge: Any, tokens: torch.Tensor) -> Any:
    _, cache = bridge(tokens, return_type="logits_and_cache", use_cache=True)
    return gradients(bridge, bridge(tokens[:, :1], past_key_values=cache).square().sum())


def caches(bridge: Any, tokens: torch.Tensor) -> Any:
    """What a cache holds that grew thrice, longer than a window too."""
    with torch.no_grad():
        _, cache = bridge(tokens, return_type="logits_and_cache", use_cache=True)
        later = [bridge(tokens[:, n : n + 1], past_key_values=cache).cpu() for n in range(2)]
    assert isinstance(cache, DynamicCache)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    return later, lengths, [(layer.keys.cpu(), layer.values.cpu()) for layer in cache.layers]


def residual_streams(bridge: Any, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        _, cache = bridge.run_with_cache(
            tokens, names_filter=lambda name: name.endswith("hook_resid_post")
        )
    return [value.cpu() for value in cache.values()]


@pytest.mark.parametrize(
    ("run", "command"),
    [
        (loss_and_gradients, "backward"),
        (gradients_through_a_cache, "backward"),
        (caches, "call"),
        (residual_streams, "call"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "pythia", "gemma-3", "mixtral"])
def test_each_block_is_one_command_with_the_results_of_one_cpu(
    name: str,
    run: Run,
    command: str,
    boot_over: Any,
    bridge_references: Any,
    tokens: torch.Tensor,
    commands: list[Any],
) -> None:
    bridge, expected = boot_over(name), run(bridge_references(name), tokens)
    run(bridge, tokens)  # each block is tried out
    commands.clear()

    torch.testing.assert_close(run(bridge, tokens), expected)

    assert names(commands).count(command) >= n_far(bridge)
    assert names(commands).count("try_out") == 0


CHANGES: dict[str, Callable[[Any], object]] = {
    "values of a weight": lambda block: block.mlp.gate.original_component.weight.data.mul_(2),
    "a setting of a norm": lambda block: setattr(
        block.ln2.original_component, "variance_epsilon", 1.0
    ),
    "a setting of attention": lambda block: setattr(block.attn.original_component, "scaling", 1.0),
    "a module": lambda block: setattr(block.mlp.original_component, "act_fn", nn.Tanh()),
    "a module that draws": lambda block: setattr(
        block.mlp.original_component, "act_fn", nn.RReLU(0.1, 0.9).train()
    ),
    "a module that keeps something": lambda block: setattr(
        block.mlp.original_component, "act_fn", Counting()
    ),
}


class Counting(nn.Module):
    """Multiplies by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        return x * self.n_calls


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_by_hand_counts(
    what: str, boot: Any, boot_over: Any, tokens: torch.Tensor
) -> None:
    bridge, alone = boot_over("llama"), boot("llama", device="cpu")
    before = logits(bridge, tokens)
    results = []

    for changed in (bridge, alone):
        CHANGES[what](changed.blocks[FAR])
        torch.manual_seed(0)
        results.append([loss_and_gradients(changed, tokens) for _ in range(2)])

    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(logits(bridge, tokens), before)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama.LlamaMLP, "forward"),
        (F, "linear"),
        (DynamicCache, "update"),
        (modeling_llama.ALL_ATTENTION_FUNCTIONS, "eager"),
    ],
)
def test_what_is_put_into_transformers_or_torch_counts(
    of: Any,
    name: str,
    boot: Any,
    boot_over: Any,
    tokens: torch.Tensor,
    commands: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge, alone = boot_over("llama"), boot("llama", device="cpu")
    before = logits(bridge, tokens)
    is_registry = isinstance(of, MutableMapping)
    function = modeling_llama.eager_attention_forward if is_registry else getattr(of, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return tuple(item * 2 for item in result) if type(result) is tuple else result * 2

    with monkeypatch.context() as replacing:
        (replacing.setitem if is_registry else replacing.setattr)(of, name, changed)
        commands.clear()
        result = logits(bridge, tokens)
        torch.testing.assert_close(result, logits(alone, tokens))
    assert not torch.allclose(result, before)
    assert not {"call", "try_out"} & set(names(commands))  # of a rank that lacks the change

    logits(bridge, tokens)
    assert "call" in names(commands)


def test_a_cache_s_own_update_counts(boot_over: Any, boot: Any, tokens: torch.Tensor) -> None:
    results = []
    for bridge in (boot_over("llama"), boot("llama", device="cpu")):
        cache = DynamicCache()
        logits(bridge, tokens)
        update = cache.update
        cache.update = lambda keys, *args, update=update: update(2 * keys, *args)
        with torch.no_grad():
            results.append(bridge(tokens, past_key_values=cache, use_cache=True).cpu())

    torch.testing.assert_close(*results)


def test_gradients_with_checkpointing(boot_over: Any, boot: Any, tokens: torch.Tensor) -> None:
    results = []
    for bridge in (boot_over("llama"), boot("llama", device="cpu")):
        bridge.train()
        bridge.original_model.gradient_checkpointing_enable()
        results.append(loss_and_gradients(bridge, tokens))

    torch.testing.assert_close(*results)


def test_graphs_that_are_let_go_are_let_go_there(
    boot_over: Any, tokens: torch.Tensor, ranks: Ranks
) -> None:
    bridge = boot_over("llama")

    def run() -> int:
        bridge(tokens)
        loss_and_gradients(bridge, tokens)
        gc.collect()
        torch.get_device_module("sim").synchronize("sim:3")
        return len(ranks.peers[1]._owned)

    first = run()

    assert run() == run() == first


def test_a_layer_that_returns_more_runs_operation_by_operation(
    boot_over: Any, bridge_references: Any, tokens: torch.Tensor, commands: list[Any]
) -> None:
    bridge, expected = boot_over("bloom"), logits(bridge_references("bloom"), tokens)

    torch.testing.assert_close(logits(bridge, tokens), expected)

    assert "call" not in names(commands)


def test_experts_of_a_block_with_hooks_run_on_their_rank(
    boot_over: Any, bridge_references: Any, tokens: torch.Tensor
) -> None:
    def run(bridge: Any) -> Any:
        hooks = [(f"blocks.{FAR}.hook_resid_mid", lambda value, hook: value * 2)]
        with torch.no_grad():
            return bridge.run_with_hooks(tokens, fwd_hooks=hooks).cpu()

    torch.testing.assert_close(run(boot_over("mixtral")), run(bridge_references("mixtral")))
