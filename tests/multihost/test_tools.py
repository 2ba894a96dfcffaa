"""What the package offers, and parts of blocks, over hosts as in one process."""

import copy
import threading

import pytest
import torch
import transformer_lens
from local_hosts import hosts
from packaging.version import Version
from runs_of_users import GREEDY
from torch.utils._pytree import tree_leaves

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer, installed
from tl_devicefix.multihost import worker


def _scale(x, hook):
    return x * 1.5


def _batches(tokens, n):
    return [tokens.roll(index, 1) for index in range(n)]


def mapped(model, tokens):
    def run(view, item):
        kept = []

        def keep(x, hook):
            kept.append(x)

        hooks = [("blocks.2.attn.hook_z", _scale), ("blocks.2.hook_resid_mid", keep)]
        loss = view.run_with_hooks(item, return_type="loss", fwd_hooks=hooks)
        with torch.no_grad():
            return torch.autograd.grad(loss, kept), dict(view.run_with_cache(item)[1])

    return list(tl_devicefix.pipeline_map(model, run, _batches(tokens, 6)))


def swept(model, tokens):
    points = [[(f"blocks.{layer}.hook_resid_pre", _scale)] for layer in range(5)]
    with torch.no_grad():
        return [[*tl_devicefix.sweep(model, tokens, points, batch_size=size)] for size in (1, 3)]


def fused(model, tokens):
    tl_devicefix.fuse_blocks(model)
    with torch.no_grad():
        cached = dict(model.run_with_cache(tokens)[1])
        result = model(tokens), model.generate(tokens, **GREEDY), cached
    tl_devicefix.unfuse_blocks(model)
    return result


