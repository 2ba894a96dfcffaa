"""The same weights, however they are stored; what is damaged is refused, and nothing is made up."""

import copy
import json
import os
from types import SimpleNamespace

import pytest
import torch
from comparison import assert_same_model, log_probs
from hf_models import D_MLP, D_MODEL, D_VOCAB, N_CTX, N_HEADS, change_json, randomize
from model_classes import HookedTransformer
from parameters import in_turn
from safetensors.torch import save_file
from transformer_lens import HookedTransformerConfig
from transformer_lens import loading_from_pretrained as tl_loading

import tl_devicefix
from tl_devicefix.hooked_transformer.loading import load_hf_model

pytestmark = [pytest.mark.hooked, pytest.mark.usefixtures("hub")]  # so that nothing is fetched


@pytest.fixture
def write_checkpoint(tmp_path):
    """`write_checkpoint(hf_model, tensors, n_files=2)`: as transformers saves it, but any tensors.

    `file` ends in `.safetensors` or `.bin`; `listed` are the tensors that the index of a sharded
    checkpoint lists: by default those that it has. Further options are `torch.save`'s.
    """

    def write(hf_model, tensors, file="model.safetensors", n_files=1, listed=None, **options):
        hf_model.config.save_pretrained(tmp_path)
        stem, suffix = file.split(".")
        names = sorted({*tensors, *(listed or ())})
        file_of = {
            name: f"{stem}-{1 + i * n_files // len(names):05}-of-{n_files:05}.{suffix}"
            if n_files > 1
            else file
            for i, name in enumerate(names)
        }
        for shard in set(file_of.values()):
            its = {name: tensors[name] for name in tensors if file_of[name] == shard}
            if suffix == "safetensors":
                save_file(its, tmp_path / shard, metadata={"format": "pt"})
            else:
                torch.save(its, tmp_path / shard, **options)
        if n_files > 1:
            index = json.dumps({"metadata": {}, "weight_map": file_of})
            (tmp_path / f"{file}.index.json").write_text(index)
        return tmp_path

    return write


FILES = {
    "safetensors": ("model.safetensors", 1, {}),
    "sharded safetensors": ("model.safetensors", 3, {}),
    "pickle": ("pytorch_model.bin", 1, {}),
    "sharded pickles": ("pytorch_model.bin", 3, {}),
    "before torch 1.6": ("pytorch_model.bin", 1, {"_use_new_zipfile_serialization": False}),
}
"""What a file is called, how many there are, and how they are saved."""


@pytest.mark.parametrize(("kind", "name"), in_turn(FILES, ["gpt2", "qwen2"]))
def test_every_kind_of_file_holds_the_same_model(
    name, kind, hf_models, write_checkpoint, on_one, machine,
    tokens,
) :  # fmt: skip
    hf_model = hf_models(name)
    tensors = {key: tensor.detach().clone() for key, tensor in hf_model.state_dict().items()}
    if hf_model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    file, n_files, options = FILES[kind]
    directory = write_checkpoint(hf_model, tensors, file, n_files, **options)
    # The files have more.
    change_json(directory / "config.json", dtype="bfloat16", torch_dtype="bfloat16")
    model = HookedTransformer.from_pretrained(directory, n_devices=3)
    assert_same_model(model, on_one(name), tokens)


@pytest.mark.parametrize(("says", "prefix"), [("bfloat16", "model."), ("float32", "")])
def test_each_tensor_keeps_the_dtype_of_its_file(says, prefix, hf_models, write_checkpoint):
    """So that it stays mapped, whatever config.json says; also where names lack their prefix."""
    hf_model = hf_models("gemma")  # whose head is its embedding
    narrow = {name: torch.bfloat16 for name in hf_model.state_dict() if "mlp" in name}
    tensors = {
        name.replace("model.", prefix): tensor.detach().to(narrow.get(name, torch.float32))
        for name, tensor in hf_model.state_dict().items()
        if name != "lm_head.weight"
    }
    directory = write_checkpoint(hf_model, tensors)
    change_json(directory / "config.json", dtype=says, torch_dtype=says)

    cfg = SimpleNamespace(from_checkpoint=False, original_architecture=None)
    loaded = load_hf_model(str(directory), cfg)

    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == narrow.get(name, torch.float32), name
        assert torch.equal(parameter, tensors[name.replace("model.", prefix)]), name


