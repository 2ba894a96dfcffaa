"""A model that accelerate offloaded, in part or whole, loads with the weights that it runs with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from architectures import ALL_ARCHITECTURES
from comparison import assert_same_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from wide import WIDE

CPU = torch.device("cpu")

PARTS = {
    "llama": (
        ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"],
        [f"model.layers.{i}" for i in range(5)],
    ),
    "gpt2": (
        ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"],
        [f"transformer.h.{i}" for i in range(5)],
    ),
}
"""What a device_map of transformers names: all that is outside the blocks, and the blocks."""


def device_map(name: str, outside: str, first: str, others: str) -> dict[str, str]:
    rest, blocks = PARTS[name]
    return {**dict.fromkeys(rest, outside), **dict.fromkeys(blocks, others), blocks[0]: first}


# Each is given the architecture's name, a model of it, its checkpoint, and a folder to offload to.
Offload = Callable[[str, PreTrainedModel, Path, Path], Any]


def from_pretrained(outside: str, first: str, others: str, **options: Any) -> Offload:
    def offload(name: str, hf_model: PreTrainedModel, checkpoint: Path, folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            checkpoint,
            device_map=device_map(name, outside, first, others),
            offload_folder=folder,
            **options,
        )

    return offload


def from_an_empty_model(name: str, _: PreTrainedModel, checkpoint: Path, folder: Path) -> Any:
    with accelerate.init_empty_weights():
        empty = AutoModelForCausalLM.from_config(ALL_ARCHITECTURES[name].hf_config())
    empty.tie_weights()
    return accelerate.load_checkpoint_and_dispatch(
        empty, checkpoint, device_map(name, "cpu", "cpu", "disk"), offload_folder=folder
    )


def with_two_hooks(_: str, hf_model: PreTrainedModel, *__: Path) -> Any:
    accelerate.cpu_offload(hf_model, CPU)
    for module in (hf_model.lm_head, hf_model.get_input_embeddings()):
        add_hook_to_module(module, ModelHook(), append=True)
    return hf_model


OFFLOAD: dict[str, Offload] = {
    "transformers, blocks on disk": from_pretrained("cpu", "cpu", "disk"),
    "transformers, a block on disk": from_pretrained("cpu", "disk", "cpu"),
    "transformers, embeddings on disk": from_pretrained("disk", "cpu", "disk"),
    "transformers, buffers too": from_pretrained("cpu", "cpu", "disk", offload_buffers=True),
    "cpu_offload": lambda _, model, *__: accelerate.cpu_offload(model, CPU),
    "cpu_offload, buffers too": lambda _, model, *__: accelerate.cpu_offload(
        model, CPU, offload_buffers=True
    ),
    "disk_offload, buffers too": lambda _, model, __, folder: accelerate.disk_offload(
        model, folder, CPU, offload_buffers=True
    ),
    "cpu_offload, whole blocks at once": lambda _, model, *__: accelerate.cpu_offload(
        model, CPU, preload_module_classes=["LlamaDecoderLayer", "GPT2Block"]
    ),
    "dispatch_model": lambda name, model, _, folder: accelerate.dispatch_model(
        model, device_map(name, "cpu", "cpu", "disk"), offload_dir=folder
    ),
    "load_checkpoint_and_dispatch": from_an_empty_model,
    "cpu_offload and another hook": with_two_hooks,
}


@pytest.fixture
def offloaded(hf_models: Any, checkpoints: Any, tmp_path: Path) -> Callable[[str, str], Any]:
    """`offloaded("gpt2", "cpu_offload")`: a new model with the weights of `hf_models("gpt2")`."""

    def offloaded(name: str, how: str) -> Any:
        hf_model = OFFLOAD[how](name, copy.deepcopy(hf_models(name)), checkpoints(name), tmp_path)
        assert any(p.is_meta for p in hf_model.parameters())
        return hf_model.eval()

    return offloaded


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("how", OFFLOAD)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_model_has_the_weights_that_are_elsewhere(
    name: str, how: str, offloaded: Any, load: Any, references: Any, tokens: torch.Tensor
) -> None:
    """GPT-2's embedding and unembedding are one tensor, which may be stored under either name."""
    model = load(name, offloaded(name, how))
    assert_same_model(model, references(name), tokens)


@pytest.mark.parametrize("name", ["gpt2"])
@pytest.mark.parametrize("how", OFFLOAD)
def test_the_offloaded_model_is_unchanged_and_goes_on_running(
    name: str, how: str, offloaded: Any, load: Any, snapshot: Any, tokens: torch.Tensor
) -> None:
    hf_model = offloaded(name, how)
    try:
        with torch.no_grad():
            logits = hf_model(tokens).logits
    except KeyError as lost:
        # transformers 4, for embeddings that are tied and on disk.
        pytest.skip(f"transformers itself cannot run this model: it does not find {lost}")
    before = snapshot(hf_model)

    load(name, hf_model)

    before.assert_unchanged()
    with torch.no_grad():
        assert torch.equal(hf_model(tokens).logits, logits)


