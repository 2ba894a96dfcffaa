"""`boot_transformers` over several devices: what may be asked for, and what is refused."""

import copy
import json
import shutil

import accelerate
import pytest
import torch
import transformers
from comparison import assert_agrees, assert_same_tensors, on_cpu
from devices import device
from hf_models import (
    D_VOCAB,
    N_LAYERS,
    balanced_map,
    make_hf_model,
    randomize,
    save_checkpoint,
)
from model_classes import TransformerBridge
from parameters import in_turn
from safetensors.torch import load_file, save_file
from torch import nn

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.transformer_bridge.components import Layout

pytestmark = pytest.mark.bridge


def devices_of(bridge):
    """Where the weights of each component really are."""
    modules = dict(bridge.named_modules())
    result = {}
    for component in bridge.placement.components:
        devices = {p.device for p in modules[component.name].parameters()}
        assert len(devices) <= 1, f"{component.name} is on {devices}"
        if devices:
            result[component.name] = devices.pop()
    return result


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({"n_devices": 4}, {0, 1, 2, 3}),
        ({"n_devices": 2, "device": device(1)}, {1, 2}),
        ({"device_map": "auto", "max_memory": {0: "1GiB", 2: "1GiB"}}, {0, 2}),
        ({"device_map": {"": 0, "blocks.2": 1, "blocks.3": 2}}, {0, 1, 2}),
        ({"device_map": {"embed": 0, "blocks": 1, "ln_final": 0, "unembed": 0}}, {0, 1}),
    ],
    ids=str,
)
def test_devices_are_named_as_for_hooked_transformer(options, used, machine, load, on_one, tokens):
    bridge = load("llama", **options)
    where = devices_of(bridge)
    assert where == {n: d for n, d in bridge.placement.device_map.items() if n in where}
    assert {device.index for device in where.values()} == used
    assert bridge.cfg.n_devices == len(bridge.placement.devices) == len(used)
    home = bridge.placement.home
    assert home == torch.device(options.get("device", device(min(used))))
    assert_agrees(bridge(tokens.to(home)), on_one("llama")(tokens), home)


@pytest.mark.fails_unpatched
def test_a_map_of_hugging_face_modules_is_honoured(machine, load, on_one, tokens):
    """The unpatched release honours it too, and then fails to read its cache."""
    spread = balanced_map("llama", machine.devices)
    bridge = load("llama", device_map=spread)

    modules = dict(bridge.original_model.named_modules())
    for path, where in spread.items():
        assert {str(p.device) for p in modules[path].parameters()} <= {where}
    home = machine.devices[0]
    logits, cache = bridge.run_with_cache(tokens.to(home))
    expected, expected_cache = on_one("llama").run_with_cache(tokens)
    assert_agrees(logits, expected, home)
    assert_agrees(cache.accumulated_resid(), expected_cache.accumulated_resid(), home)
    nested = load("llama", device_map={"": 1, "model.layers": 2, "model.layers.3": 0})
    blocks = [nested.placement.device_of(f"blocks.{layer}").index for layer in range(N_LAYERS)]
    assert blocks == [2, 2, 2, 0, *[2] * (N_LAYERS - 4)]
    assert nested.placement.home == machine.devices[1]
    nested = load("llama", device_map={"": 0, "model.layers": 1, "blocks.3": 2})
    assert [c.device.index for c in nested.placement.components if "3" in c.name] == [2]
    on_cpu = load("llama", device_map={"model": 0, "lm_head": "cpu"})
    assert_agrees(on_cpu(tokens.to(home)).cpu(), expected.cpu())
    with pytest.raises(ValueError, match=r"'model.layers.3.mlp', a part of blocks.3"):
        load("llama", device_map={"": 1, "model.layers.3.mlp": 2})


def test_a_name_of_no_checkpoint_is_refused_before_a_load(machine, tmp_path, monkeypatch):
    """Without a connection, a second try to fetch it takes 20 s."""
    monkeypatch.setattr("tl_devicefix.transformer_bridge.loading._boot", pytest.fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("gpt22", r"lists nor a local directory; did you mean 'gpt2'\? It cannot be fetched"),
        ("gpt2", r"^the config of 'gpt2' cannot be fetched: check the connection"),
        ("./my_model", r"^there is no directory './my_model'"),
        ("empty", "the directory 'empty' has no config.json"),
    ):
        for options in ({}, {"on_mismatch": "warn"}, {"n_devices": 2}):
            with pytest.raises(ValueError, match=says):
                TransformerBridge.boot_transformers(name, **options)


@pytest.fixture
def boot_changed(checkpoints, tmp_path):
    """`boot_changed(change, n_devices=2)`: from a Llama's files, after `change(tensors)`."""

    def boot(change, **options):
        directory = shutil.copytree(checkpoints("llama"), tmp_path, dirs_exist_ok=True)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return TransformerBridge.boot_transformers(str(directory), **options)

    return boot


