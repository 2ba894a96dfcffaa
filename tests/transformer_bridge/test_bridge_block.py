"""A block that nobody listens in runs transformers' own layer, with the Bridge's results."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from hf_models import HF_CONFIGS, N_LAYERS, padded, save_checkpoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import AutoModelForCausalLM

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.transformer_bridge.block import why_installed

pytestmark = [
    pytest.mark.skipif(has_hooked_transformer(), reason="a Bridge of TransformerLens 4"),
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
    pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale:UserWarning"),
]


def ways(bridge: Any) -> list[str | None]:
    return [why_installed(block) for block in bridge.blocks]


def assert_as_unpatched(bridge: Any, run: Callable[[Any], Any], tolerance: float = 0) -> None:
    """A run gives what it gives unpatched, also after a block has run either way."""
    with tl_devicefix.disabled():
        expected = run(bridge)
    for _ in range(2):
        assert_agrees(run(bridge), expected, tolerance=tolerance)


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "pythia", "bloom", "gemma-2", "gpt-oss"])
def test_loss_and_gradients_are_the_bridge_s(name, compatible, boot, tokens):
    bridge = boot(name, device="cpu", compatible=compatible)

    def run(bridge):
        bridge.zero_grad(set_to_none=True)
        loss = bridge(tokens, return_type="loss")
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in bridge.parameters())]

    assert_as_unpatched(bridge, run, tolerance=1e-6)
    assert ways(bridge) == [None] * N_LAYERS


@torch.no_grad()
@pytest.mark.parametrize("name", ["pythia", "bloom"])
def test_two_bridges_as_wide_with_other_heads(name, tokens, tokenizer, tmp_path):
    for n_heads in (4, 2):
        config = HF_CONFIGS[name]()
        config.num_attention_heads = n_heads
        save_checkpoint(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path)
        bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
        assert_as_unpatched(bridge, lambda bridge: bridge(tokens), tolerance=1e-6)
        assert ways(bridge) == [None] * N_LAYERS


@pytest.mark.parametrize("name", ["pythia", "bloom"])
def test_gradients_after_a_first_forward_in_inference_mode(name, boot, tokens):
    bridge = boot(name, device="cpu")
    with torch.inference_mode():
        expected = bridge(tokens)
    actual = bridge(tokens)
    actual.sum().backward()
    assert_agrees(actual, expected, tolerance=0)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda block: block.attn.hook_z.add_hook(lambda z, hook: z * 2),
    "backward": lambda block: block.attn.hook_z.add_hook(lambda z, hook: None, dir="bwd"),
    "torch's, before": lambda block: block.ln1.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "torch's, of transformers'": lambda block: block.mlp.original_component.register_forward_hook(
        lambda module, x, output: output * 2
    ),
}


@torch.no_grad()
def test_hooks_that_come_and_go(boot, tokens):
    bridge = boot("llama", device="cpu")
    before = bridge(tokens)
    for kind, add_hook in HOOKS.items():
        with tl_devicefix.disabled():
            handle = add_hook(bridge.blocks[1])
            expected = bridge(tokens)

        assert_agrees(bridge(tokens), expected, tolerance=0)
        assert "has hooks" in ways(bridge)[1], kind
        assert [ways(bridge)[0], *ways(bridge)[2:]] == [None] * (N_LAYERS - 1)
        if handle is None or not hasattr(handle, "remove"):
            bridge.reset_hooks()
        else:
            handle.remove()
        assert_agrees(bridge(tokens), before, tolerance=0)
        assert ways(bridge) == [None] * N_LAYERS, kind


@pytest.fixture
def wrappers(monkeypatch):
    """Names of the Bridge's wrappers that run."""
    ran: list[str] = []
    call = torch.nn.Module.__call__

    def noting(self, *args, **kwargs):
        if isinstance(self, GeneralizedComponent):
            ran.append(self.name)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", noting)
    # As this by itself has all of them run.
    monkeypatch.setattr("tl_devicefix.transformer_bridge.block.why_not_now", lambda *_: None)
    return ran


@torch.no_grad()
@pytest.mark.parametrize("attends", ["eager", "sdpa"])
@pytest.mark.parametrize("compatible", [False, True])
def test_no_wrapper_runs_in_which_nobody_listens(compatible, attends, boot, tokens, wrappers):
    bridge, implementations = boot("llama", device="cpu", compatible=compatible), []
    tl_devicefix.set_attn_implementation(bridge, attends)

    def listen(residual, hook):
        implementations.append(why_installed(bridge.blocks[1]))
        return residual * 2

    hooks = [("blocks.1.hook_resid_pre", listen), ("blocks.1.hook_resid_post", listen)]
    _, cache = bridge(tokens, return_type="logits_and_cache", use_cache=True)
    bridge(tokens[:, :1], past_key_values=cache, attention_mask=torch.ones(len(tokens), 9))
    bridge.run_with_cache(tokens)
    wrappers.clear()
    bridge(tokens)
    assert wrappers == []
    bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    assert wrappers == ["model.layers.1"]  # around transformers' own layer
    assert implementations == [None, None]
    bridge(tokens)
    assert wrappers == ["model.layers.1"]


