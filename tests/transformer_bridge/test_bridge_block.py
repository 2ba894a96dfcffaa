"""A block that nobody listens in runs transformers' own layer, with the Bridge's results."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pkgutil
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from comparison import assert_agrees
from hf_models import N_LAYERS, padded
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

import tl_devicefix
from tl_devicefix.dispatch import stand_ins
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.transformer_bridge import unwrapping
from tl_devicefix.transformer_bridge.block import why_installed

pytestmark = [
    pytest.mark.skipif(has_hooked_transformer(), reason="a Bridge of TransformerLens 4"),
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
    pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale:UserWarning"),
]

Run = Callable[[Any], Any]


def ways(bridge: Any) -> list[str | None]:
    return [why_installed(block) for block in bridge.blocks]


def assert_as_unpatched(bridge: Any, run: Run, tolerance: float = 0) -> None:
    """A run gives what it gives unpatched, also after a block has run either way."""
    with tl_devicefix.disabled():
        expected = run(bridge)
    for _ in range(2):
        assert_agrees(run(bridge), expected, tolerance=tolerance)


def of_tokens(tokens: torch.Tensor, **options: Any) -> Run:
    return lambda bridge: bridge(tokens, **options)


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "pythia", "bloom", "gemma-2", "gpt-oss"])
def test_loss_and_gradients_are_the_bridge_s(
    name: str, compatible: bool, boot: Any, tokens: torch.Tensor
) -> None:
    bridge = boot(name, device="cpu", compatible=compatible)

    def run(bridge: Any) -> Any:
        bridge.zero_grad(set_to_none=True)
        loss = bridge(tokens, return_type="loss")
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in bridge.parameters())]

    assert_as_unpatched(bridge, run, tolerance=1e-6)
    assert ways(bridge) == [None] * N_LAYERS


@pytest.mark.parametrize("name", ["pythia", "bloom"])
def test_gradients_after_a_first_forward_in_inference_mode(
    name: str, boot: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwrapping, "_orders", {})
    bridge = boot(name, device="cpu")
    with torch.inference_mode():
        expected = bridge(tokens)

    actual = bridge(tokens)
    actual.sum().backward()

    assert_agrees(actual, expected, tolerance=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sixteen_bits(name: str, boot: Any, tokens: torch.Tensor) -> None:
    assert_as_unpatched(boot(name, device="cpu", dtype=torch.bfloat16), of_tokens(tokens))


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda block: block.attn.hook_z.add_hook(lambda z, hook: z * 2),
    "backward": lambda block: block.attn.hook_z.add_hook(lambda z, hook: None, dir="bwd"),
    "torch's, before": lambda block: block.ln1.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "torch's, of transformers'": lambda block: block.mlp.original_component.register_forward_hook(
        lambda module, x, output: output * 2
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_come_and_go(kind: str, boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")
    before = bridge(tokens)
    with tl_devicefix.disabled():
        handle = HOOKS[kind](bridge.blocks[1])
        expected = bridge(tokens)

    assert_agrees(bridge(tokens), expected, tolerance=0)
    assert "has hooks" in ways(bridge)[1]
    assert [ways(bridge)[0], *ways(bridge)[2:]] == [None] * (N_LAYERS - 1)
    if handle is None or not hasattr(handle, "remove"):
        bridge.reset_hooks()
    else:
        handle.remove()
    assert_agrees(bridge(tokens), before, tolerance=0)
    assert ways(bridge) == [None] * N_LAYERS


def double(activation: torch.Tensor, hook: Any) -> torch.Tensor:
    return activation * 2


@torch.no_grad()
def test_a_hook_that_adds_one_to_a_later_block(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")

    def run(bridge: Any) -> Any:
        def add(residual: torch.Tensor, hook: Any) -> None:
            bridge.blocks[3].attn.hook_z.add_hook(double)

        try:
            return bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_pre", add)])
        finally:
            bridge.reset_hooks()

    assert_as_unpatched(bridge, run)
    assert not torch.equal(run(bridge), bridge(tokens))


class Doubled(HookPoint):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def a_module_in_a_hook_point_s_place(bridge: Any) -> None:
    bridge.blocks[1].mlp.hook_out = Doubled()


def a_forward_of_its_own(bridge: Any) -> None:
    own = bridge.blocks[1].mlp.forward
    vars(bridge.blocks[1].mlp)["forward"] = lambda *args: own(*args) * 2


def a_weight_edited_in_place(bridge: Any) -> None:
    bridge.blocks[1].attn.q.weight.data *= 2


def a_weight_that_is_another(bridge: Any) -> None:
    layer = bridge.blocks[1].mlp.out.original_component
    layer.weight = torch.nn.Parameter(layer.weight * 2)


def a_layer_that_is_another(bridge: Any) -> None:
    out = bridge.blocks[1].mlp.out
    out.set_original_component(copy.deepcopy(out.original_component))
    a_weight_edited_in_place(bridge)


def a_component_that_is_another_module(bridge: Any) -> None:
    bridge.blocks[1].attn._modules["o"] = torch.nn.Identity()


def an_activation_function(bridge: Any) -> None:
    mlp = bridge.blocks[1].mlp.original_component
    setattr(mlp, "act" if hasattr(mlp, "act") else "act_fn", torch.nn.Tanh())


def another_last_block(bridge: Any) -> None:
    bridge.blocks[-1] = copy.deepcopy(bridge.blocks[-1])
    bridge.blocks[-1].attn.q.weight.data *= 2


def a_weight_of_the_unembedding(bridge: Any) -> None:
    bridge.unembed.original_component.weight = torch.nn.Parameter(bridge.unembed.weight * 2)


def a_norm_with_a_forward_of_its_own(bridge: Any) -> None:
    own = bridge.ln_final.forward
    vars(bridge.ln_final)["forward"] = lambda *args: own(*args) * 2


def hooked(name: str) -> Callable[[Any], None]:
    def hook_of(bridge: Any) -> None:
        bridge.add_hook(name, double)

    return hook_of


CHANGES = (
    *(a_module_in_a_hook_point_s_place, a_forward_of_its_own, a_weight_edited_in_place),
    *(a_weight_that_is_another, a_layer_that_is_another, an_activation_function),
    a_component_that_is_another_module,
    *(another_last_block, a_weight_of_the_unembedding, a_norm_with_a_forward_of_its_own),
    *map(hooked, ("embed.hook_out", "ln_final.hook_normalized", "unembed.hook_in")),
)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_is_seen(name: str, change: Any, boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot(name, device="cpu")
    before = bridge(tokens)

    change(bridge)

    assert not torch.equal(bridge(tokens), before)
    assert_as_unpatched(bridge, of_tokens(tokens))
    bridge.reset_hooks()
    assert_as_unpatched(bridge, of_tokens(tokens))


def exchange_dicts_of_hooks(bridge: Any) -> None:
    """The common idiom to remove all hooks."""
    for module in bridge.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()


def test_hooks_in_dicts_that_were_exchanged_after_a_forward(
    boot: Any, tokens: torch.Tensor
) -> None:
    bridge = boot("gpt2", device="cpu", compatible=True)
    before = bridge(tokens)
    exchange_dicts_of_hooks(bridge)

    def cached_and_ablated(bridge: Any) -> Any:
        _, cache = bridge.run_with_cache(tokens)
        hooks = [("blocks.0.hook_mlp_out", lambda value, hook: value * 0)]
        return [len(cache), bridge.run_with_hooks(tokens, fwd_hooks=hooks)]

    assert_as_unpatched(bridge, cached_and_ablated)
    assert not torch.equal(cached_and_ablated(bridge)[1], before)


def by_forward_of_hook_point(bridge: Any) -> None:
    bridge.blocks[1].hook_out.forward = lambda value: value * 2


def by_class_of_wrapper(bridge: Any) -> None:
    class Doubled(type(bridge.blocks[1].mlp)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 2

    bridge.blocks[1].mlp.__class__ = Doubled


def by_class_of_hook_point(bridge: Any) -> None:
    class Doubled(HookPoint):
        def forward(self, value: Any) -> Any:
            return value * 2

    bridge.blocks[1].mlp.hook_out.__class__ = Doubled


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize(
    "change", [by_forward_of_hook_point, by_class_of_wrapper, by_class_of_hook_point]
)
def test_parts_that_are_exchanged_after_a_forward(
    change: Callable[[Any], None], compatible: bool, boot: Any, tokens: torch.Tensor
) -> None:
    bridge = boot("llama", device="cpu", compatible=compatible)
    before = bridge(tokens)
    change(bridge)

    assert not torch.equal(bridge(tokens), before)
    assert_as_unpatched(bridge, of_tokens(tokens), tolerance=1e-6 if compatible else 0)


def times(factor: float, function: Any) -> Any:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        is_tuple = isinstance(output, tuple)
        return (output[0] * factor, *output[1:]) if is_tuple else output * factor

    return scaled


OF_BRIDGE = "transformer_lens.model_bridge.generalized_components:"
OF_LLAMA = "transformers.models.llama.modeling_llama:"
REPLACED = {
    f"{OF_BRIDGE}GatedMLPBridge.forward": True,
    f"{OF_BRIDGE}LinearBridge.forward": True,
    f"{OF_BRIDGE}RMSNormalizationBridge.forward": True,
    f"{OF_BRIDGE}PositionEmbeddingsAttentionBridge.forward": True,
    "transformer_lens.hook_points:HookPoint.forward": True,
    f"{OF_LLAMA}LlamaAttention.forward": False,
    f"{OF_LLAMA}eager_attention_forward": False,
}
"""Functions, and whether a Bridge as installed calls them."""


@pytest.mark.parametrize("path", REPLACED)
@pytest.mark.parametrize("by_hook", [False, True], ids=["before", "by a hook"])
def test_a_function_that_is_replaced_after_a_forward(
    path: str, by_hook: bool, boot: Any, tokens: torch.Tensor
) -> None:
    bridge = boot("llama", device="cpu")
    before = bridge(tokens)
    owner, _, name = path.replace(":", ".").rpartition(".")
    owner = pkgutil.resolve_name(
        path.rpartition(".")[0] if "." in path.partition(":")[2] else owner
    )

    def replaced(bridge: Any) -> Any:
        with contextlib.ExitStack() as stack:

            def replace(*_: Any, **__: Any) -> None:
                patch = mock.patch.object(owner, name, times(2, getattr(owner, name)))
                stack.enter_context(patch)

            if not by_hook:
                replace()
            hooks = [("blocks.0.hook_out", replace)] * by_hook
            return bridge.run_with_hooks(tokens, fwd_hooks=hooks)

    assert torch.equal(replaced(bridge), before) != REPLACED[path]
    assert_as_unpatched(bridge, replaced)
    assert_as_unpatched(bridge, of_tokens(tokens))


def test_a_function_that_a_wrapper_imports_as_it_runs(boot: Any, tokens: torch.Tensor) -> None:
    """Of Llama's module, which a Bridge's attention takes for other models too."""
    bridge = boot("qwen3", device="cpu")
    before = bridge(tokens)

    def replaced(bridge: Any) -> Any:
        owner = pkgutil.resolve_name("transformers.models.llama.modeling_llama")
        rotate = owner.apply_rotary_pos_emb
        with mock.patch.object(
            owner, "apply_rotary_pos_emb", lambda q, k, *a, **b: rotate(q * 2, k, *a, **b)
        ):
            return bridge(tokens)

    assert_as_unpatched(bridge, replaced)
    assert not torch.equal(replaced(bridge), before)


@pytest.mark.parametrize("compatible", [False, True])
def test_a_partialmethod_in_place_of_a_layer_s_before_the_first_forward(
    compatible: bool, boot: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = boot("llama", device="cpu", compatible=compatible)
    attention = pkgutil.resolve_name(f"{OF_LLAMA}LlamaAttention")
    doubled = times(2, attention.forward)
    monkeypatch.setattr(stand_ins, "_known", {})
    monkeypatch.setattr(attention, "forward", functools.partialmethod(doubled))

    assert_as_unpatched(bridge, of_tokens(tokens), tolerance=1e-6 if compatible else 0)


def test_a_component_that_is_exchanged_where_the_bridge_has_processed_weights(
    boot: Any, tokens: torch.Tensor
) -> None:
    """Whose `weight` it takes then."""
    bridge = boot("llama", device="cpu", compatible=True)
    gated = bridge.blocks[1].mlp
    gated._modules["in"] = torch.nn.Sequential(gated._modules["in"])

    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'weight'"):
        bridge(tokens)


def test_a_wrapped_module_s_own_forward_where_the_bridge_has_processed_weights(
    boot: Any, tokens: torch.Tensor
) -> None:
    """Which computes with these, and does not call it."""
    bridge = boot("llama", device="cpu", compatible=True)
    bridge.blocks[1].mlp.out.original_component.forward = lambda x: x.new_zeros(1)

    assert_as_unpatched(bridge, of_tokens(tokens), tolerance=1e-6)


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Bridge's wrappers that run."""
    ran: list[str] = []
    call = torch.nn.Module.__call__

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
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
def test_no_wrapper_runs_in_which_nobody_listens(
    compatible: bool, attends: str, boot: Any, tokens: torch.Tensor, wrappers: list[str]
) -> None:
    bridge, implementations = boot("llama", device="cpu", compatible=compatible), []
    tl_devicefix.set_attn_implementation(bridge, attends)

    def listen(residual: torch.Tensor, hook: Any) -> torch.Tensor:
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
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_padding_and_masks(name: str, compatible: bool, boot: Any, tokens: torch.Tensor) -> None:
    """In compatibility mode, a query that sees no key gets nothing, and else a mean."""
    bridge = boot(name, device="cpu", compatible=compatible)
    n_tokens = tokens.shape[1]
    of_pairs = torch.ones(len(tokens), 1, n_tokens, n_tokens, dtype=torch.bool).tril()
    of_pairs[0, :, :, 0] = False

    def run(bridge: Any) -> Any:
        return [
            bridge(tokens, attention_mask=mask)
            for mask in (padded(tokens), *([of_pairs] if name != "mistral" else []))
        ]

    assert_as_unpatched(bridge, run)


