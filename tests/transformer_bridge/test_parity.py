"""Over n devices, a Bridge has the weights and gives the results of the unpatched one on a CPU."""

from functools import partial

import pytest
import torch
from comparison import assert_agrees, assert_bit_equal, assert_same_tensors, on_cpu
from parameters import in_turn
from runs_of_users import GREEDY
from safetensors.torch import load_model, save_model
from transformers import AutoModelForCausalLM

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

NAMES = ["llama", "qwen2", "gpt2", "gemma-2", "mixtral", "pythia"]
OTHERS = ["gemma-3", "phi", "phi-3", "bloom", "opt", "olmo-2", "mamba"]
OTHERS += ["mamba-2", "bamba", "nemotron-h", "olmo-hybrid", "mixtral"]
"""Those whose norms, attention, MLPs or layouts differ; `--full` has all (test_catalogue)."""
SPREADS = [1, 3, 4]
if has_hooked_transformer():  # TransformerLens 3.9, where few use the Bridge
    NAMES, OTHERS, SPREADS = ["llama", "gpt2", "mixtral"], ["phi-3", "bamba"], [3]

pytestmark = [
    pytest.mark.bridge(in_3=True),
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
]


@pytest.mark.parametrize(
    ("name", "compatible", "n_devices"), in_turn(NAMES, [False, True], SPREADS)
)
def test_spread_bridge_has_the_unpatched_weights_and_results(
    name, n_devices, compatible, machine, load, on_one, tokens
):
    reference = on_one(name, folded=compatible)
    bridge = load(name, folded=compatible, n_devices=n_devices)

    assert_same_tensors(on_cpu(bridge.state_dict()), on_cpu(reference.state_dict()))
    home = machine.devices[0]
    at_home = tokens.to(home)
    logits, cache = bridge.run_with_cache(at_home)
    expected, expected_cache = reference.run_with_cache(tokens)
    assert_agrees(logits, expected, home)
    assert_agrees(cache, expected_cache, home)
    assert_agrees(bridge(at_home, return_type="loss"), reference(tokens, return_type="loss"), home)


@pytest.mark.parametrize("name", OTHERS)
def test_compatibility_mode_equals_the_unpatched_release(name, machine, load, on_one, tokens):
    reference = on_one(name, folded=True)
    bridge = load(name, folded=True, n_devices=3)
    assert_same_tensors(on_cpu(bridge.state_dict()), on_cpu(reference.state_dict()))
    assert_agrees(bridge(tokens), reference(tokens), machine.devices[0])


def test_one_device_changes_no_bit(load):
    bridge, tokens = load("gpt2", device="cpu"), torch.arange(20).view(2, 10)
    _, cache = bridge.run_with_cache(tokens, return_cache_object=False)
    with tl_devicefix.disabled():
        _, expected = bridge.run_with_cache(tokens, return_cache_object=False)
    assert_bit_equal(cache, expected)


@pytest.mark.skipif(has_hooked_transformer(), reason="TransformerLens 3 starts at no other block")
def test_a_forward_that_starts_at_a_block_is_on_its_device(load, tokens):
    bridge = load("llama", n_devices=4)
    residual, seen = bridge(tokens, stop_at_layer=3), []
    hook = ("blocks.3.hook_in", lambda value, hook: seen.append(value.device))
    bridge.run_with_hooks(residual, start_at_layer=3, fwd_hooks=[hook])
    assert seen == [bridge.placement.device_of("blocks.3")] != [residual.device]


@pytest.mark.skipif(has_hooked_transformer(), reason="TransformerLens 3 starts at no other block")
@pytest.mark.parametrize(
    ("kind", "options"), in_turn(["bloom", "mamba"], [{}, {"fuse_blocks": True}])
)
def test_a_start_that_transformer_lens_ignores_is_told(kind, options, load, on_one, tokens):
    bridge, reference = load(kind, 2, **options), on_one(kind)
    residual = reference(tokens, stop_at_layer=2)
    with tl_devicefix.disabled():
        expected = reference(residual, start_at_layer=2)
    with pytest.warns(UserWarning, match="ignores start_at_layer in this architecture"):
        actual = bridge(residual.to(bridge.placement.home), start_at_layer=2)
    assert_agrees(actual, expected)