@torch.no_grad()
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.cover(("name", "compatible"))
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_padding_and_masks(name, compatible, boot, tokens):
    """In compatibility mode, a query that sees no key gets nothing, and else a mean."""
    bridge = boot(name, device="cpu", compatible=compatible)
    n_tokens = tokens.shape[1]
    of_pairs = torch.ones(len(tokens), 1, n_tokens, n_tokens, dtype=torch.bool).tril()
    of_pairs[0, :, :, 0] = False
    for mask in (padded(tokens), *([of_pairs] if name != "mistral" else [])):
        assert_as_unpatched(bridge, lambda bridge, mask=mask: bridge(tokens, attention_mask=mask))


@torch.no_grad()
@pytest.mark.cover
@pytest.mark.parametrize("listens", ["", "blocks.1.hook_out", "attn.hook_pattern"])
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_tokens_behind_a_kv_cache_are_as_without(name, compatible, listens, boot, tokens):
    """transformers 5.24 gives it by another name than a Bridge of TransformerLens 4.3 reads."""
    bridge = boot(name, device="cpu", compatible=compatible)
    hooks = [(lambda point: bool(listens) and point.endswith(listens), lambda value, hook: None)]
    with bridge.hooks(fwd_hooks=hooks):
        _, cache = bridge(tokens, return_type="logits_and_cache")
        actual = bridge(tokens[:, :3], past_key_values=cache)
    expected = bridge(torch.cat([tokens, tokens[:, :3]], dim=1))[:, -3:]
    assert_agrees(actual, expected)


@torch.no_grad()
def test_parts_of_a_forward(boot, tokens):
    bridge = boot("llama", device="cpu")

    def run(bridge):
        residual = bridge(tokens, stop_at_layer=2)
        by_itself = bridge.blocks[1](residual)[0]
        recorded = bridge.original_model(tokens, output_hidden_states=True).hidden_states
        return residual, bridge(residual, start_at_layer=2), by_itself, recorded

    assert_as_unpatched(bridge, run)


def test_dropout_in_training(boot, tokens):
    bridge = boot("gpt2", device="cpu").train()

    def run(bridge):
        torch.manual_seed(0)
        return bridge(tokens)

    assert_as_unpatched(bridge, run)
    assert ways(bridge) == ["it applies dropout in training"] * N_LAYERS
    bridge.eval()
    assert ways(bridge) == [None] * N_LAYERS


@torch.no_grad()
def test_a_bridge_around_a_model_that_attends_by_sdpa(boot, tokens):
    bridge = boot("llama", device="cpu")
    bridge.original_model.config._attn_implementation = "sdpa"
    assert_as_unpatched(bridge, lambda bridge: bridge(tokens))
    assert all("asks for 'sdpa'" in str(why) for why in ways(bridge))


@torch.no_grad()
def test_copies_and_views_have_layers_of_their_own(boot, tokens):
    bridge = boot("gpt2", device="cpu")
    expected = bridge(tokens)
    copied = copy.deepcopy(bridge)
    copied.blocks[1].attn.q.weight.data *= 2

    def run(view, tokens):
        assert ways(view) == [None] * N_LAYERS
        return view(tokens)

    results = list(tl_devicefix.pipeline_map(bridge, run, [tokens] * 3))
    assert_agrees(results, [expected] * 3, tolerance=0)
    assert not torch.equal(copied(tokens), expected)
    assert_as_unpatched(copied, lambda bridge: bridge(tokens))


@torch.no_grad()
def test_a_bridge_with_hooks_that_hold_it_is_let_go(boot, tokens):
    bridge = boot("gpt2", device="cpu")
    bridge.blocks[0].attn.hook_z.add_hook(lambda z, hook: bridge and None, is_permanent=True)
    bridge(tokens)
    block = weakref.ref(bridge.blocks[1])
    del bridge
    gc.collect()
    assert block() is None


@torch.no_grad()
@pytest.mark.parametrize("max_memory", [None, {"cpu": 2**30, "sim:0": 30_000, "sim:1": 30_000}])
def test_over_several_devices(max_memory, boot, machine, references, tokens):
    n_devices = len(machine.devices) if max_memory is None else None
    bridge = boot("gpt2", n_devices=n_devices, max_memory=max_memory)
    actual = bridge(tokens.to("sim:0"))
    assert ways(bridge) == [None] * N_LAYERS
    assert_agrees(actual, references("gpt2")(tokens), machine.devices[0], tolerance=0)


@torch.no_grad()
def test_router_logits_that_a_config_asks_for_are_recorded_on_several_devices(
    boot, machine, references, tokens
):
    """transformers makes a loss of them, which a Bridge gives to nobody."""
    bridge = boot("mixtral", n_devices=4)
    bridge.original_model.config.output_router_logits = True
    assert_agrees(bridge(tokens).cpu(), references("mixtral")(tokens), tolerance=0)


@torch.no_grad()
def test_settings_changed_on_several_devices_count(boot, machine, tokens):
    bridge, alone = boot("llama", n_devices=4), boot("llama", device="cpu")
    for part, setting in (("ln2", "variance_epsilon"), ("attn", "scaling")):
        before = bridge(tokens)
        for changed in (bridge, alone):
            setattr(getattr(changed.blocks[-1], part).original_component, setting, 1.0)
        assert not torch.equal(bridge(tokens), before)
        assert torch.equal(bridge(tokens).cpu(), alone(tokens))