OVER_DEVICES = [{"n_devices": 3}, {"device_map": {"": 0, "blocks.2": "cpu"}}]
QUERIES = "model.layers.3.self_attn.q_proj.weight"
INCOMPLETE = {
    "lm_head.weight": lambda tensors: tensors.pop("lm_head.weight"),
    QUERIES: lambda tensors: tensors.pop(QUERIES),
    "model.norm.weight": lambda tensors: tensors.pop("model.norm.weight"),
    "begin with 'module.'": lambda tensors: [
        tensors.__setitem__(f"module.{name}", tensors.pop(name)) for name in list(tensors)
    ],
    "expected (40, 16)": lambda tensors: tensors.update({"lm_head.weight": torch.ones(3, 16)}),
}


@pytest.mark.parametrize(
    ("says", "options"),
    in_turn(INCOMPLETE, [pytest.param({}, marks=pytest.mark.fails_unpatched), *OVER_DEVICES]),
)
def test_an_incomplete_checkpoint_is_refused(says, options, machine, boot_changed):
    with pytest.raises(ValueError, match=r"^the checkpoint '.*") as caught:
        boot_changed(INCOMPLETE[says], **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hf_model_dispatched_by_accelerate_keeps_its_devices(
    machine, load, hf_models, checkpoints, on_one, tokens
):
    spread = balanced_map("llama", machine.devices)
    hf_model = accelerate.dispatch_model(copy.deepcopy(hf_models("llama")), spread)
    bridge = TransformerBridge.boot_transformers(str(checkpoints("llama")), hf_model=hf_model)

    assert bridge.original_model is hf_model
    assert bridge.placement.device_of("ln_final") == machine.devices[3]
    bridge.enable_compatibility_mode()
    expected = on_one("llama", folded=True)
    _, cache = bridge.run_with_cache(tokens)
    _, expected_cache = expected.run_with_cache(tokens)
    assert_agrees(cache.decompose_resid(), expected_cache.decompose_resid(), machine.devices[0])


def test_encoder_and_decoder_are_spread_and_folded(machine, tokenizer, tokens, tmp_path):
    """Of a BART, whose bias of the logits is in none of its modules."""
    of_each = {"layers": 3, "attention_heads": 4, "ffn_dim": 24}
    layers = {f"{of}_{size}": n for of in ("encoder", "decoder") for size, n in of_each.items()}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}
    sizes = {"vocab_size": D_VOCAB, "d_model": 16, "max_position_embeddings": 32}
    config = transformers.BartConfig(**layers, **ids, **sizes, forced_eos_token_id=None)
    hf_model = transformers.BartForConditionalGeneration(config)
    randomize(hf_model)
    directory = str(save_checkpoint(hf_model, tokenizer, tmp_path))
    decoder_tokens = torch.zeros(2, 3, dtype=torch.long)
    with tl_devicefix.disabled():
        reference = TransformerBridge.boot_transformers(directory, device="cpu")
        reference.enable_compatibility_mode()
    expected = reference(tokens, decoder_input_ids=decoder_tokens)
    home = machine.devices[0]
    bridge = TransformerBridge.boot_transformers(directory, n_devices=3)
    assert tl_devicefix.check(bridge)
    bridge.enable_compatibility_mode()
    assert_same_tensors(on_cpu(bridge.state_dict()), on_cpu(reference.state_dict()))
    logits = bridge(tokens.to(home), decoder_input_ids=decoder_tokens.to(home))
    assert_agrees(logits, expected, home)


@pytest.mark.skipif(
    has_hooked_transformer(), reason="TransformerLens 3 cannot run a T5 of this transformers"
)
def test_a_component_within_another_one_is_on_its_device(machine, tokenizer, tokens, tmp_path):
    """T5's biases of positions are in the first block of its encoder and decoder."""
    sizes = {"vocab_size": D_VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4}
    config = transformers.T5Config(**sizes, num_layers=3, decoder_start_token_id=0)
    hf_model = transformers.T5ForConditionalGeneration(config).eval()
    randomize(hf_model)
    directory = str(save_checkpoint(hf_model, tokenizer, tmp_path))
    bridge = TransformerBridge.boot_transformers(directory, n_devices=2)
    assert tl_devicefix.check(bridge)
    bridge.decoder_pos_embed.original_component.to(machine.devices[0])
    assert not tl_devicefix.check(bridge)
    assert tl_devicefix.check(bridge, repair=True)
    with torch.no_grad():
        decoder_tokens = torch.zeros(2, 3, dtype=torch.long)
        expected = hf_model(tokens, decoder_input_ids=decoder_tokens).logits
        home = machine.devices[0]
        logits, cache = bridge.run_with_cache(
            tokens.to(home), decoder_input_ids=decoder_tokens.to(home)
        )
    assert_agrees(logits, expected, home)
    # Its blocks have a forward of TransformerLens's, which calls this.
    assert "decoder_blocks.1.hook_resid_mid" in cache


def test_falcons_mlp_output_is_cached_as_on_one_device(machine, load, on_one, tokens):
    """Its blocks have a forward of TransformerLens's; transformers' adds to this in place."""
    name = "blocks.1.hook_mlp_out"
    _, cache = load("falcon", n_devices=4).run_with_cache(tokens, names_filter=name)
    assert_agrees(cache[name], on_one("falcon").run_with_cache(tokens)[1][name])