# TransformerLens has a Gemma's and an OLMo's vocabulary written down by their names, so these are
# read by directory.
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("qwen2", "hf_model"), ("gpt2", "checkpoint"), ("gemma-2", "checkpoint")),
        ("olmo", "hf_model beside a directory"),
    ],
)
def test_padded_vocabulary_is_kept_and_changes_no_logits(
    name, form, hf_models, on_one, load, machine,
    checkpoints, tokens, tmp_path,
) :  # fmt: skip
    expected = log_probs(on_one(name), tokens)
    hf_model = copy.deepcopy(hf_models(name))
    hf_model.resize_token_embeddings(D_VOCAB + 1, pad_to_multiple_of=8)

    if form == "checkpoint":
        hf_model.save_pretrained(tmp_path)
        model = HookedTransformer.from_pretrained(tmp_path, n_devices=3)
    elif form == "hf_model":
        model = load(name, hf_model=hf_model, n_devices=3)
    else:
        directory = checkpoints(name)
        model = HookedTransformer.from_pretrained(directory, hf_model=hf_model, n_devices=3)

    assert model.cfg.d_vocab == model.cfg.d_vocab_out == model(tokens).shape[-1] == D_VOCAB + 8
    of_real_tokens = model(tokens)[..., :D_VOCAB].detach().cpu().log_softmax(dim=-1)
    torch.testing.assert_close(of_real_tokens, expected, rtol=1e-5, atol=1e-5)


# TransformerLens's own small models.

SIZES = {
    "d_model": D_MODEL, "n_layers": 3, "d_mlp": D_MLP, "d_head": D_MODEL // N_HEADS,
    "n_heads": N_HEADS, "n_ctx": N_CTX, "d_vocab": D_VOCAB,
}  # fmt: skip
OWN = {
    "NeelNanda/SoLU_3L512W_C4_Code": {"act_fn": "solu_ln", "normalization": "LN"},
    "NeelNanda/GELU_3L512W_C4_Code": {"normalization": "LN"},
    "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr": {
        "attn_only": True,
        "shortformer_pos": True,
        "normalization": None,
    },
    "NeelNanda/SoLU_4L512W_C4_Code": {
        "act_fn": "solu_ln",
        "normalization": "LN",
        "final_rms": True,
    },
}
"""Names, and what the config.json there says beside `SIZES`."""

FETCHED = ("model_final.pth", *(f"checkpoints/model_{n}000000000.pth" for n in (1, 2)))


def weights_of(config, seed):
    """Random weights, as TransformerLens's own models are stored."""
    stored = {"shortformer_pos", "normalization"}
    shape = {key: value for key, value in config.items() if key not in stored}
    norm = config["normalization"]
    cfg = HookedTransformerConfig(**shape, normalization_type=norm, device="cpu")
    model = HookedTransformer(cfg)
    randomize(model)
    weights = {
        key: tensor * (1 + seed / 8)
        for key, tensor in model.state_dict().items()
        if not key.endswith(("mask", "IGNORE"))
    }
    if config.get("final_rms"):  # which has no bias: one that is stored is not folded
        weights["ln_final.b"] = torch.randn(cfg.d_model)
    return weights


@pytest.fixture
def fetched(monkeypatch):
    """The files that TransformerLens has fetched from the repositories of its own models."""
    fetched = []

    def download(name, file, **_):
        fetched.append(file)
        config = {"act_fn": "gelu", "attn_only": False, **SIZES, **OWN[name]}
        return config if file == "config.json" else weights_of(config, FETCHED.index(file))

    api = SimpleNamespace(list_repo_files=lambda name, **_: ["config.json", *FETCHED])
    monkeypatch.setattr(tl_loading, "HfApi", lambda: api)
    monkeypatch.setattr(tl_loading.utils, "download_file_from_hf", download)
    return fetched


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {"checkpoint_index": 1} if "GELU" in name else {}) for name in OWN],
)
def test_transformer_lens_own_checkpoints_load_the_same_model(
    name, options, fetched, machine, tokens
):
    final_rms = OWN[name].get("final_rms", False)
    cls = HookedTransformer
    load = cls.from_pretrained_no_processing if final_rms else cls.from_pretrained
    with tl_devicefix.disabled():
        reference = load(name, device="cpu", **options)
    model = HookedTransformer.from_pretrained(name, n_devices=3, **options)
    assert fetched[-1] == FETCHED[2 if options else 0]
    if final_rms:  # TransformerLens centres the unembedding, which changes the output
        expected = reference(tokens).log_softmax(-1)
        torch.testing.assert_close(model(tokens).log_softmax(-1).cpu(), expected)
    else:
        assert_same_model(model, reference, tokens)


SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
NAME, LAST = "model.layers.1.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight"
BIAS, EXTRA = "model.layers.3.self_attn.q_proj.bias", "model.layers.5.mlp.up_proj.weight"


def load(checkpoint):
    return HookedTransformer.from_pretrained(checkpoint, n_devices=4)


@pytest.fixture
def tensors(hf_models):
    """The tensors of a tiny Qwen2, to be damaged."""
    return {name: t.detach().clone() for name, t in hf_models("qwen2").state_dict().items()}


@pytest.fixture
def write(write_checkpoint, hf_models, tensors):
    """`write(PICKLE, n_files=3)`: the tensors, with the config of the tiny Qwen2."""
    return lambda *args, **options: write_checkpoint(hf_models("qwen2"), tensors, *args, **options)


def file_of(checkpoint, tensor, file):
    """The name of the file in which a checkpoint has, or should have, a tensor."""
    index = checkpoint / f"{file}.index.json"
    return json.loads(index.read_text())["weight_map"][tensor] if index.is_file() else file


WRONG_SHAPE = f"(stored ({D_MLP}, {D_MODEL - 1}), expected ({D_MLP}, {D_MODEL}))"


@pytest.mark.parametrize(
    ("tensor", "instead", "says", "file", "n_files"),
    [
        *((NAME, None, "lacks", SAFETENSORS, 1), (BIAS, None, "lacks", SAFETENSORS, 3)),
        ("lm_head.weight", None, "lacks", SAFETENSORS, 3),
        (EXTRA, torch.ones(3), "", SAFETENSORS, 3),
        ("h.1.attn.c_attn.bias", torch.ones(3), "no place for", SAFETENSORS, 3),
        (LAST, torch.ones(D_MLP, D_MODEL - 1), WRONG_SHAPE, PICKLE, 3),
    ],
)
def test_tensor_missing_extra_or_misshapen_is_refused_by_name(
    tensor, instead, says, file, n_files, tensors, write, refused
):
    listed = {*tensors, tensor}
    remedy = "fetch or save it again"
    if tensor not in tensors:
        remedy = f"correct its config.json, or {remedy}"
    tensors[tensor] = instead
    if instead is None:
        del tensors[tensor]
    checkpoint = write(file, n_files, listed=listed)
    in_file = file_of(checkpoint, tensor, file) if n_files > 1 else ""
    with refused(str(checkpoint), tensor, says, in_file, f"; {remedy}"):
        load(checkpoint)


@pytest.mark.parametrize("file", [SAFETENSORS, PICKLE])
def test_damaged_or_missing_file_is_refused_by_name(file, write, refused):
    checkpoint = write(file, 3)
    path = checkpoint / file_of(checkpoint, NAME, file)
    path.write_bytes(path.read_bytes()[:-1000])
    with refused(str(path), "damaged or incomplete", "again"):
        load(checkpoint)
    path.unlink()
    with refused(str(path), "is missing", "again"):
        load(checkpoint)


def test_damaged_shard_index_is_refused(write, refused):
    file = write(n_files=3) / f"{SAFETENSORS}.index.json"
    no_names = '{"weight_map": null}', "its weight_map does not name files"
    for index, says in ((file.read_text()[:-30], "damaged"), no_names):
        file.write_text(index)
        with refused(file.name, says, "again"):
            load(file.parent)


def test_pickle_that_would_run_code_is_refused_and_does_not_run(write, refused):
    checkpoint = write(PICKLE)

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(checkpoint / "it ran"),)

    for zipped in (True, False):
        torch.save({"a": Malicious()}, checkpoint / PICKLE, _use_new_zipfile_serialization=zipped)
        with refused(f"{PICKLE} would run", ".mkdir", "do not use this checkpoint"):
            load(checkpoint)
    assert not (checkpoint / "it ran").exists()


def test_directory_without_config_json_is_refused(tmp_path, refused):
    with refused(str(tmp_path), "config.json", "save_pretrained"):
        load(tmp_path)


def test_unusable_config_json_is_refused(write, refused):
    checkpoint = write()
    unreadable = f"config.json of {str(checkpoint)!r} cannot be read"
    new = {"architectures": ["NewForCausalLM"], "model_type": "new-model"}
    for changes, says in (
        *((new, "new-model"), ({"architectures": None}, "architecture")),
        *(({"hidden_size": "x"}, unreadable), ({"num_attention_heads": 0}, unreadable)),
    ):
        change_json(write() / "config.json", **changes)
        with refused(str(checkpoint), says, error=(ValueError, RuntimeError)):
            load(checkpoint)
