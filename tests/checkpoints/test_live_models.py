"""A live model, adapted, quantised or offloaded, loads as the plain model that it stands for."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import bitsandbytes
import peft
import pytest
import torch
import transformers
from architectures import PROCESSING
from comparison import Snapshot, assert_same_model, log_probs
from devices import device
from model_classes import HookedTransformer
from packaging.version import Version
from parameters import in_turn
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import tl_devicefix
from tl_devicefix.hooked_transformer.components import IS_2

pytestmark = pytest.mark.hooked

CPU = torch.device("cpu")
TOKENS = torch.tensor([[3, 5, 7, 9]])

MISTRAL, GPT2 = WIDE = "wide mistral", "wide gpt2"

# Adapters as training leaves them: with values of their own, the same each time.

IN_LLAMA = ("q_proj", "v_proj", "down_proj")
IN_GPT2 = ("c_attn", "c_proj", "c_fc")
CONV = {"fan_in_fan_out": True}
CAUSAL = {"task_type": "CAUSAL_LM"}


def config(*targets, **options):
    return peft.LoraConfig(target_modules=list(targets), **{"r": 4, **CAUSAL, **options})


def lora(*targets, **options):
    """`lora("q_proj")(model)` is that model with LoRA on its q_projs."""
    return adapter(config(*targets, **options))


def adapter(*configs, active="0", **options):
    """`adapter(one, two, active="1")(model)`: the adapters are called "0", "1", ..."""

    def adapt(model):
        own = set(model.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            adapted = peft.get_peft_model(model, configs[0], adapter_name="0", **options)
            for i, config in enumerate(configs[1:], start=1):
                adapted.add_adapter(str(i), config)
            train(p for p in adapted.parameters() if p not in own or p.requires_grad)
        adapted.base_model.set_adapter(active)
        return adapted.eval()

    return adapt


@torch.no_grad()
def train(parameters):
    """As if they had been trained: no parameter has its initial value, be it zero or one."""
    for parameter in parameters:
        if parameter.is_floating_point():  # or it is one of bitsandbytes', wrapped anew
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float32), alpha=0.2)


def added_by_transformers(model):
    """With the adapter of `lora(*IN_LLAMA)`, but without a PeftModel around it."""
    adapted = lora(*IN_LLAMA)(copy.deepcopy(model))
    trained = peft.get_peft_model_state_dict(adapted, adapter_name="0")
    model.add_adapter(config(*IN_LLAMA), adapter_name="0")
    names = {f"base_model.model.{name}": p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, value in trained.items():
            names[name.replace(".weight", ".0.weight")].copy_(value)
    return model.eval()


def merged_by_its_user(model):
    adapted = lora(*IN_LLAMA)(model)
    adapted.merge_adapter()
    return adapted


LOHA = peft.LoHaConfig(r=4, target_modules=["q_proj", "up_proj"])
EXPERTS_ARE_PARAMETERS = Version(transformers.__version__) >= Version("5")
NOT_AS_MERGED = {
    "LoRA on an embedding that is tied": ("gpt2", lora("wte")),
    "LoRA and LoHa": (
        "llama",
        adapter(config("q_proj", task_type=None), LOHA, active=["0", "1"], mixed=True),
    ),
    "LoRA on experts": (
        "mixtral",
        lora("q_proj", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        if EXPERTS_ARE_PARAMETERS
        else lora("q_proj", "w1", "w2", "w3"),
    ),
}
"""What PEFT's own merge_and_unload would make another model of, or refuse."""

# Quantised by bitsandbytes.

_NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # scales too
KINDS = {
    "nf4": {"load_in_4bit": True, **_NF4},
    "int8": {"load_in_8bit": True},
}


def quantise(checkpoint, kind):
    """Load a checkpoint as transformers quantises it, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(
        checkpoint,
        torch_dtype=torch.float32,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(**KINDS[kind]),
    ).eval()


@torch.no_grad()
def dequantised(hf_model, plain):
    """`plain`, which is changed, with the values that the quantised model's weights have."""
    for name, module in hf_model.named_modules():
        if type(module).__module__.startswith("bitsandbytes"):
            layer, weight = plain.get_submodule(name), values(module.weight)
            layer.weight.copy_(weight.T if isinstance(layer, Conv1D) else weight)
    return plain