@pytest.mark.filterwarnings("ignore:tensors are shared by components on several devices")
def test_blocks_across_devices_share_weights(machine, tokenizer, tokens, tmp_path):
    """Zamba2 has one attention layer, which several of its blocks run."""
    sizes = {"vocab_size": D_VOCAB, "hidden_size": 32, "intermediate_size": 48, "n_mamba_heads": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 16}
    layers = {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]}
    ones = dict.fromkeys(("mamba_ngroups", "num_mem_blocks"), 1)
    config = transformers.Zamba2Config(
        **sizes, **layers, **ones, num_hidden_layers=4, mamba_headdim=16, adapter_rank=4
    )
    hf_model = make_hf_model(config)
    directory = str(save_checkpoint(hf_model, tokenizer, tmp_path))
    home = machine.devices[0]
    with torch.no_grad():
        expected = hf_model(tokens).logits
        for device_map in ({"": 0, "blocks.3": 1}, {"": 0, "blocks.2": 1, "blocks.3": "cpu"}):
            bridge = TransformerBridge.boot_transformers(directory, device_map=device_map)
            assert_agrees(bridge(tokens.to(home)), expected, home)


def test_modules_of_no_component_stay_with_embed(machine):
    """Gemma 4 has a second embedding, which no component of a Bridge contains."""
    layout = Layout({"embed": "wte"})
    hf_model = nn.ModuleDict({"wte": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
    assert layout.in_components({"wte": 0, "second": 0}, hf_model) == {"embed": 0}
    says = "'second', which is part of no component, .*: leave it out; the components are embed$"
    with pytest.raises(ValueError, match=says):
        layout.in_components({"": 0, "second": 1}, hf_model)
    config = transformers.Gemma4TextConfig(num_hidden_layers=2)
    placement = tl_devicefix.plan(config, device_map={"": 1, "embed": 0})
    assert placement.device_of("rest") == placement.home == machine.devices[0]
    with pytest.raises(ValueError, match=r"names 'rest', .*: name one of embed, .* unembed \(each"):
        tl_devicefix.plan(config, device_map={"": 0, "rest": 1})


def test_boot_names_a_damaged_file(checkpoints, machine, tmp_path):
    path = shutil.copytree(checkpoints("llama"), tmp_path / "copy")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete"):
        TransformerBridge.boot_transformers(str(path), device="cpu")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"n_devices": 2, "max_memory": {0: "1KiB", 1: "1KiB"}}, ValueError, "do not fit"),
        ({"dtype": "bf17"}, ValueError, "bf17"),
        ({"n_devices": 2, "fold_ln": False}, TypeError, r"'fold_ln': give it to enable_compat.*$"),
        ({"device": "sim:7"}, ValueError, "device 'sim:7' does not exist: this machine has 4"),
        (
            {"device_map": {"modle": 0, "lm_head": 0}},
            ValueError,
            "names 'modle', but this model has no such component: name one of embed",
        ),
    ],
    ids=str,
)
def test_boot_transformers_refuses_bad_arguments_in_a_sentence(options, error, says, machine, load):
    with pytest.raises(error, match=says) as caught:
        load("llama", **options)
    assert "\n" not in str(caught.value)
    assert sum(machine.memory_allocated(index) for index in range(4)) == 0


def test_each_device_gets_masks_and_rotary_tables_once(machine, load, tokens):
    bridge = load("llama", n_devices=3)
    at_home = tokens.to(machine.devices[0])
    with torch.no_grad():
        bridge(at_home)
        machine.reset_transfers()
        bridge(at_home)

    # To each of the two others: the residual stream, a mask, a cosine, a sine, and positions. And
    # the residual stream back home.
    assert len([transfer for transfer in machine.transfers if transfer.bytes]) == 2 * 5 + 1


def test_bridge_in_bfloat16_keeps_its_placement_at_half_the_size(machine, load, tokens):
    bridge = load("llama", n_devices=3)
    before = bridge.placement

    bridge.to(torch.bfloat16)

    assert bridge.placement.device_map == before.device_map
    assert [bridge.placement.bytes_on(index) for index in (1, 2)] == [
        before.bytes_on(index) // 2 for index in (1, 2)
    ]
    copied = copy.deepcopy(bridge)
    assert copied.placement == bridge.placement
    assert bridge(tokens).dtype == torch.bfloat16
    assert_agrees(copied(tokens), bridge(tokens), machine.devices[0], tolerance=0)
    assert load("llama", n_devices=3, dtype="bf16").embed.W_E.dtype == torch.bfloat16


def test_a_config_with_a_wrong_value_is_refused_in_a_sentence(hf_models, machine, tmp_path):
    hf_models("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    says = r"^config.json of '\S+' cannot be read \(.*\); correct it, or fetch it again$"
    for field in ("hidden_size", "hidden_act"):
        (tmp_path / "config.json").write_text(json.dumps({**fields, field: "x"}))
        with pytest.raises(ValueError, match=says) as caught:
            TransformerBridge.boot_transformers(str(tmp_path), n_devices=2)
        assert "\n" not in str(caught.value)
        assert "StrictDataclass" not in str(caught.value)