@torch.no_grad()
@pytest.mark.cover
@pytest.mark.parametrize("listens", ["", "blocks.1.hook_out", "attn.hook_pattern"])
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "phi-3"])
def test_tokens_behind_a_kv_cache_are_as_without(
    name: str, compatible: bool, listens: str, boot: Any, tokens: torch.Tensor
) -> None:
    """transformers 5.24 gives it by another name than a Bridge of TransformerLens 4.3 reads."""
    bridge = boot(name, device="cpu", compatible=compatible)
    hooks = [(lambda point: bool(listens) and point.endswith(listens), lambda value, hook: None)]

    with bridge.hooks(fwd_hooks=hooks):
        _, cache = bridge(tokens, return_type="logits_and_cache")
        actual = bridge(tokens[:, :3], past_key_values=cache)

    expected = bridge(torch.cat([tokens, tokens[:, :3]], dim=1))[:, -3:]
    assert_agrees(actual, expected)


@torch.no_grad()
def test_parts_of_a_forward(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")

    def run(bridge: Any) -> Any:
        residual = bridge(tokens, stop_at_layer=2)
        by_itself = bridge.blocks[1](residual)[0]
        recorded = bridge.original_model(tokens, output_hidden_states=True).hidden_states
        return residual, bridge(residual, start_at_layer=2), by_itself, recorded

    assert_as_unpatched(bridge, run)


def test_dropout_in_training(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("gpt2", device="cpu").train()

    def run(bridge: Any) -> Any:
        torch.manual_seed(0)
        return bridge(tokens)

    assert_as_unpatched(bridge, run)
    assert ways(bridge) == ["it applies dropout in training"] * N_LAYERS
    bridge.eval()
    assert ways(bridge) == [None] * N_LAYERS


@torch.no_grad()
def test_a_bridge_around_a_model_that_attends_by_sdpa(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")
    bridge.original_model.config._attn_implementation = "sdpa"

    assert_as_unpatched(bridge, of_tokens(tokens))
    assert all("asks for 'sdpa'" in str(why) for why in ways(bridge))


@torch.no_grad()
def test_copies_and_views_have_layers_of_their_own(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("gpt2", device="cpu")
    expected = bridge(tokens)
    copied = copy.deepcopy(bridge)
    a_weight_edited_in_place(copied)

    def run(view: Any, tokens: torch.Tensor) -> torch.Tensor:
        assert ways(view) == [None] * N_LAYERS
        return view(tokens)

    assert_agrees(
        list(tl_devicefix.pipeline_map(bridge, run, [tokens] * 3)), [expected] * 3, tolerance=0
    )
    assert not torch.equal(copied(tokens), expected)
    assert_as_unpatched(copied, of_tokens(tokens))


@torch.no_grad()
def test_a_bridge_with_hooks_that_hold_it_is_let_go(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("gpt2", device="cpu")
    bridge.blocks[0].attn.hook_z.add_hook(lambda z, hook: bridge and None, is_permanent=True)
    bridge(tokens)
    block = weakref.ref(bridge.blocks[1])

    del bridge
    gc.collect()

    assert block() is None


@torch.no_grad()
@pytest.mark.parametrize("max_memory", [None, {"cpu": 2**30, "sim:0": 30_000, "sim:1": 30_000}])
def test_over_several_devices(
    max_memory: Any, boot: Any, machine: Any, references: Any, tokens: torch.Tensor
) -> None:
    n_devices = len(machine.devices) if max_memory is None else None
    bridge = boot("gpt2", n_devices=n_devices, max_memory=max_memory)

    actual = bridge(tokens.to("sim:0"))

    assert ways(bridge) == [None] * N_LAYERS
    assert_agrees(actual, references("gpt2")(tokens), machine.devices[0], tolerance=0)


def test_router_logits_that_a_config_asks_for_are_recorded_on_several_devices(
    boot: Any, machine: Any, references: Any, tokens: torch.Tensor
) -> None:
    """transformers makes a loss of them, which a Bridge gives to nobody."""
    bridge = boot("mixtral", n_devices=len(machine.devices))
    bridge.original_model.config.output_router_logits = True

    with torch.no_grad():
        assert_agrees(bridge(tokens).cpu(), references("mixtral")(tokens), tolerance=0)


@pytest.mark.parametrize(("part", "setting"), [("ln2", "variance_epsilon"), ("attn", "scaling")])
def test_settings_changed_on_several_devices_count(
    part: str, setting: str, boot: Any, machine: Any, tokens: torch.Tensor
) -> None:
    bridge, alone = boot("llama", n_devices=len(machine.devices)), boot("llama", device="cpu")
    results = []
    with torch.no_grad():
        for changed in (bridge, alone):
            before = changed(tokens)
            setattr(getattr(changed.blocks[-1], part).original_component, setting, 1.0)
            results.append(changed(tokens).cpu())
            assert not torch.equal(results[-1], before.cpu())

    assert torch.equal(*results)
