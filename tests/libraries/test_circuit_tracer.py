"""circuit-tracer over four devices as on one CPU, with no change to it: `nox -s circuit-tracer`."""

import pytest
import torch
from architectures import configs_without_hub
from comparison import assert_agrees
from hf_models import D_MODEL, D_VOCAB, N_LAYERS

import tl_devicefix

MISSING = "circuit-tracer is not installed: run `nox -s circuit-tracer`"
circuit_tracer = pytest.importorskip("circuit_tracer", reason=MISSING)
replacing = pytest.importorskip(
    "circuit_tracer.replacement_model.replacement_model_transformerlens", reason=MISSING
)
transcoding = pytest.importorskip(
    "circuit_tracer.transcoder.single_layer_transcoder", reason=MISSING
)

pytestmark = [pytest.mark.hooked, pytest.mark.fails_unpatched]

PROMPT = torch.randint(3, D_VOCAB, (7,), generator=torch.Generator().manual_seed(3))
FEATURES = [(1, 3, 5, 2.0), (3, 4, 7, 1.5)]
"""Layer, position, feature, and what it is set to."""


def transcoders():
    """One for each layer, always the same."""
    chance = torch.Generator().manual_seed(0)
    made = {}
    for layer in range(N_LAYERS):
        sizes, on_cpu = (D_MODEL, 24, torch.nn.functional.relu, layer), torch.device("cpu")
        made[layer] = transcoding.SingleLayerTranscoder(*sizes, device=on_cpu, dtype=torch.float32)
        with torch.no_grad():
            for parameter in made[layer].parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.3)
    return transcoding.TranscoderSet(made, "mlp.hook_in", "mlp.hook_out")


def graph(model, **options):
    actual = circuit_tracer.attribute(PROMPT.to(model.cfg.device), model, verbose=False, **options)
    return actual.adjacency_matrix, actual.active_features, actual.activation_values


def context(model):
    actual = model.setup_attribution(PROMPT.to(model.cfg.device))
    vectors = (actual.error_vectors, actual.token_vectors, actual.decoder_vecs, actual.encoder_vecs)
    return actual.logits, actual.activation_matrix, *vectors


def generate(model):
    features = [(1, slice(2, None), 5, 2.0)]
    options = {"max_new_tokens": 3, "do_sample": False, "verbose": False}
    return model.feature_intervention_generate("w5 w7 w9", features, **options)


CALLS = {
    "setup_attribution": context,
    "attribute, 20 features": lambda model: graph(model, max_feature_nodes=20, batch_size=4),
    "feature_intervention, constrained": lambda model: model.feature_intervention(
        PROMPT.to(model.cfg.device), FEATURES, constrained_layers=range(N_LAYERS)
    ),
    "feature_intervention_generate": generate,
}


@pytest.fixture(scope="module")
def load(hf_models, tokenizer):
    """`load(n_devices=4)`: circuit-tracer's own class, and its own loader."""
    cls = replacing.TransformerLensReplacementModel

    def load(**options):
        options = {"hf_model": hf_models("llama"), "tokenizer": tokenizer, **options}
        with configs_without_hub("llama") as name:
            return cls.from_pretrained_and_transcoders(name, transcoders(), **options)

    return load


def dense(value):
    """With dense tensors for those that are sparse."""
    if isinstance(value, tuple):
        return [dense(entry) for entry in value]
    return value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value


@pytest.mark.parametrize("call", CALLS)
def test_circuit_tracer_gives_over_devices_what_one_cpu_gives(call, load, machine):
    with tl_devicefix.disabled():
        expected = dense(CALLS[call](load(device="cpu")))
    with tl_devicefix.mix_devices():
        over_four = load(n_devices=4)
        assert len({parameter.device for parameter in over_four.parameters()}) == 4
        assert_agrees(dense(CALLS[call](over_four)), expected, tolerance=1e-6)
