"""A checkpoint is loaded by its name on the hub, or from its directory, whatever it is called."""

import contextlib
import copy
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils
import transformers.utils.hub
from architectures import OFFICIAL_NAMES
from comparison import assert_same_model
from hf_models import change_json, make_tokenizer
from hub_cache import HubCache, commit_of
from model_classes import HookedTransformer
from transformer_lens import loading_from_pretrained as tl_loading

import tl_devicefix
from tl_devicefix import plan
from tl_devicefix.checkpoints.hub import known_fields
from tl_devicefix.hooked_transformer.config import model_config

pytestmark = [pytest.mark.hooked, pytest.mark.usefixtures("machine")]

FINE_TUNE = "someone/not-a-gemma-2-nor-llama"
"""The name of a tiny Qwen2 that TransformerLens does not list, and would misread if it did."""


@pytest.fixture
def put(hub, hf_models, tokenizer):
    """`put("gpt2", "someone/tune")`: a tiny GPT-2 on the hub, by this name; returns the model."""

    def put(architecture="qwen2", name=FINE_TUNE):
        hub.add(name, hf_models(architecture), tokenizer)
        return hf_models(architecture)

    return put


@pytest.fixture
def directory(tmp_path, checkpoints, monkeypatch):
    """`directory("bert-like")`: the tiny Qwen2, in the current directory, under this name."""
    monkeypatch.chdir(tmp_path)
    return lambda name: Path(shutil.copytree(checkpoints("qwen2"), tmp_path / name))


def load_unprocessed(name, **options):
    return HookedTransformer.from_pretrained_no_processing(name, n_devices=2, **options)


def assert_embeds_as(model, hf_model):
    """Without processing, W_E is the checkpoint's own."""
    embedding = hf_model.get_input_embeddings().weight.detach()
    assert torch.equal(model.W_E.detach().cpu(), embedding)


def test_listed_name_loads_the_model_transformer_lens_loads(put, tokens):
    name = OFFICIAL_NAMES["llama"]
    put("llama", name)
    with tl_devicefix.disabled():
        reference = HookedTransformer.from_pretrained(name, device="cpu")
    model = HookedTransformer.from_pretrained(name, n_devices=3)
    assert_same_model(model, reference, tokens)
    assert model.cfg.model_name == reference.cfg.model_name
    assert model.to_tokens("w5 w7").tolist() == reference.to_tokens("w5 w7").tolist()


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("architecture", ["gemma-2", "pythia"])
def test_a_fine_tune_is_loaded_by_its_own_name(architecture, put, on_one, tokens):
    reference, hf_model = on_one(architecture), put(architecture)
    model = HookedTransformer.from_pretrained(FINE_TUNE, n_devices=2)
    assert_same_model(model, reference, tokens)
    assert model.cfg.original_architecture == hf_model.config.architectures[0]
    assert model.cfg.model_name == "not-a-gemma-2-nor-llama"
    assert model.cfg.tokenizer_name == model.tokenizer.name_or_path == FINE_TUNE
    if architecture == "pythia":  # of the others, transformers 5 makes tokenizers of their classes
        assert model.to_tokens("w5 w7")[0, -2:].tolist() == [5, 7]


def test_any_hub_name_and_any_path_can_be_loaded(put, directory, hf_models):
    put(name="NeelNanda/of-mine")
    assert_embeds_as(load_unprocessed("NeelNanda/of-mine"), hf_models("qwen2"))
    for name, how in (
        *(("gpt2", str), ("with spaces", lambda path: path)),
        ("NeelNanda-of-mine", lambda path: f"{path.name}/"),
    ):
        path = directory(name)
        model = load_unprocessed(how(path))
        assert model.cfg.original_architecture == "Qwen2ForCausalLM"
        assert_embeds_as(model, hf_models("qwen2"))
        assert Path(model.tokenizer.name_or_path).resolve() == path


