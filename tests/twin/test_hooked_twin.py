"""A load tells if a HookedTransformer would not give transformers' numbers."""

import random
import warnings
from unittest import mock

import pytest
import torch
import transformers
from accelerate import Accelerator
from hf_models import HF_CONFIGS, make_hf_model
from model_classes import HookedTransformer
from parameters import in_turn

import tl_devicefix

pytestmark = pytest.mark.hooked

ROUNDING = 1e-4
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
OTHER_NUMBERS = "gives other numbers than transformers"


@pytest.fixture
def difference(tokens):
    """The largest difference of two models' log probabilities."""

    @torch.no_grad()
    def difference(model, hf_model, tokens=tokens):
        logp = model(tokens).cpu().log_softmax(-1)
        return (logp - hf_model(tokens).logits.log_softmax(-1)).abs().max().item()

    return difference


def load(path, **options):
    return HookedTransformer.from_pretrained(path, center_unembed=False, **options)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"mlp_bias": True}),
        ("qwen2", {**WINDOWS, "layer_types": None}),
        ("bloom", {"hidden_size": 24, "n_head": 6}),  # no power of two
    ],
)
def test_load_warns_of_setting_without_a_place(save, difference, name, settings):
    path, hf_model = save(name, **settings)
    with pytest.warns(UserWarning, match=OTHER_NUMBERS) as said:
        model = load(path, n_devices=1)
    assert len([w for w in said if OTHER_NUMBERS in str(w.message)]) == 1
    assert difference(model, hf_model) > ROUNDING


def test_mismatch_is_refused_ignored_or_warned_of(save, refused, monkeypatch):
    path, _ = save("llama", attention_bias=True)
    with refused(OTHER_NUMBERS, "try from_pretrained_no_processing, or use a "):
        load(path, on_mismatch="refuse")
    monkeypatch.setenv("TL_DEVICEFIX_ON_MISMATCH", "refuse")
    with refused(OTHER_NUMBERS):
        load(path)
    with refused("on_mismatch must be 'warn', 'refuse' or 'ignore', but is 'refused'"):
        load(path, on_mismatch="refused")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(path, on_mismatch="ignore")
    monkeypatch.delenv("TL_DEVICEFIX_ON_MISMATCH")
    with pytest.warns(UserWarning, match=OTHER_NUMBERS):
        model = load(path)
    (finding,) = tl_devicefix.check(model).findings
    assert finding.kind == "numbers"
    assert OTHER_NUMBERS in finding.message
    with pytest.warns(UserWarning, match=OTHER_NUMBERS):
        tl_devicefix.dry_run(path, lambda model: None)


def test_no_setting_of_the_caller_reaches_the_twin(checkpoints, monkeypatch):
    path = str(checkpoints("llama"))
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate()
    precision = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    monkeypatch.setattr(torch, "set_rng_state", None)  # it would rewind other threads' numbers
    try:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            tl_devicefix.simulate(2),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", UserWarning)
            load(path, n_devices=2)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_twin_that_cannot_be_made_says_nothing(checkpoints, caplog):
    with mock.patch("tl_devicefix.twin._MAX_PARAMETERS", 10), caplog.at_level("INFO"):
        load(str(checkpoints("llama")))
    assert (
        "is not checked on a tiny model: ValueError: a tiny model of it would have" in caplog.text
    )


def test_twin_that_fails_by_our_own_fault_warns(checkpoints, monkeypatch):
    fault = eval("lambda *_: {}['our fault']", vars(tl_devicefix.twin))
    monkeypatch.setattr(tl_devicefix.twin, "_layers", fault)
    with pytest.warns(UserWarning, match="not compared with transformers, by a fault of tl_device"):
        load(str(checkpoints("llama")))


# --------------------------------------------------------------------------------------------
# Rotary frequencies that are scaled

SCALINGS = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.5, 1.2],
        "long_factor": [3.0, 9.0],
        "original_max_position_embeddings": 16,
    },
}
OF_LONGROPE = {"original_max_position_embeddings": 16}  # where transformers 4 looks for it


@pytest.mark.parametrize(
    ("kind", "name", "n_devices"), in_turn(SCALINGS, ["llama", "qwen2"], [1, 4])
)
def test_scaled_rotary_frequencies_are_transformers(
    save, difference, machine, name, kind, n_devices
):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    own = OF_LONGROPE if kind == "longrope" else {}
    path, hf_model = save(name, rope_parameters=scaling, rope_scaling=scaling, **own)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = load(path, n_devices=n_devices)
    assert difference(model, hf_model) < ROUNDING
    if n_devices == 1:
        rebuilt = HookedTransformer(model.cfg)
        rebuilt.load_and_process_state_dict(model.state_dict())
        assert difference(rebuilt, hf_model) < ROUNDING
        own = [block.attn.rotary_sin for block in rebuilt.blocks]
        assert len(set(map(id, own))) == len(own)  # blocks that shared none still do not