def test_a_hook_on_no_hook_point_is_not_ignored_silently(on_one, tokens):
    bridge, unknown = on_one("llama"), [("blocks.3.hook_resid_pots", print)]
    if has_hooked_transformer():  # TransformerLens 3 ignores it
        refused = partial(
            pytest.warns, UserWarning, match="no hook point .*: its hook does not run"
        )
    else:
        refused = partial(pytest.raises, KeyError, match="does not exist on this model")
    with refused():
        bridge.run_with_hooks(tokens, fwd_hooks=unknown)
    with refused(), bridge.hooks(bwd_hooks=unknown):
        pass


GENERATING = {**GREEDY, "max_new_tokens": 6}
STATE_SPACE = ["mamba", "mamba-2", "bamba", "olmo-hybrid", "qwen3-next"]
"""State space models and hybrids, which TransformerLens refuses over several devices."""
if has_hooked_transformer():
    STATE_SPACE = ["mamba", "bamba"]


def results(bridge, tokens):
    """What a Bridge gives: with hooks, cached, in gradients, and generating."""
    edit = ("blocks.3.hook_in", lambda residual, hook: residual * 1.5 + 1)
    with bridge.hooks(fwd_hooks=[edit]):
        logits, cache = bridge.run_with_cache(tokens)
    loss = bridge(tokens, return_type="loss")
    weights = [weight for weight in bridge.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    # With transformers 5.23, OLMo-Hybrid's cache is not where TransformerLens looks for it.
    is_cached = "OlmoHybrid" not in bridge.cfg.architecture
    generated = bridge.generate(tokens, **GENERATING, use_past_kv_cache=is_cached)
    return [logits, dict(cache.items()), gradients, generated]


@pytest.mark.bridge
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("name", STATE_SPACE)
def test_spread_state_space_model_gives_what_one_device_gives(name, load, on_one, machine, tokens):
    assert_agrees(results(load(name, n_devices=4), tokens), results(on_one(name), tokens))


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["mamba", "qwen3-next"])
def test_generation_with_a_cached_state_equals_without(name, load, tokens):
    """transformers 5.24 takes it by another name than a Bridge of TransformerLens 4.3 gives."""
    bridge = load(name, device="cpu")
    expected = bridge.generate(tokens, **GENERATING, use_past_kv_cache=False)
    assert_agrees(bridge.generate(tokens, **GENERATING, use_past_kv_cache=True), expected)


@pytest.mark.bridge
@pytest.mark.skipif(
    has_hooked_transformer(), reason="TransformerLens 3 also trains a bias that it adds to unembed"
)
def test_trained_weights_load_in_transformers_and_elsewhere(load, checkpoints, tokens, tmp_path):
    bridge = load("llama", n_devices=4).requires_grad_()
    bridge(tokens, return_type="loss").backward()
    torch.optim.SGD(bridge.parameters(), lr=0.5).step()
    logits = bridge(tokens).detach().cpu()

    weights = bridge.original_model.state_dict()
    weights = {name.replace("._original_component", ""): w.cpu() for name, w in weights.items()}
    hf_model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    assert not torch.allclose(hf_model(tokens).logits, logits)
    assert not hf_model.load_state_dict(weights, strict=False).missing_keys
    hf_model.save_pretrained(tmp_path)
    assert_agrees(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, logits)

    save_model(bridge, str(tmp_path / "of_the_bridge"))
    other = load("llama", device="cpu")
    load_model(other, str(tmp_path / "of_the_bridge"))
    assert_agrees(other(tokens), logits)
