"""Arguments that make no sense are refused in one sentence, which says what to do instead."""

import copy

import pytest
import torch
import transformers
from devices import device
from hf_models import GROUPED, make_hf_model, save_checkpoint
from model_classes import HookedTransformer
from packaging.version import Version
from transformer_lens import loading_from_pretrained as tl_loading

from tl_devicefix.monkeypatch.versions import installed

pytestmark = pytest.mark.hooked

NONSENSE = [
    ({"n_devices": 5}, ("n_devices=5", "4 ", "lower n_devices")),
    ({"n_devices": 2, "device": "cpu"}, ("n_devices=2", "'cpu'", "lower n_dev")),
    ({"n_devices": 0}, ("n_devices must be", "1 or more, but is 0")),
    ({"device": "gpu:0"}, ("'gpu:0'", "'cuda:0'")),
    ({"n_devices": 2, "device": device(3)}, (repr(device(3)), "machine has 4 device(s)")),
    ({"max_memory": {"0": "1GiB"}}, ("max_memory names '0'", "write the index without quotes, 0")),
    ({"device_map": {"": 0, "blocks.3": "meta"}}, ("'meta'",)),
    ({"device_map": {}}, ("embed, blocks.0-4, ln_final, unembed",)),
    ({"device_map": "auto", "n_devices": 4}, ("device_map='auto'", "n_devices=4", "leave n_dev")),
    ({"device_map": {"": 1}, "device": device(2)}, (repr(device(2)), device(1), "leave device")),
    ({"dtype": "float17"}, ("'float17'", "bfloat16")),
    ({"dtype": torch.int8}, ("int8", "bfloat16")),
    ({"first_n_layers": 9}, ("9 layers", "5", "first_n_layers")),
    ({"checkpoint_value": 2000, "checkpoint_label": 1000}, ("not both",)),
    ({"load_in_4bit": True}, ("load_in_4bit",)),
    ({"ndevices": 4}, ("'ndevices'", "'n_devices'")),
]
"""What is asked, and what the refusal says of it."""


@pytest.mark.parametrize(("options", "says"), NONSENSE, ids=[str(row[0]) for row in NONSENSE])
def test_from_pretrained_refuses_bad_arguments(options, says, hf_models, load, refused):
    if "checkpoint_label" in options and installed() < Version("3.5.dev0"):
        pytest.skip("this TransformerLens has no checkpoint_label")
    with refused(*says, error=(ValueError, TypeError), hf_model=hf_models("qwen2")):
        load("qwen2", **options)


def test_models_and_names_in_each_others_places_are_refused(hf_models):
    with pytest.raises(TypeError, match=r"hf_model must be a model .* but is 'gpt2': pass a name"):
        HookedTransformer.from_pretrained("gpt2", hf_model="gpt2")
    with pytest.raises(TypeError, match=r"model_name must be a name .* but is a GPT2LMHeadModel"):
        HookedTransformer.from_pretrained(hf_models("gpt2"))


def test_earlier_models_are_named_where_another_does_not_fit(checkpoints, simulated):
    with simulated(1, memory=60_000):
        first = HookedTransformer.from_pretrained(str(checkpoints("llama")))
        with pytest.raises(
            ValueError, match=r"earlier models hold 4\d\.\d KiB until you `del` them"
        ):
            HookedTransformer.from_pretrained(str(checkpoints("llama")))
        assert first.cfg.device == device(0)


def test_transformers_arguments_resembling_ours_are_accepted(load):
    options = {"device_mesh": None, "tp_size": None, "use_cache": True, "load_in_8bit": False}
    assert load("qwen2", device="cpu", torch_dtype=torch.float64, **options)


def on_meta(name):
    return lambda hf_model: hf_model.get_submodule(name).to("meta")


WITHOUT_VALUES = ("meta device", "load the model with its weights")
UNUSABLE = {
    "a norm without values": (on_meta("model.norm"), ("ln_final", *WITHOUT_VALUES)),
    "another shape": (
        lambda hf_model: setattr(hf_model.model.layers[4].mlp, "up_proj", torch.nn.Linear(16, 20)),
        ("blocks.4.mlp.W_in", "(16, 20)", "(16, 24)"),
    ),
    "fewer layers": (
        lambda hf_model: setattr(hf_model.model, "layers", hf_model.model.layers[:3]),
        ("Qwen2ForCausalLM", "5 blocks"),
    ),
}
"""What is done to a model, which then is not that of its config, and what the refusal says."""


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_hf_model_is_refused(case, hf_models, load, refused):
    spoil, says = UNUSABLE[case]
    hf_model = copy.deepcopy(hf_models("qwen2"))
    spoil(hf_model)
    with refused(*says, error=(ValueError, AttributeError), hf_model=hf_model):
        load("qwen2", hf_model=hf_model, n_devices=4)


def test_hf_model_of_another_architecture_is_refused_naming_both(hf_models, load):
    """TransformerLens has a Gemma 2's settings by its name; of others, hf_model's own count."""
    sentence = "hf_model is a GPT2LMHeadModel, but the name belongs to a Gemma2ForCausalLM "
    remedy = "; pass the model of that name, as AutoModelForCausalLM loads it"
    with pytest.raises(ValueError, match=f"{sentence}.*{remedy}"):
        load("gemma-2", hf_model=hf_models("gpt2"), device="cpu")


def test_a_checkpoint_that_cannot_be_converted_is_refused(tokenizer, tmp_path):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(
        **GROUPED, head_dim=8, rope_parameters=scaling, rope_scaling=scaling
    )
    directory = save_checkpoint(make_hf_model(config), tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"W_Q has shape .*, as TransformerLens reads it: try Tr"):
        HookedTransformer.from_pretrained(str(directory), device="cpu")


def test_out_of_memory_is_not_reported_as_wrong_architecture(hf_models, load, on_one, monkeypatch):
    def no_room(*_, **__):
        raise torch.OutOfMemoryError("there is no room")

    on_one("qwen2")
    monkeypatch.setattr(tl_loading, "get_pretrained_state_dict", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        load("qwen2", hf_model=hf_models("llama"), device="cpu")