def values(weight):
    """What a quantised weight stands for, by bitsandbytes' own functions."""
    functional = bitsandbytes.functional
    if isinstance(weight, bitsandbytes.nn.Int8Params):
        return functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return functional.dequantize_4bit(weight.data, weight.quant_state)


# Offloaded by accelerate.


@dataclass(frozen=True)
class Parts:
    """What a live model is made of."""

    model: PreTrainedModel
    """A plain model, which may be changed."""
    checkpoint: Path
    """The same, as transformers saved it."""
    folder: Path
    """To offload to."""


def blocks_on_disk(parts):
    """By transformers: all of a GPT-2 but the first block."""
    on_disk = ("wte", "wpe", "ln_f", *(f"h.{layer}" for layer in range(1, 5)))
    device_map = {f"transformer.{name}": "disk" for name in on_disk}
    device_map |= {"transformer.h.0": "cpu", "lm_head": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        parts.checkpoint, offload_folder=parts.folder, device_map=device_map
    ).eval()


def on_cpu(of):
    return lambda parts: accelerate.cpu_offload(of(parts), CPU)


def on_disk(**options):
    return lambda parts: accelerate.disk_offload(parts.model, parts.folder, CPU, **options)


@dataclass(frozen=True)
class Case:
    """A live model, and the plain model that it stands for."""

    architecture: str
    live: Callable[[Parts], Any]
    plain: Callable[[Parts], PreTrainedModel] = lambda parts: parts.model


def adapted(architecture, adapt, merge=None):
    """By `adapt`; if PEFT cannot merge it, `merge` makes the PeftModel that it is the same as."""
    return Case(
        architecture,
        lambda parts: adapt(parts.model),
        lambda parts: (merge or adapt)(parts.model).merge_and_unload(),
    )


def once_disabled(adapt):
    """Adapted, and then as without its adapters."""

    def live(parts):
        adapted = adapt(parts.model)
        adapted.base_model.disable_adapter_layers()
        return adapted

    return Case("llama", live)


def quantised(name, kind, adapt=None, was_run=False):
    """In a way of `KINDS`, then adapted, if it is, and run, if it was."""

    def live(parts):
        hf_model = quantise(parts.checkpoint, kind)
        hf_model = adapt(hf_model) if adapt else hf_model
        if was_run:
            with torch.no_grad():
                hf_model(TOKENS)
        return hf_model

    def plain(parts):
        plain = dequantised(quantise(parts.checkpoint, kind), parts.model)
        return adapt(plain).merge_and_unload() if adapt else plain

    return Case(name, live, plain)


_DORA_ON_CONV = lora(*IN_GPT2, use_dora=True, **CONV, modules_to_save=["ln_f"])

CASES = {
    "LoRA, also on the embedding and the unembedding": adapted(
        "llama", lora(*IN_LLAMA, "embed_tokens", "lm_head")
    ),
    "LoRA on Conv1D, with all biases trained": adapted("gpt2", lora(*IN_GPT2, **CONV, bias="all")),
    "modules to save": adapted("llama", lora("q_proj", modules_to_save=["lm_head", "norm", "mlp"])),
    "a module to save of an adapter that is not active": adapted(
        "llama",
        adapter(config(*IN_LLAMA, modules_to_save=["lm_head"]), config("q_proj"), active="1"),
    ),
    "an adapter that transformers added": adapted("llama", added_by_transformers, lora(*IN_LLAMA)),
    "an adapter that its user merged": adapted("llama", merged_by_its_user, lora(*IN_LLAMA)),
    "disabled, with modules to save": once_disabled(lora(*IN_LLAMA, modules_to_save=["norm"])),
    "disabled, once merged": once_disabled(merged_by_its_user),
    "nf4 mistral": quantised(MISTRAL, "nf4"),
    "int8 gpt2, run": quantised(GPT2, "int8", was_run=True),
    "DoRA on int8": quantised(MISTRAL, "int8", lora(*IN_LLAMA, use_dora=True)),
    # GPT-2's embedding and unembedding are one tensor, which may be stored under either name.
    "transformers, embeddings on disk": Case("gpt2", blocks_on_disk),
    "disk_offload, buffers too": Case("llama", on_disk(offload_buffers=True)),
    "an adapted model on the CPU": Case(
        "gpt2",
        on_cpu(lambda parts: _DORA_ON_CONV(parts.model)),
        lambda parts: _DORA_ON_CONV(parts.model).merge_and_unload(),
    ),
}