def test_a_state_dict_gives_each_block_its_own_table(checkpoints):
    model = load(str(checkpoints("llama")))
    tables = [block.attn.rotary_sin for block in model.blocks]
    weights = model.state_dict()
    weights["blocks.1.attn.rotary_sin"] = torch.ones(7, tables[1].shape[1])  # of another length
    model.load_and_process_state_dict(weights)
    assert model.blocks[1].attn.rotary_sin.shape[0] == 7
    others = [block.attn.rotary_sin for block in model.blocks if block is not model.blocks[1]]
    assert all(torch.equal(table, tables[0]) for table in others)
    assert len(set(map(id, others))) == 1  # still shared


@pytest.mark.parametrize(("kind", "longest"), [("longrope", 16), ("dynamic", 32)])
def test_text_beyond_the_table_is_refused(save, kind, longest):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    own = OF_LONGROPE if kind == "longrope" else {}
    path, _ = save("llama", rope_parameters=scaling, rope_scaling=scaling, **own)
    model = load(path, n_ctx=64)
    model(torch.zeros(1, longest, dtype=torch.long))
    # TransformerLens 2 does not make longer tables, so there torch says that the sizes differ.
    with pytest.raises((ValueError, RuntimeError), match=f"more than {longest} tokens|size"):
        model(torch.zeros(1, longest + 1, dtype=torch.long))


# --------------------------------------------------------------------------------------------
# A live model


def test_config_of_hf_model_counts_not_the_directorys(checkpoints, difference):
    config = HF_CONFIGS["mistral"]()
    config.hidden_act, config.rms_norm_eps, config.num_hidden_layers = "gelu", 0.1, 3
    hf_model = make_hf_model(config)
    model = load(str(checkpoints("llama")), hf_model=hf_model)
    assert difference(model, hf_model) < ROUNDING


def test_class_derived_from_transformers_loads(checkpoints, difference):
    class MyLlamaForCausalLM(transformers.LlamaForCausalLM):
        def __init__(self, config, extra):
            super().__init__(config)

    hf_model = make_hf_model(HF_CONFIGS["llama"]())
    hf_model.__class__ = MyLlamaForCausalLM
    assert difference(load(str(checkpoints("llama")), hf_model=hf_model), hf_model) < ROUNDING


def test_compiled_hf_model_loads(checkpoints, difference):
    hf_model = make_hf_model(HF_CONFIGS["llama"]())
    model = load(str(checkpoints("llama")), hf_model=torch.compile(hf_model))
    assert difference(model, hf_model) < ROUNDING


def replace_norm(hf_model):
    hf_model.model.layers[2].input_layernorm = torch.nn.LayerNorm(16)


def replace_forward(hf_model):
    hf_model.model.layers[1].mlp.forward = lambda x: x


def hook_an_mlp(hf_model):
    hf_model.model.layers[2].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def lengthen_frequencies(hf_model):
    hf_model.model.rotary_emb.register_buffer("inv_freq", torch.ones(3))


EXTRA_PARTS = {  # how an hf_model is changed, and the part that is named
    "norm": (replace_norm, "*.input_layernorm"),
    "buffer": (lambda m: m.model.rotary_emb.inv_freq.mul_(0.3), "rotary_emb.inv_freq"),
    "longer buffer": (lengthen_frequencies, "rotary_emb.inv_freq"),
    "number": (lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.1), "self_attn"),
    "forward": (replace_forward, "layers.*.mlp"),
    "hook": (hook_an_mlp, "model.layers.*.mlp"),
}


@torch.no_grad()
@pytest.mark.parametrize("change", EXTRA_PARTS)
def test_hf_model_with_extra_parts_is_refused(checkpoints, refused, change):
    hf_model, (make, part) = make_hf_model(HF_CONFIGS["llama"]()), EXTRA_PARTS[change]
    make(hf_model)
    with refused("parts that its config does not describe", part):
        load(str(checkpoints("llama")), hf_model=hf_model)


@pytest.mark.filterwarnings("error:.*gives other numbers")
def test_hf_model_after_training_in_mixed_precision_is_converted(checkpoints):
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    hf_model = accelerator.prepare(make_hf_model(HF_CONFIGS["llama"]()))
    hf_model.best_loss = 2.5
    load(str(checkpoints("llama")), hf_model=hf_model)
    accelerator.unwrap_model(hf_model, keep_fp32_wrapper=False)
    load(str(checkpoints("llama")), hf_model=hf_model)
