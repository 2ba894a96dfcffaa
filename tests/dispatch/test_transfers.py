"""What a run or an analysis copies between devices: what it must, once."""

from itertools import pairwise

import pytest
import torch
from devices import device
from hf_models import padded
from kinds import home_of
from runs_of_users import GREEDY

from tl_devicefix.dispatch.carrying import CarryTo
from tl_devicefix.fusing.one_forward import one_forward

pytestmark = pytest.mark.hooked


@pytest.fixture
def transfers_of(machine):
    """`transfers_of(f, x)` calls `f(x)` and returns the copies that it made."""

    def transfers_of(function, *args, **kwargs):
        machine.reset_transfers()
        function(*args, **kwargs)
        return list(machine.transfers)

    return transfers_of


@pytest.mark.parametrize(
    ("kind", "spread"), [("gpt2", 3), ("attention-only", 2), ("llama", 4), ("llama", "scattered")]
)
def test_a_forward_copies_the_residual_stream_once_where_it_must(
    model, tokens, at_home, transfers_of
):
    residual = torch.Size([*tokens.shape, model.cfg.d_model])
    device_of, home = model.placement.device_map, home_of(model)
    blocks = [device_of[f"blocks.{i}"] for i in range(model.cfg.n_layers)]
    # ln_final and unembed each give back what they compute at home.
    path = [home, *blocks, device_of.get("ln_final", home), home, device_of["unembed"], home]

    first = transfers_of(model, at_home)
    second = transfers_of(model, at_home)

    hops = [(source, target) for source, target in pairwise(path) if source != target]
    assert [(t.source, t.target) for t in first] == hops
    of_stream = first[:-1] if device_of["unembed"] != home else first  # without the logits
    assert all(t.shape == residual and t.bytes == 4 * residual.numel() for t in of_stream)
    assert second == first


def test_input_copied_without_grad_is_copied_again_with_grad(machine):
    bias = torch.ones(2, device=device(0), requires_grad=True)
    carry_to, block = CarryTo(torch.device(device(1))), torch.nn.Identity()
    with one_forward():
        with torch.no_grad():  # as a hook may run a block
            carry_to.pre_forward(block, (), {"shortformer_pos_embed": bias})
        _, carried = carry_to.pre_forward(block, (), {"shortformer_pos_embed": bias})
    carried["shortformer_pos_embed"].sum().backward()
    assert bias.grad is not None


@pytest.mark.parametrize(("kind", "spread"), [("llama", 4), ("gpt2", 1), ("bloom", 3)])
def test_masks_loss_and_text_add_one_copy_per_device_at_most(
    spread, model, tokens, at_home, transfers_of
):
    plain = transfers_of(model, at_home)
    with_loss = transfers_of(model, tokens, return_type="both")
    of_text = transfers_of(model, "w3 w4 w5 w6 w7 w8 w9 w10")  # and <bos>: nine tokens
    mask = padded(tokens).to(home_of(model))
    masked = transfers_of(model, at_home, attention_mask=mask)
    assert len(with_loss) == len(of_text) == len(plain) + 1
    assert (with_loss[0].target, with_loss[0].shape) == (home_of(model), tokens.shape)
    of_mask = [t for t in masked if t.shape == mask.shape]  # one for each further device
    assert len(of_mask) == len(masked) - len(plain) == spread - 1
    assert len({t.target for t in of_mask}) == spread - 1
    assert transfers_of(model.run_with_cache, at_home) == plain  # until the cache is read


@pytest.mark.parametrize("spread", [1, 4])
def test_generated_token_copies_no_more_than_a_one_token_forward(
    spread, model, at_home, transfers_of
):
    def generating(n_tokens):
        return transfers_of(model.generate, at_home, **{**GREEDY, "max_new_tokens": n_tokens})

    two, five = generating(2), generating(5)
    # The residual stream in n hops, and the growing mask: once onto each device.
    per_token = (len(five) - len(two)) / 3
    assert per_token <= 2 * spread
    residual = len(at_home) * model.cfg.d_model * 4
    mask = len(at_home) * (at_home.shape[1] + 5) * 8
    assert all(t.bytes <= max(residual, mask) for t in five[len(two) :])


def test_a_backward_copies_the_gradient_back_along_the_same_way(model, at_home, transfers_of):
    forward = transfers_of(model, at_home)
    loss = model(at_home, return_type="loss")
    backward = transfers_of(loss.backward)
    assert [(t.source, t.target, t.shape) for t in backward] == [
        (t.target, t.source, t.shape) for t in reversed(forward)
    ]


@pytest.mark.parametrize(("kind", "spread"), [("llama", 1), ("gpt2", 1)])
def test_model_on_one_device_has_no_hooks_and_no_copies(model, at_home, transfers_of):
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    _, cache = model.run_with_cache(at_home)
    assert type(cache.cache_dict) is dict
    assert transfers_of(model, at_home, return_type="loss") == []


@pytest.mark.parametrize(
    ("kind", "gather", "paths"),
    [
        ("gpt2", lambda model: model.all_composition_scores("Q"), [f"attn.W_{x}" for x in "QKVO"]),
        # Grouped heads are copied as they are, and repeated there.
        ("llama", lambda model: (model.W_K, model.W_V), ["attn._W_K", "attn._W_V"]),
    ],
)
def test_weights_that_are_gathered_are_copied_once(gather, paths, model, transfers_of):
    home = home_of(model)
    weights = [block.get_parameter(path) for block in model.blocks for path in paths]
    copied = transfers_of(gather, model)
    elsewhere = sum(weight.nbytes for weight in weights if weight.device != home)
    assert sum(t.bytes for t in copied) == elsewhere > 0
    assert {t.target for t in copied} == {home}


OF_CACHES = {
    "one activation": (lambda cache: cache["resid_post", 4], ("blocks.4.hook_resid_post",)),
    "stack_head_results": (lambda cache: cache.stack_head_results(), ("attn.hook_result",)),
    "slicing the batch": (lambda cache: cache.apply_slice_to_batch_dim(0), ()),
    "its names": (lambda cache: list(cache.keys()), ()),
    "accumulated_resid with the norm": (
        lambda cache: cache.accumulated_resid(apply_ln=True),
        ("hook_resid_pre", "blocks.4.hook_resid_post", "ln_final.hook_scale"),
    ),
}


def test_analysis_of_a_cache_copies_activations_once_no_weights(model, at_home, transfers_of):
    home = home_of(model)
    for analysis, (analyse, names) in OF_CACHES.items():
        _, cache = model.run_with_cache(at_home)
        copied = transfers_of(analyse, cache)
        stored = cache.cache_dict.stored().items()
        elsewhere = [x.nbytes for name, x in stored if x.device != home and name.endswith(names)]
        assert sum(t.bytes for t in copied) == sum(elsewhere), analysis