def test_a_checkpoint_without_tokenizer_loads(hub, hf_models, tmp_path, tokens):
    hub.add(FINE_TUNE, hf_models("qwen2"))
    hf_models("qwen2").save_pretrained(tmp_path / "model")
    for name in (FINE_TUNE, tmp_path / "model"):
        model = HookedTransformer.from_pretrained(name, n_devices=2)
        assert model.tokenizer is None
        assert model(tokens).shape[:2] == tokens.shape


@pytest.fixture(params=[False, True], ids=["not listed", "listed"])
def name(request):
    """The name of a tiny Qwen2 on the hub."""
    return OFFICIAL_NAMES["qwen2"] if request.param else FINE_TUNE


@pytest.mark.fails_unpatched
def test_revision_chooses_weights_config_and_tokenizer(name, put, hub, tmp_path):
    main = put(name=name)
    v2 = copy.deepcopy(main)
    with torch.no_grad():
        v2.get_input_embeddings().weight.mul_(0.5)
    v2.config.rms_norm_eps = 0.001
    later_tokenizer = make_tokenizer(tmp_path / "tokenizer")
    later_tokenizer.add_tokens(["later"])
    hub.add(name, v2, later_tokenizer, revision="v2")

    asked = ({}, {"revision": "v2"}, {"revision": commit_of(name, "v2")})
    for options, hf_model in zip(asked, (main, v2, v2)):
        model = load_unprocessed(name, **options)
        assert_embeds_as(model, hf_model)
        assert model.cfg.eps == hf_model.config.rms_norm_eps
        assert ("later" in model.tokenizer.get_vocab()) == (hf_model is v2)


