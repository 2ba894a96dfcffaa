"""A block that nobody listens in runs transformers' own layer, with the Bridge's results."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from hf_models import N_LAYERS
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.transformer_bridge.block import why_installed

pytestmark = [
    pytest.mark.skipif(has_hooked_transformer(), reason="a Bridge of TransformerLens 4"),
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
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


def with_gradients(tokens: torch.Tensor) -> Run:
    def run(bridge: Any) -> Any:
        bridge.zero_grad(set_to_none=True)
        loss = bridge(tokens, return_type="loss")
        loss.backward()
        return [loss.detach(), *(each.grad for each in bridge.parameters())]

    return run


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "pythia", "bloom", "gemma-2", "gpt-oss"])
def test_loss_and_gradients_are_the_bridge_s(
    name: str, compatible: bool, boot: Any, tokens: torch.Tensor
) -> None:
    bridge = boot(name, device="cpu", compatible=compatible)

    assert_as_unpatched(bridge, with_gradients(tokens), tolerance=1e-6)
    assert ways(bridge) == [None] * N_LAYERS


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sixteen_bits(name: str, boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot(name, device="cpu", dtype=torch.bfloat16)

    assert_as_unpatched(bridge, lambda bridge: bridge(tokens))


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
    block = bridge.blocks[1]
    before = bridge(tokens)
    with tl_devicefix.disabled():
        handle = HOOKS[kind](block)
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


@torch.no_grad()
def test_hooks_of_the_residual_stream_leave_the_layer_plain(
    boot: Any, tokens: torch.Tensor
) -> None:
    bridge, said = boot("llama", device="cpu"), []

    def double(residual: torch.Tensor, hook: Any) -> torch.Tensor:
        said.append(why_installed(bridge.blocks[1]))
        return residual * 2

    hooks = [("blocks.1.hook_resid_pre", double), ("blocks.1.hook_resid_post", double)]

    def run(bridge: Any) -> Any:
        return bridge.run_with_hooks(tokens, fwd_hooks=hooks)

    assert_as_unpatched(bridge, run)
    assert said[2:] == [None] * 4


class Doubled(HookPoint):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def a_module_in_a_hook_point_s_place(block: Any) -> None:
    block.mlp.hook_out = Doubled()


def a_probe_in_a_hook_point_s_place(block: Any) -> None:
    block.mlp._modules["hook_out"] = torch.nn.Linear(16, 16)


def a_forward_of_its_own(block: Any) -> None:
    there = block.mlp.forward
    vars(block.mlp)["forward"] = lambda *args: there(*args) * 2


def a_weight_edited_in_place(block: Any) -> None:
    block.attn.q.weight.data *= 2


def a_weight_that_is_another(block: Any) -> None:
    layer = block.mlp.out.original_component
    layer.weight = torch.nn.Parameter(layer.weight * 2)


def a_dict_of_weights_that_is_another(block: Any) -> None:
    layer = block.mlp.out.original_component
    layer._parameters = {"weight": torch.nn.Parameter(layer.weight * 2), "bias": layer.bias}


def a_layer_that_is_another(block: Any) -> None:
    out = block.mlp.out
    out.set_original_component(copy.deepcopy(out.original_component))
    a_weight_edited_in_place(block)


def an_attribute(block: Any) -> None:
    block.mlp.original_component.act_fn = torch.nn.Tanh()


CHANGES = (
    *(a_module_in_a_hook_point_s_place, a_probe_in_a_hook_point_s_place, a_forward_of_its_own),
    *(a_weight_edited_in_place, a_weight_that_is_another),
    *(a_dict_of_weights_that_is_another, a_layer_that_is_another, an_attribute),
)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_is_seen(name: str, change: Any, boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot(name, device="cpu")
    before = bridge(tokens)

    if change is an_attribute and name == "gpt2":
        bridge.blocks[1].mlp.original_component.act = torch.nn.Tanh()
    else:
        change(bridge.blocks[1])

    assert not torch.equal(bridge(tokens), before)
    assert_as_unpatched(bridge, lambda bridge: bridge(tokens))


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Bridge's wrappers that run."""
    ran: list[str] = []
    there = torch.nn.Module.__call__

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, GeneralizedComponent):
            ran.append(self.name)
        return there(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", noting)
    return ran


@torch.no_grad()
@pytest.mark.parametrize("attends", ["eager", "sdpa"])
@pytest.mark.parametrize("compatible", [False, True])
def test_no_wrapper_runs_in_which_nobody_listens(
    compatible: bool, attends: str, boot: Any, tokens: torch.Tensor, wrappers: list[str]
) -> None:
    bridge = boot("llama", device="cpu", compatible=compatible)
    tl_devicefix.set_attn_implementation(bridge, attends)
    hooks = [("blocks.1.hook_resid_post", lambda residual, hook: residual * 2)]

    _, cache = bridge(tokens, return_type="logits_and_cache", use_cache=True)
    bridge(tokens[:, :1], past_key_values=cache, attention_mask=torch.ones(len(tokens), 9))
    bridge.run_with_cache(tokens)
    wrappers.clear()
    bridge(tokens)
    assert wrappers == []
    bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    assert wrappers == ["model.layers.1"]
    bridge(tokens)
    assert wrappers == ["model.layers.1"]


def a_weight_of_the_unembedding(bridge: Any) -> None:
    bridge.unembed.original_component.weight = torch.nn.Parameter(bridge.unembed.weight * 2)


def a_norm_with_a_forward_of_its_own(bridge: Any) -> None:
    there = bridge.ln_final.forward
    vars(bridge.ln_final)["forward"] = lambda *args: there(*args) * 2


def another_unembedding(bridge: Any) -> None:
    there = bridge.original_model.lm_head
    bridge.original_model.lm_head = torch.nn.Linear(*reversed(there.weight.shape))


def another_last_block(bridge: Any) -> None:
    bridge.blocks[-1] = copy.deepcopy(bridge.blocks[-1])
    a_weight_edited_in_place(bridge.blocks[-1])


def a_forward_of_the_whole(bridge: Any) -> None:
    inner, there = bridge.original_model.model, bridge.original_model.model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = there(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    inner.forward = doubled


def a_hook_of_torch_s_on_the_whole(bridge: Any) -> None:
    bridge.original_model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def double(activation: torch.Tensor, hook: Any) -> torch.Tensor:
    return activation * 2


def a_hook(name: str, bridge: Any) -> None:
    bridge.add_hook(name, double)


HOOK_POINTS = "embed.hook_out", "rotary_emb.hook_cos", "ln_final.hook_scale", "unembed.hook_in"
OUTSIDE = (
    *(a_weight_of_the_unembedding, a_norm_with_a_forward_of_its_own, another_unembedding),
    *(another_last_block, a_forward_of_the_whole, a_hook_of_torch_s_on_the_whole),
    *(
        functools.partial(lambda name, bridge: bridge.add_hook(name, double), n)
        for n in HOOK_POINTS
    ),
)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale:UserWarning")
@pytest.mark.parametrize("change", OUTSIDE, ids=lambda change: getattr(change, "__name__", "hook"))
def test_what_is_changed_outside_of_blocks_is_seen(
    change: Any, boot: Any, tokens: torch.Tensor
) -> None:
    bridge = boot("llama", device="cpu")
    before = bridge(tokens)

    change(bridge)

    assert not torch.equal(bridge(tokens), before)
    assert_as_unpatched(bridge, lambda bridge: bridge(tokens))
    bridge.reset_hooks()
    assert_as_unpatched(bridge, lambda bridge: bridge(tokens))


@torch.no_grad()
def test_a_model_that_notes_things_has_them(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")
    inner = bridge.original_model.model
    kind = type(inner)

    class Noting(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.n_forwards = vars(self).get("n_forwards", 0) + 1
            return super().forward(*args, **kwargs)

    inner.__class__ = Noting
    for _ in range(3):
        bridge(tokens)

    assert inner.n_forwards == 3


@torch.no_grad()
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_kv_cache(name: str, compatible: bool, boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot(name, device="cpu", compatible=compatible)

    def run(bridge: Any) -> Any:
        first, cache = bridge(tokens, return_type="logits_and_cache")
        return first, bridge(tokens[:, :3], past_key_values=cache)

    assert_as_unpatched(bridge, run)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_in_compatibility_mode(name: str, boot: Any, tokens: torch.Tensor) -> None:
    """There, a query that sees no key gets nothing: transformers would give it a mean."""
    bridge, mask = boot(name, device="cpu", compatible=True), torch.ones_like(tokens)
    mask[0, :3] = 0

    assert_as_unpatched(bridge, lambda bridge: bridge(tokens, attention_mask=mask))


@torch.no_grad()
def test_starting_and_stopping_at_a_layer(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")

    def run(bridge: Any) -> Any:
        residual = bridge(tokens, stop_at_layer=2)
        return residual, bridge(residual, start_at_layer=2)

    assert_as_unpatched(bridge, run)


def test_dropout_in_training(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("gpt2", device="cpu").train()

    def run(bridge: Any) -> Any:
        torch.manual_seed(0)
        return bridge(tokens)

    assert_as_unpatched(bridge, run)
    assert ways(bridge) == ["it drops out in training"] * N_LAYERS
    bridge.eval()
    assert ways(bridge) == [None] * N_LAYERS


@torch.no_grad()
def test_what_transformers_records_is_recorded(boot: Any, tokens: torch.Tensor) -> None:
    model = boot("llama", device="cpu").original_model
    with tl_devicefix.disabled():
        expected = model(tokens, output_hidden_states=True).hidden_states

    assert_agrees(model(tokens, output_hidden_states=True).hidden_states, expected, tolerance=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("compatible", [False, True])
def test_a_mask_of_each_query_and_key(
    name: str, compatible: bool, boot: Any, tokens: torch.Tensor
) -> None:
    bridge = boot(name, device="cpu")
    if compatible:
        bridge.enable_compatibility_mode()
    n_tokens = tokens.shape[1]
    mask = torch.ones(len(tokens), 1, n_tokens, n_tokens, dtype=torch.bool).tril()
    mask[0, :, :, 0] = False

    assert_as_unpatched(bridge, lambda bridge: bridge(tokens, attention_mask=mask))


@torch.no_grad()
def test_a_bridge_around_a_model_that_attends_by_sdpa(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")
    bridge.original_model.config._attn_implementation = "sdpa"

    assert_as_unpatched(bridge, lambda bridge: bridge(tokens))
    assert all("has attention be 'sdpa'" in str(why) for why in ways(bridge))


@torch.no_grad()
def test_a_block_by_itself(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("llama", device="cpu")
    stream = bridge(tokens, stop_at_layer=0)

    assert_as_unpatched(bridge, lambda bridge: bridge.blocks[1](stream)[0])


@torch.no_grad()
def test_copies_and_views_have_layers_of_their_own(boot: Any, tokens: torch.Tensor) -> None:
    bridge = boot("gpt2", device="cpu")
    expected = bridge(tokens)
    copied = copy.deepcopy(bridge)
    a_weight_edited_in_place(copied.blocks[1])

    def run(view: Any, tokens: torch.Tensor) -> torch.Tensor:
        assert ways(view) == [None] * N_LAYERS
        return view(tokens)

    assert_agrees(
        list(tl_devicefix.pipeline_map(bridge, run, [tokens] * 3)), [expected] * 3, tolerance=0
    )
    assert not torch.equal(copied(tokens), expected)
    assert_as_unpatched(copied, lambda bridge: bridge(tokens))


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
    options = (
        {"n_devices": len(machine.devices)} if max_memory is None else {"max_memory": max_memory}
    )
    bridge = boot("gpt2", **options)

    actual = bridge(tokens.to("sim:0"))

    assert ways(bridge) == [None] * N_LAYERS
    assert_agrees(actual, references("gpt2")(tokens), machine.devices[0], tolerance=0)
