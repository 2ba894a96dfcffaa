"""Whole models on simulated devices: TransformerLens, transformers, accelerate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tl_devicefix.simulation import simulate

transformer_lens = pytest.importorskip("transformer_lens")


@pytest.fixture
def hooked():
    config = transformer_lens.HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=16,
        d_head=4,
        n_heads=4,
        d_vocab=20,
        act_fn="gelu_new",
        device="cpu",
        seed=0,
    )
    return transformer_lens.HookedTransformer(config).eval()


@pytest.fixture
def tokens():
    return torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))


def move(model, device):
    # Not the model's own `to`, which is a subject of this package.
    torch.nn.Module.to(model, device)
    model.cfg.device = device


def test_a_hooked_transformer_computes_what_it_does_on_the_cpu(hooked, tokens):
    expected, expected_cache = hooked.run_with_cache(tokens)
    with simulate(2):
        move(hooked, "sim:1")
        logits, cache = hooked.run_with_cache(tokens.to("sim:1"))
        assert logits.device == torch.device("sim:1")
        assert torch.equal(logits.cpu(), expected)
        assert all(torch.equal(cache[name].cpu(), expected_cache[name]) for name in expected_cache)


def test_the_gradients_of_a_hooked_transformer_are_those_of_the_cpu(hooked, tokens):
    hooked(tokens, return_type="loss").backward()
    expected = {name: p.grad for name, p in hooked.named_parameters() if p.grad is not None}
    hooked.zero_grad()
    with simulate(2):
        move(hooked, "sim:1")
        hooked(tokens.to("sim:1"), return_type="loss").backward()
        for name, parameter in hooked.named_parameters():
            if name in expected:
                assert torch.equal(parameter.grad.cpu(), expected[name]), name


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 5}])
def test_a_hooked_transformer_generates_what_it_does_on_the_cpu(hooked, tokens, sampling):
    # TransformerLens 2 wants a tokenizer, which it does not use here.
    hooked.tokenizer = SimpleNamespace(
        bos_token_id=-1, eos_token_id=-1, pad_token_id=-1, padding_side="right"
    )

    def generate(prompt):
        torch.manual_seed(0)
        return hooked.generate(
            prompt,
            max_new_tokens=4,
            stop_at_eos=False,
            use_past_kv_cache=True,
            return_type="tokens",
            verbose=False,
            **sampling,
        )

    expected = generate(tokens)
    with simulate(2):
        move(hooked, "sim:1")
        generated = generate(tokens.to("sim:1"))
        assert generated.device == torch.device("sim:1")
        assert torch.equal(generated.cpu(), expected)


def tiny_model(family, attention):
    torch.manual_seed(0)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
        )
    else:
        config = GPT2Config(
            vocab_size=20,
            n_embd=16,
            n_layer=4,
            n_head=4,
            n_positions=16,
            bos_token_id=1,
            eos_token_id=2,
        )
    config._attn_implementation = attention
    model = LlamaForCausalLM(config) if family == "llama" else GPT2LMHeadModel(config)
    return model.eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_transformers_model_computes_what_it_does_on_the_cpu(family, attention, tokens):
    model = tiny_model(family, attention)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    expected = model(tokens, attention_mask=mask).logits
    with simulate(2):
        model.to("sim:1")
        logits = model(tokens.to("sim:1"), attention_mask=mask.to("sim:1")).logits
        assert torch.equal(logits.cpu(), expected)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            model(tokens)


def test_accelerate_dispatches_a_model_over_the_devices(tokens):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama", "sdpa")
    expected = model(tokens).logits
    device_map = {f"model.layers.{i}": f"sim:{i}" for i in range(4)}
    device_map |= {"model.embed_tokens": "sim:0", "model.rotary_emb": "sim:0"}
    device_map |= {"model.norm": "sim:3", "lm_head": "sim:3"}
    with simulate(4) as machine:
        accelerate.dispatch_model(model, device_map, main_device="sim:0")
        assert all(machine.memory_allocated(index) > 0 for index in range(4))
        machine.reset_transfers()
        logits = model(tokens.to("sim:0")).logits
        assert torch.equal(logits.cpu(), expected)
        hops = {(str(t.source), str(t.target)) for t in machine.transfers}
        assert {("sim:0", "sim:1"), ("sim:1", "sim:2"), ("sim:2", "sim:3")} <= hops
