"""What is true of every model that is loaded, and loads that are out of the ordinary."""

import copy
import itertools
import threading

import pytest
import torch
from architectures import OFFICIAL_NAMES, PROCESSING, TOYS, build_toy
from comparison import Snapshot, assert_agrees, log_probs
from devices import device
from hf_models import HF_CONFIGS, make_hf_model
from model_classes import HookedTransformer
from parameters import in_turn
from torch import nn
from transformer_lens import HookedTransformerConfig
from transformer_lens.loading_from_pretrained import OFFICIAL_MODEL_NAMES
from transformers import AutoModelForCausalLM

from tl_devicefix.checkpoints.sources import HuggingFaceSource

pytestmark = pytest.mark.hooked


def test_components_of_all_devices_are_read_at_once(load, machine, monkeypatch):
    read, together, waited_for = HuggingFaceSource.read, threading.Barrier(4), set()

    def reading(self, unit, device):
        if device not in waited_for:
            waited_for.add(device)
            together.wait(30)  # seconds, within which threads that run at once have met
        return read(self, unit, device)

    monkeypatch.setattr(HuggingFaceSource, "read", reading)
    load("gpt2", n_devices=4)
    assert len(waited_for) == 4


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_padded_and_begun_as_asked(side, load, machine):
    model = load("gpt2", n_devices=2, default_padding_side=side, default_prepend_bos=False)
    assert model.tokenizer.padding_side == side
    assert model.to_tokens(["w4 w5", "w6"]).shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "device", "processing"),
    in_turn(["gpt2", "qwen2", "gemma-2"], ["cpu", device(1)], ["none", "default"]),
)
def test_parameters_share_no_memory_with_others_or_the_hf_model(
    name, device, processing, load, hf_models,
    machine,
) :  # fmt: skip
    """Not even tied embeddings."""
    before = Snapshot(hf_models(name))

    model = load(name, device=device, **PROCESSING[processing])

    for (one, tensor), (other, another) in itertools.combinations(model.named_parameters(), 2):
        if tensor.numel() and another.numel():
            addresses = tensor.untyped_storage().data_ptr(), another.untyped_storage().data_ptr()
            assert addresses[0] != addresses[1], (one, other)
    before.assert_unchanged()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before.assert_unchanged()


@pytest.mark.parametrize(("name", "devices"), [("qwen2", (3, 2, 1, 0)), ("gpt2", (0,))])
def test_an_hf_model_that_is_on_devices_itself_stays_there(
    name, devices, hf_models, load,
    machine,
) :  # fmt: skip
    """See TransformerLens's issue 371."""
    reference = load(name, device="cpu")
    hf_model = copy.deepcopy(hf_models(name)).to(device(devices[0]))
    for i, layer in enumerate(getattr(hf_model, "model", hf_model).children()):
        layer.to(device(devices[i % len(devices)]))
    before = Snapshot(hf_model)

    model = load(name, hf_model=hf_model, n_devices=4)

    before.assert_unchanged()
    for name, tensor in model.named_parameters():
        assert tensor.device == model.placement.device_of(name)
        assert torch.equal(tensor.detach().cpu(), reference.get_parameter(name).detach()), name


class WithProbe(HookedTransformer):
    """A subclass that adds a parameter, a module and a buffer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.probe = nn.Linear(2, 2)
        self.register_buffer("seen", torch.arange(3))


def test_tensors_that_a_subclass_adds_keep_their_values_at_home(checkpoints, machine):
    model = WithProbe.from_pretrained(checkpoints("gpt2"), n_devices=3)
    added = {tensor.device for tensor in (model.scale, model.probe.weight, model.seen)}
    assert added == {model.placement.home}
    assert (model.scale.tolist(), model.seen.tolist()) == ([3.0, 3.0], [0, 1, 2])
    assert not model.probe.weight.is_meta
    assert model.fold_layer_norm(model.state_dict())["scale"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("pythia", "use_parallel_residual", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gemma", "hidden_act", "gelu_pytorch_tanh"),
        ("gemma-2", "hidden_activation", "silu"),
        ("gemma-2", "attn_logit_softcapping", None),
        ("gemma-2", "final_logit_softcapping", None),
        ("olmo", "hidden_act", "gelu"),
    ],
)
def test_unusual_fields_of_config_json_are_obeyed(name, field, value, tokens, tmp_path):
    if (official := OFFICIAL_NAMES[name]) not in OFFICIAL_MODEL_NAMES:
        pytest.skip(f"the installed TransformerLens has no {official}")
    config = HF_CONFIGS[name]()
    setattr(config, field, value)
    make_hf_model(config).save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path, device="cpu")
    # transformers 4's sdpa attention overlooks the scaling by layer.
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = hf_model(tokens).logits.log_softmax(-1)
    assert_agrees(log_probs(model, tokens), expected, tolerance=1e-4)


def test_a_processed_model_is_placed_by_what_it_weighs_now(checkpoints, machine):
    model = HookedTransformer.from_pretrained_no_processing(checkpoints("gpt2"), n_devices=2)
    model.process_weights_()
    for component in model.placement.components:
        parameters = model.get_submodule(component.name).parameters()
        assert component.weights == sum(parameter.nbytes for parameter in parameters)


@pytest.mark.skipif(
    "use_attention_sinks" not in HookedTransformerConfig.__dataclass_fields__,
    reason="this TransformerLens's HookedTransformer has no attention sinks",
)
def test_value_biases_stay_where_attention_has_sinks(tokens, caplog):
    model = build_toy(TOYS["attention-only"](use_attention_sinks=True))  # no pattern sums to 1
    before, weights = log_probs(model, tokens), model.state_dict()
    model.load_and_process_state_dict(weights)
    assert_agrees(log_probs(model, tokens), before, tolerance=1e-5)
    assert model.blocks[0].attn.b_V.any()
    assert "fold_value_biases=True does not apply to attention with sinks" in caplog.text
    with pytest.raises(ValueError, match="attention with sinks, where they add no constant"):
        model.load_and_process_state_dict(weights, refactor_factored_attn_matrices=True)
