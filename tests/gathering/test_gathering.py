"""What is spread is read together at home, or where `gather_on` says, if that has room for it."""

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from comparison import assert_agrees
from devices import device
from hf_models import N_LAYERS
from kinds import home_of
from packaging.version import Version
from transformer_lens import ActivationCache

import tl_devicefix
from tl_devicefix import gather_on
from tl_devicefix.monkeypatch.versions import installed

pytestmark = pytest.mark.hooked

CPU = torch.device("cpu")


@pytest.mark.skipif(
    installed() < Version("3"), reason="TransformerLens 2 reads old results of heads"
)
def test_old_results_of_heads_in_a_plain_dict_are_replaced(model, reference, tokens):
    def stacked(model):
        kept = {}
        keep = lambda x, hook: kept.update({hook.name: x})  # noqa: E731
        model.run_with_hooks(tokens, fwd_hooks=[(lambda name: True, keep)])
        for layer in range(N_LAYERS):
            old = torch.zeros_like(kept[f"blocks.{layer}.hook_resid_pre"])
            kept[f"blocks.{layer}.attn.hook_result"] = old
        cache = ActivationCache(kept, model)
        return cache.stack_head_results(apply_ln=True, incl_remainder=True)

    assert_agrees(stacked(model), stacked(reference), home_of(model))


def test_gather_on_chooses_the_device_within_its_own_thread(model):
    with gather_on(device(2)):
        assert model.W_Q.device == torch.device(device(2))
        with gather_on(1), ThreadPoolExecutor(1) as threads:
            assert model.OV.A.device == torch.device(device(1))
            assert threads.submit(lambda: model.W_Q.device).result() == home_of(model)
        assert model.W_Q.device == torch.device(device(2))
    missing = f"{home_of(model).type}:5"
    with pytest.raises(ValueError, match=f"'{missing}' does not exist"), gather_on(missing):
        pass


def test_what_cannot_fit_is_refused_before_anything_is_copied(model, machine, monkeypatch):
    monkeypatch.setattr(machine, "_capacities", [machine.memory_allocated(0) + 1000] * 4)
    machine.reset_transfers()
    message = r"model\.W_in is .* KiB, but .* has 1000 bytes"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        _ = model.W_in
    assert machine.transfers == []

    # Weights of grouped heads need room for each head's copy too.
    stored = sum(block.attn._W_K.nbytes for block in model.blocks)
    monkeypatch.setattr(machine, "_capacities", [machine.memory_allocated(0) + stored] * 4)
    with pytest.raises(torch.OutOfMemoryError, match=r"model\.W_K is .*, but .*:0"):
        _ = model.W_K

    with gather_on("cpu"):
        assert model.W_in.device == CPU
        left = SimpleNamespace(available=1000)
        monkeypatch.setattr(tl_devicefix.gathering.psutil, "virtual_memory", lambda: left)
        with pytest.raises(torch.OutOfMemoryError, match="block by block"):
            _ = model.W_in


RESIDUALS = [f"blocks.{i}.hook_resid_post" for i in range(N_LAYERS)]
LAST = RESIDUALS[-1]


def test_cache_sliced_within_gather_on_is_read_at_home_after(model, reference, tokens):
    _, expected = reference.run_with_cache(tokens)
    _, cache = model.run_with_cache(tokens)
    with gather_on("cpu"):
        first = cache.apply_slice_to_batch_dim(0)
        assert first["resid_post", 4].device == CPU
    assert_agrees(first, expected.apply_slice_to_batch_dim(0), home_of(model))


def test_reading_or_slicing_a_cache_moves_no_stored_activation(model, machine, tokens):
    _, cache = model.run_with_cache(tokens)
    of_slice = cache.apply_slice_to_batch_dim(0).cache_dict
    assert of_slice[LAST].device == home_of(model)
    for name, activation in cache.cache_dict.stored().items():
        assert of_slice.stored()[name].device == activation.device
    before = [machine.memory_allocated(device) for device in machine.devices]
    for name, activation in cache.items():
        assert activation.device == cache[name].device == home_of(model)
    del activation
    assert [machine.memory_allocated(device) for device in machine.devices] == before


COPIES = {
    "dict": dict,
    "**": lambda cache: {**cache},
    "|": lambda cache: cache | {},
    "update": lambda cache: (copied := {}).update(cache) or copied,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "keys and values": lambda cache: dict(zip(cache.keys(), cache.values())),
    "get": lambda cache: {name: cache.get(name) for name in cache},
    "pop": lambda cache: {name: cache.pop(name) for name in list(cache)},
    "setdefault": lambda cache: {name: cache.setdefault(name) for name in cache},
    "popitem": lambda cache: dict(cache.popitem() for _ in range(len(cache))),
}


def test_copied_cache_is_read_at_home(model, reference, tokens, tmp_path):
    options = {"names_filter": RESIDUALS, "return_cache_object": False}
    _, expected = reference.run_with_cache(tokens, **options)
    for copied in COPIES.values():
        _, cache = model.run_with_cache(tokens, **options)
        assert LAST in cache
        assert len(cache) == N_LAYERS
        assert cache.pop("none", None) is cache.get("none") is None
        with pytest.raises(KeyError, match="none"):
            cache.pop("none")
        actual = copied(cache)
        assert_agrees({name: actual[name] for name in expected}, expected, home_of(model))

    torch.save(model.run_with_cache(tokens, **options)[1], tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", map_location="cpu")  # plain dicts and tensors only
    assert_agrees(loaded, expected)