def with_a_module_in_a_hook_points_place(model, tokens):
    block = model.blocks[3]
    name = "hook_resid_post" if has_hooked_transformer() else "hook_out"
    module = torch.nn.LayerNorm(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(block._modules, name, module)
        logits = model(tokens)
        return logits.detach(), torch.autograd.grad(logits.sum(), module.bias)


def parts_of_a_block(model, tokens):
    x, block = torch.linspace(-1, 1, 96).view(2, 3, 16), model.blocks[3]
    with torch.no_grad():
        parts = block.mlp(x), block.ln1(x)
        return (*parts, block(x), block.attn(x, x, x)) if has_hooked_transformer() else parts


MAY_FUSE = pytest.mark.skipif(
    installed() < Version("3.8"), reason="this TransformerLens has no blocks that can be fused"
)
RUNS = [mapped, swept, parts_of_a_block, with_a_module_in_a_hook_points_place]
RUNS += [pytest.param(fused, marks=MAY_FUSE)]


def assert_equal(run, alone, spread, tokens):
    expected, given = (run(load("llama"), tokens) for load in (alone, spread))
    assert tree_leaves(given)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_tools_give_over_hosts_what_one_process_gives(run, alone, spread, tokens):
    assert_equal(run, alone, spread, tokens)


@pytest.mark.skipif(
    not hasattr(transformer_lens, "model_bridge"), reason="this TransformerLens has no Bridge"
)
def test_settings_from_before_compatibility_mode_are_sent(checkpoints, host, tokens):
    boot = transformer_lens.model_bridge.TransformerBridge.boot_transformers

    def results(**where):
        model = boot(str(checkpoints("llama")), **where)
        model.set_use_attn_result(True)
        model.enable_compatibility_mode()
        return model.run_with_cache(tokens)[1]["blocks.2.attn.hook_result"]

    remote = results(device_map={"": "cpu", "blocks.2": "node-b/cpu"})
    torch.testing.assert_close(remote * 1, results(device="cpu"), rtol=1e-5, atol=1e-6)


def test_activations_of_remote_blocks_are_saved(alone, spread, tokens, tmp_path):
    name = "blocks.3.attn.hook_z"
    names = ["blocks.1.hook_resid_post", name]

    def saved(model, tokens):
        directory = tmp_path / type(model.blocks[3]).__name__
        return tl_devicefix.save_activations(
            model, _batches(tokens, 3), names, directory=directory, progress=False
        )[name][:]

    assert_equal(saved, alone, spread, tokens)


def test_a_model_over_hosts_is_checked(spread, host):
    model = spread("llama")
    host.calls.clear()
    checked = tl_devicefix.check(model)
    assert checked.well, checked
    assert host.calls == []


@pytest.mark.skipif(
    not has_hooked_transformer(),
    reason="a copied block of a TransformerBridge keeps the index of its layer",
)
def test_a_block_that_replaces_a_remote_one_stays_at_home(load, tokens):
    with hosts(node_b=1):
        model = load("llama", device_map={"": "cpu", "blocks.2": "node-b/cpu"})
        model.blocks[2] = copy.deepcopy(model.blocks[1])
        expected = model(tokens)
        assert tl_devicefix.check(model, repair=True)
        assert torch.equal(model(tokens), expected)


@pytest.fixture
def kv_cache():
    if not has_hooked_transformer():
        pytest.skip("a TransformerBridge takes transformers' KV cache instead")
    from kinds import new_kv_cache

    return lambda model: new_kv_cache(model, 2)


def test_a_frozen_kv_cache_is_used_with_gradients(kv_cache, alone, spread, tokens):
    def run(model, tokens):
        cache = kv_cache(model)
        with torch.no_grad():
            model(tokens[:, :4], past_kv_cache=cache)
        cache.freeze()
        given = [model(tokens[:, 4:end], past_kv_cache=cache).detach() for end in (5, 6)]
        cache.unfreeze()
        values = [entry.past_values for entry in cache.entries]
        with torch.no_grad():
            return *given, model(tokens[:, 4:5], past_kv_cache=cache), *values

    assert_equal(run, alone, spread, tokens)


def test_remote_kv_cache_can_be_read_copied_and_changed(kv_cache, alone, spread, tokens):
    def run(model, tokens):
        cache = kv_cache(model)
        model(tokens[:, :4], past_kv_cache=cache)
        kept = copy.copy(cache.entries[3])  # as it is now
        model(tokens[:, 4:5], past_kv_cache=cache)
        read = cache.entries[2].past_keys.clone()
        cache.entries[2].past_keys[:, 0] = 0.5
        changed = model(tokens[:, 5:6], past_kv_cache=cache)
        cache.entries[3] = kept
        of_block = model.blocks[3](torch.ones(2, 1, 16), past_kv_cache_entry=kept)
        return read, changed, kept.past_keys, of_block

    with torch.no_grad():
        assert_equal(run, alone, spread, tokens)


def test_remote_kv_cache_stays_on_its_host_and_refuses_gradients(kv_cache, spread, host, tokens):
    model = spread("llama")
    cache = kv_cache(model)
    with torch.no_grad():
        model(tokens[:, :4], past_kv_cache=cache)
        host.calls.clear()
        model(tokens[:, 4:5], past_kv_cache=cache)
    assert host.calls == ["begin"]
    cache = kv_cache(model)
    model(tokens[:, :4], past_kv_cache=cache)
    for _ in range(2):
        refused = "gradients do not pass through a KV cache of blocks on"
        with pytest.raises(RuntimeError, match=refused):
            model(tokens[:, 4:5], past_kv_cache=cache)
        for entry in cache.entries[2:4]:
            entry.past_keys.clone(), entry.past_values.clone()  # which fetches them


def test_a_view_of_a_remote_kv_cache_refuses_gradients(kv_cache, spread, tokens):
    model = spread("llama")
    cache = kv_cache(model)
    model(tokens[:, :4], past_kv_cache=cache)
    for entry in cache.entries[2:4]:
        entry.past_keys, entry.past_values = entry.past_keys[:, :4][:], entry.past_values[:]
    with pytest.raises(RuntimeError, match="gradients do not pass through a KV cache"):
        model(tokens[:, 4:5], past_kv_cache=cache)


def test_torch_settings_of_the_driver_apply_on_the_host(spread, tokens, monkeypatch):
    of_thread, told = threading.local(), []

    def put(matmul, value):
        of_thread.precision = value
        told.append(value)

    class Matmul:
        fp32_precision = property(lambda matmul: vars(of_thread).get("precision"), put)

    of_thread.precision = "high"
    monkeypatch.setattr(worker, "_MATMULS", [Matmul()])
    with torch.no_grad():
        spread("llama")(tokens)
    assert {*told} == {"high"}