@pytest.mark.fails_unpatched
def test_a_model_that_is_spread_over_devices_cpu_and_disk(
    processing: Any,
    hf_models: Any,
    load: Any,
    references: Any,
    snapshot: Any,
    tmp_path: Path,
    tokens: torch.Tensor,
) -> None:
    places = {**device_map("llama", "sim:0", "sim:2", "disk"), "model.layers.1": "cpu"}
    hf_model = accelerate.dispatch_model(
        copy.deepcopy(hf_models("llama")), places, main_device="sim:0", offload_dir=tmp_path
    )
    before = snapshot(hf_model)

    model = load("llama", hf_model, **processing)

    before.assert_unchanged()
    assert_same_model(model, references("llama", **processing), tokens)


def new_layer(like: nn.Linear) -> nn.Linear:
    layer = nn.Linear(like.in_features, like.out_features, bias=False)
    generator = torch.Generator().manual_seed(2)
    nn.init.normal_(layer.weight, generator=generator)
    return layer


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("model_is_on", ["sim:1", "disk"])
@pytest.mark.parametrize("layer_is_on", ["cpu", "sim:2"])
def test_a_layer_that_was_put_in_afterwards_is_read_from_where_it_is(
    model_is_on: str,
    layer_is_on: str,
    hf_models: Any,
    load: Any,
    reference_of: Any,
    tmp_path: Path,
    tokens: torch.Tensor,
) -> None:
    hf_model, plain = (copy.deepcopy(hf_models("llama")) for _ in range(2))
    if model_is_on == "disk":
        accelerate.disk_offload(hf_model, tmp_path, CPU)
    else:
        hf_model.to(model_is_on)
    for model, device in ((hf_model, layer_is_on), (plain, "cpu")):
        model.lm_head = new_layer(model.lm_head).to(device)
        mlp = model.model.layers[2].mlp
        mlp.up_proj = new_layer(mlp.up_proj).to(device)

    model = load("llama", hf_model)

    assert_same_model(model, reference_of("llama", plain), tokens)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload, buffers too"])
def test_an_adapted_model_may_be_offloaded(
    how: str, hf_models: Any, load: Any, reference_of: Any, tmp_path: Path, tokens: torch.Tensor
) -> None:
    from adapting import GPT2, lora

    adapt = lora(*GPT2, use_dora=True, fan_in_fan_out=True, modules_to_save=["ln_f"])
    hf_model = adapt(copy.deepcopy(hf_models("gpt2")))
    merged = copy.deepcopy(hf_model).merge_and_unload()
    hf_model = OFFLOAD[how]("gpt2", hf_model, tmp_path, tmp_path)

    model = load("gpt2", hf_model)

    assert_same_model(model, reference_of("gpt2", merged), tokens)


@pytest.mark.fails_unpatched
def test_a_model_of_8_bits_may_be_offloaded(
    quantised: Any, wide_models: Any, load: Any, reference_of: Any, tokens: torch.Tensor
) -> None:
    from quantising import dequantised

    hf_model = quantised("mistral", "int8")
    plain = dequantised(hf_model, wide_models("mistral"))

    model = load(WIDE["mistral"], accelerate.cpu_offload(hf_model, CPU))

    assert_same_model(model, reference_of(WIDE["mistral"], plain), tokens)


def test_a_model_of_4_bits_is_refused_as_offloading_loses_its_scales(
    quantised: Any, load: Any, refused: Any
) -> None:
    hf_model = accelerate.cpu_offload(quantised("mistral", "nf4"), CPU)
    with refused("scales are lost", "without offloading", hf_model=hf_model):
        load(WIDE["mistral"], hf_model)


def test_a_model_of_which_no_values_are_anywhere_is_refused(load: Any, refused: Any) -> None:
    with accelerate.init_empty_weights():
        hf_model = AutoModelForCausalLM.from_config(ALL_ARCHITECTURES["llama"].hf_config())
    hf_model.config.architectures = ["LlamaForCausalLM"]
    with refused("embed.W_E", "meta device", "load the model with its weights", hf_model=hf_model):
        load("llama", hf_model)


def test_an_adapter_that_was_put_on_an_offloaded_model_has_no_values(
    offloaded: Any, load: Any, refused: Any
) -> None:
    """PEFT makes it where the layer's weight is: on the meta device."""
    from adapting import lora

    hf_model = lora("q_proj")(offloaded("llama", "cpu_offload"))
    with refused("blocks.0: attn.W_Q", "meta device", hf_model=hf_model):
        load("llama", hf_model)