CANNOT_RUN = ["an adapted model on the CPU"]  # PEFT does not run an offloaded DoRA
if IS_2:  # transformers 4 loses embeddings that are tied and on disk
    CANNOT_RUN.append("transformers, embeddings on disk")


@pytest.fixture
def reference_of(load):
    """`reference_of("gpt2", plain_model)`: as unpatched TransformerLens loads it on one CPU."""

    @tl_devicefix.disabled()
    def reference_of(name, hf_model, **options):
        return load(name, hf_model=hf_model, device="cpu", **options)

    return reference_of


@pytest.fixture
def parts_of(hf_models, checkpoints, tmp_path_factory):
    """`parts_of("gpt2")`: what a live model is made of, anew each time."""

    def parts_of(name, *dtypes):
        folder = tmp_path_factory.mktemp("offloaded")
        return Parts(copy.deepcopy(hf_models(name, *dtypes)), checkpoints(name), folder)

    return parts_of


@torch.no_grad()
def predictions(hf_model, tokens):
    """What a Hugging Face model predicts, by its own forward, as `comparison.log_probs`."""
    return hf_model(tokens).logits.log_softmax(dim=-1)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(("name", "processing"), in_turn(CASES, ["default", "none"]))
def test_live_model_loads_as_its_plain_one_and_stays_unchanged(
    name, processing, parts_of, load, reference_of, tokens
):
    case = CASES[name]
    of = case.architecture
    hf_model = case.live(parts_of(of))
    # bitsandbytes keeps weights otherwise once they have run, so another model runs before.
    another = case.live(parts_of(of)) if of in WIDE else hf_model
    expected = None if name in CANNOT_RUN else predictions(another, tokens)
    options = PROCESSING[processing]
    reference = reference_of(of, case.plain(parts_of(of)), **options)
    before = Snapshot(hf_model)

    model = load(of, hf_model=hf_model, n_devices=3, **options)

    assert_same_model(model, reference, tokens)
    before.assert_unchanged()
    assert expected is None or torch.equal(predictions(hf_model, tokens), expected)


@pytest.mark.parametrize("case", NOT_AS_MERGED)
def test_adapters_that_peft_cannot_merge_are_merged(case, parts_of, load, on_one, tokens):
    name, adapt = NOT_AS_MERGED[case]
    on_one(name)  # skips where TransformerLens itself cannot read it
    hf_model = adapt(parts_of(name).model)
    unfolded = {"fold_ln": False} if name == "mixtral" else {}  # TransformerLens 2 drops its norms
    model = load(name, hf_model=hf_model, n_devices=1, **unfolded)
    expected = predictions(hf_model, tokens)
    torch.testing.assert_close(log_probs(model, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "adapt"),
    [("llama", lora(*IN_LLAMA)), ("gpt2", lora(*IN_GPT2, use_dora=True, **CONV))],
    ids=["LoRA", "DoRA"],
)
def test_adapters_of_a_bfloat16_model_are_merged_in_float32(
    name, adapt, parts_of, load, reference_of
):
    """As if all had been float64; PEFT would merge in bfloat16, and round what it merges."""
    hf_model = adapt(parts_of(name, torch.bfloat16).model)
    in_float64 = adapt(parts_of(name, torch.bfloat16, torch.float64).model)
    in_float64.load_state_dict(hf_model.state_dict())
    options = {"dtype": torch.float32, "fold_ln": False}
    exact = dict(reference_of(name, in_float64.merge_and_unload(), **options).named_parameters())
    model = load(name, hf_model=hf_model, n_devices=3, **options)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.cpu(), exact[key], rtol=0, atol=1e-6)