def test_cache_dir_and_local_files_only_are_obeyed(name, hub, hf_models, tokenizer, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    HubCache(elsewhere).add(name, hf_models("qwen2"), tokenizer)
    model = load_unprocessed(name, cache_dir=elsewhere, local_files_only=True)
    assert_embeds_as(model, hf_models("qwen2"))
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert not hub.directory.exists()


@pytest.mark.fails_unpatched
def test_given_token_reaches_every_download(put, monkeypatch):
    """TransformerLens gives transformers one from HF_TOKEN, and a second is an error."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    put()
    tokens_of = {}
    for loader in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        kind = getattr(transformers, loader)

        def fetched(*args, of=loader, fetch=kind.from_pretrained, **kwargs):
            tokens_of.setdefault(of, set()).add(kwargs.get("token"))
            return fetch(*args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", fetched)

    HookedTransformer.from_pretrained(FINE_TUNE, n_devices=2, token="hf_given")

    tokens_of.pop("AutoConfig", None)  # its config is read from the folder that was fetched
    assert {"AutoModelForCausalLM", "AutoTokenizer"} <= tokens_of.keys()
    assert all(used == {"hf_given"} for used in tokens_of.values())


def test_subfolder_chooses_model_and_tokenizer(hub, hf_models, tokenizer):
    snapshot = hub.add("someone/collection", hf_models("gpt2"))
    hf_models("qwen2").save_pretrained(snapshot / "small")
    tokenizer.save_pretrained(snapshot / "small")
    model = load_unprocessed("someone/collection", subfolder="small")
    assert_embeds_as(model, hf_models("qwen2"))
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()


NOT_CACHED = "couldn't find them in the cached files"
REFUSED = {
    "gpt2-smal": ("did you mean", "'gpt2-small'"),
    "xyzzy": ("organisation/model",),
    "someone/unknown": (NOT_CACHED,),
    "meta-lama/Llama-2-7b-hf": ("did you mean 'meta-llama/Llama-2-7b-hf'? It cannot be fetched",),
    **dict.fromkeys(("./llama", "~/llama", "/no/model"), ("there is no directory '",)),
}
"""A name -> what its refusal says."""


def test_name_that_is_no_checkpoint_is_refused_in_a_sentence(put, tmp_path, refused):
    for name, says in REFUSED.items():
        with refused(repr(name), *says) as caught:
            HookedTransformer.from_pretrained(name)
        assert name != "xyzzy" or "did you mean" not in str(caught.value)
    with refused("'Qwen/Qwen2-0.5B'", NOT_CACHED):
        HookedTransformer.from_pretrained("Qwen/Qwen2-0.5B", local_files_only=True)
    put()
    with refused("checkpoint_index", "leave out"):
        HookedTransformer.from_pretrained(FINE_TUNE, checkpoint_index=3)
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(str(tmp_path), "PEFT adapter", "hf_model"):
        HookedTransformer.from_pretrained(str(tmp_path))


def test_an_architecture_that_is_not_supported_is_named(hub, refused):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))
    hub.add("someone/falcon", falcon)
    for use in (HookedTransformer.from_pretrained, plan):
        with refused("'someone/falcon' holds a FalconForCausalLM"):
            use("someone/falcon")


@pytest.fixture
def with_code(directory, hf_models, tmp_path, monkeypatch):
    """A tiny Qwen3 in a directory called as a model is whose code TransformerLens runs."""
    # transformers copies code to this directory, and imports it from there.
    for module in (transformers.utils.hub, transformers.dynamic_module_utils):
        if hasattr(module, "HF_MODULES_CACHE"):
            monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    path = directory("Qwen/Qwen3-0.6B")
    hf_models("qwen3").save_pretrained(path)
    (path / "own.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass Own: ...\n")
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    change_json(path / "config.json", auto_map=classes)
    change_json(path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    return path.relative_to(tmp_path)


def test_code_in_a_directory_or_of_an_unlisted_name_does_not_run(
    with_code, hub, hf_models, tmp_path
):
    folder = hub.add("Qwen/Qwen3-tuned", hf_models("qwen3"))
    shutil.copytree(with_code, folder, dirs_exist_ok=True)
    for path in (str(with_code), os.path.abspath(with_code), "Qwen/Qwen3-tuned"):
        model = HookedTransformer.from_pretrained(path, n_devices=2, fold_ln=False)
        assert not model.cfg.trust_remote_code
        assert model.tokenizer is not None
        assert not (tmp_path / "it ran").exists()
    with contextlib.suppress(Exception):  # what it holds is no model
        HookedTransformer.from_pretrained(str(with_code), trust_remote_code=True)
    assert (tmp_path / "it ran").exists()


NOT_LISTED = ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-3.1-405B")
"""Models that are known here and that no TransformerLens lists."""


def test_every_model_of_a_known_family_is_known():
    """TransformerLens has sizes of Llamas and Gemmas written down; of these it asks the hub."""
    small, large = ("gpt2", "distilgpt2", "facebook/opt-"), ("mistralai/", "Qwen/", "microsoft/")
    families = (*small, *large, "EleutherAI/")
    listed = {name for name in tl_loading.OFFICIAL_MODEL_NAMES if name.startswith(families)}
    assert listed - known_fields().keys() == set()


@pytest.mark.parametrize(
    "name",
    {
        fields["model_type"]: name
        for name, fields in known_fields().items()
        # Qwen 1 comes with code of its own, without which transformers reads no config.json of it.
        if fields["model_type"] in transformers.CONFIG_MAPPING and name not in NOT_LISTED
    }.values(),
)
def test_known_config_equals_the_one_made_of_the_fetched_file(name, hub):
    if name not in tl_loading.OFFICIAL_MODEL_NAMES:
        pytest.skip(f"the installed TransformerLens does not list {name}")
    unread = {"torch_dtype": "float16", "transformers_version": "4.40.0", "use_cache": True}
    (hub.folder(name) / "config.json").write_text(json.dumps({**known_fields()[name], **unread}))
    assert model_config(name, prefer_known=True).to_dict() == model_config(name).to_dict()
