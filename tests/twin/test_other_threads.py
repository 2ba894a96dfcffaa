"""While a thread loads a model, what other threads make and load is as without this package."""

import contextlib
import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from comparison import assert_agrees
from packaging.version import Version

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

if has_hooked_transformer():
    from architectures import TOYS, configs_without_hub
    from transformer_lens import HookedTransformer

if has_bridge():
    from tl_devicefix.transformer_bridge.components import adapter_for


@pytest.fixture
def made_elsewhere(checkpoints):
    """`made_elsewhere(is_loading)` makes things in another thread, and returns which are wrong."""
    path = str(checkpoints("gpt2"))

    def make(is_loading):
        config = transformers.AutoConfig.from_pretrained(path)
        models = {"torch's": torch.nn.Linear(2, 2)}
        if has_hooked_transformer():
            models["TransformerLens's"] = HookedTransformer(TOYS["attention-only"]())
        if has_bridge():
            adapter_for(config, path, torch.float32)
        # transformers 4 takes values from the modules of all threads while it loads.
        if not is_loading and Version(transformers.__version__) >= Version("5"):
            models["transformers'"] = transformers.GPT2Model.from_pretrained(path)
        wrong = {name for name, made in models.items() if any(p.is_meta for p in made.parameters())}
        return wrong | ({"config"} if config.model_type != "gpt2" else set())

    with ThreadPoolExecutor(1) as pool:
        yield lambda is_loading: pool.submit(make, is_loading).result()


def test_what_other_threads_make_during_a_load_has_values(
    load, on_one, tokens, made_elsewhere, monkeypatch
):
    here, own, wrong, n_made = threading.get_ident(), torch.nn.Module.__init__, set(), 0
    load("llama", device="cpu")  # so that everything is imported

    def init(module, *args, **kwargs):
        nonlocal n_made, wrong
        own(module, *args, **kwargs)
        if threading.get_ident() == here:
            n_made += 1
            if not n_made % 25:
                wrong |= made_elsewhere(is_loading=n_made % 100)

    monkeypatch.setattr(torch.nn.Module, "__init__", init)
    model = load("llama", device="cpu")
    monkeypatch.undo()
    assert n_made >= 100
    assert wrong == set()
    assert_agrees(model(tokens), on_one("llama")(tokens))


def test_loads_of_live_models_in_three_threads_agree(load, hf_models, on_one, tokens):
    expected = on_one("llama")(tokens)
    live = [copy.deepcopy(hf_models("llama")) for _ in range(3)]
    filters = list(warnings.filters)
    # What the threads' loads exchange overlaps, so the last to end puts back another's.
    exchanged = contextlib.nullcontext()
    if has_hooked_transformer():
        exchanged = configs_without_hub("llama")
    with exchanged, ThreadPoolExecutor(3) as pool:
        for model in pool.map(lambda it: load("llama", hf_model=it, device="cpu"), live):
            assert_agrees(model(tokens), expected)
    assert warnings.filters == filters