def test_a_quantised_checkpoint_is_loaded_by_its_path(parts_of, load, tmp_path, tokens):
    hf_model = CASES["nf4 mistral"].live(parts_of(MISTRAL))
    hf_model.save_pretrained(tmp_path)
    expected = log_probs(load(MISTRAL, hf_model=hf_model, n_devices=3), tokens)
    model = HookedTransformer.from_pretrained(str(tmp_path), n_devices=3)
    assert len(model.placement.devices) == 3
    torch.testing.assert_close(log_probs(model, tokens), expected, rtol=0, atol=1e-5)


TAKES_A_BLOCK = {
    "DoRA": lambda parts: lora(*IN_LLAMA, use_dora=True)(parts.model),
    "nf4": CASES["nf4 mistral"].live,
    "disk": on_disk(),
}


@pytest.mark.parametrize(("how", "dtype"), in_turn(TAKES_A_BLOCK, [torch.float32, torch.bfloat16]))
def test_computing_weights_takes_one_block_of_extra_memory(how, dtype, parts_of, load, machine):
    """Beyond what loading a plain model takes: the block in float32, and for DoRA a layer of it."""

    plain, same = parts_of(MISTRAL).model, TAKES_A_BLOCK[how](parts_of(MISTRAL))
    model = load(MISTRAL, hf_model=plain, device=device(0), dtype=dtype)
    same_model = load(MISTRAL, hf_model=same, device=device(1), dtype=dtype)
    gc.collect()

    block = max(c.weights for c in model.placement.components) * 4 // dtype.itemsize
    extra = machine.max_memory_allocated(device(1)) - machine.max_memory_allocated(device(0))
    assert extra <= 1.4 * block
    share = same_model.placement.bytes_on(torch.device(device(1)))
    assert machine.memory_allocated(device(1)) == share == machine.memory_allocated(device(0))


def without_scales(parts):
    hf_model = quantise(parts.checkpoint, "int8")
    layer = hf_model.model.layers[1].mlp.up_proj
    layer.weight.SCB = layer.state.SCB = None
    return hf_model


def packed_for_a_cpu(parts):
    hf_model = CASES["nf4 mistral"].live(parts)
    # As a forward on a CPU with AVX512-BF16 leaves it.
    hf_model.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    return hf_model


def of_a_byte(parts):
    layer = parts.model.model.layers[3].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    return parts.model


def quantised_by_gptq(parts):
    parts.model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    return parts.model


REFUSED = {
    "prompt tuning": (
        "llama",
        lambda parts: peft.get_peft_model(
            parts.model, peft.PromptTuningConfig(num_virtual_tokens=2, **CAUSAL)
        ),
        ("PROMPT_TUNING", "cannot be merged", "pass the base model"),
    ),
    "LoRA that starts at certain tokens": (
        "llama",
        lambda parts: lora(*IN_LLAMA, alora_invocation_tokens=[3])(parts.model),
        ("aLoRA", "cannot be merged"),
    ),
    "4 bits, run on a CPU": (MISTRAL, packed_for_a_cpu, ("has run", "load it again")),
    "int8 without a scale": ("qwen2", of_a_byte, ("torch.int8", "quantised")),
    "4 bits, offloaded": (
        MISTRAL,
        on_cpu(CASES["nf4 mistral"].live),
        ("scales were lost", "without offloading"),
    ),
    "8 bits without scales": (MISTRAL, without_scales, ("scales were lost", "load it again")),
    "gptq": ("qwen2", quantised_by_gptq, ("gptq", "quantised", "cannot be undone here")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hf_model_without_plain_weights_is_refused(case, parts_of, load, refused):
    name, make, says = REFUSED[case]
    hf_model = make(parts_of(name))
    with refused(*says, hf_model=hf_model):
        load(name, hf_model=hf_model, n_devices=3)
