"""What is spread is read together at home, or where `gather_on` says, if that has room for it."""

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from comparison import assert_agrees
from devices import device
from hf_models import N_LAYERS
from transformer_lens import ActivationCache

import tl_devicefix
from tl_devicefix import gather_on

CPU = torch.device("cpu")
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_E", "W_U", "b_U")
RESIDUALS = [f"blocks.{i}.hook_resid_post" for i in range(N_LAYERS)]
LAST = RESIDUALS[-1]


@pytest.mark.hooked
def test_gather_on_chooses_the_device_within_its_own_thread(model):
    with gather_on(device(2)):
        assert model.W_Q.device == torch.device(device(2))
        with gather_on(1), ThreadPoolExecutor(1) as threads:
            assert model.OV.A.device == torch.device(device(1))
            assert threads.submit(lambda: model.W_Q.device).result() == model.placement.home
        assert model.W_Q.device == torch.device(device(2))
    missing = f"{model.placement.home.type}:5"
    with pytest.raises(ValueError, match=f"'{missing}' does not exist"), gather_on(missing):
        pass


@pytest.mark.hooked
def test_what_cannot_fit_is_refused_before_anything_is_copied(model, machine, monkeypatch):
    monkeypatch.setattr(machine, "_capacities", [machine.memory_allocated(0) + 1000] * 4)
    machine.reset_transfers()
    message = "all blocks takes .* KiB, but .* has 1000 bytes"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        _ = model.W_in
    assert machine.transfers == []

    # Weights of grouped heads need room for each head's copy too.
    stored = sum(block.attn._W_K.nbytes for block in model.blocks)
    monkeypatch.setattr(machine, "_capacities", [machine.memory_allocated(0) + stored] * 4)
    with pytest.raises(torch.OutOfMemoryError, match=r"all blocks takes .*, but .*:0"):
        _ = model.W_K

    with gather_on("cpu"):
        assert model.W_in.device == CPU
        left = SimpleNamespace(available=1000)
        monkeypatch.setattr(tl_devicefix.gathering.psutil, "virtual_memory", lambda: left)
        with pytest.raises(torch.OutOfMemoryError, match="block by block"):
            _ = model.W_in


@pytest.mark.hooked
def test_cache_sliced_within_gather_on_is_read_at_home_after(model, reference, tokens):
    _, expected = reference.run_with_cache(tokens)
    _, cache = model.run_with_cache(tokens)
    with gather_on("cpu"):
        first = cache.apply_slice_to_batch_dim(0)
        assert first["resid_post", 4].device == CPU
    assert_agrees(first, expected.apply_slice_to_batch_dim(0), model.placement.home)


@pytest.mark.hooked
def test_reading_or_slicing_a_cache_moves_no_stored_activation(model, machine, tokens):
    _, cache = model.run_with_cache(tokens)
    of_slice = cache.apply_slice_to_batch_dim(0).cache_dict
    assert of_slice[LAST].device == model.placement.home
    for name, activation in cache.cache_dict.stored().items():
        assert of_slice.stored()[name].device == activation.device
    before = [machine.memory_allocated(device) for device in machine.devices]
    for name, activation in cache.items():
        assert activation.device == cache[name].device == model.placement.home
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


@pytest.mark.hooked
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
        assert_agrees({name: actual[name] for name in expected}, expected, model.placement.home)

    torch.save(model.run_with_cache(tokens, **options)[1], tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", map_location="cpu")  # plain dicts and tensors only
    assert_agrees(loaded, expected)


def test_reading_elsewhere_takes_no_memory_on_the_home_device(machine, shared):
    model = shared("gpt2", 4, folded=True)

    def made_at_home(device, read):
        before = machine.memory_allocated(0)
        machine.reset_peak_memory_stats(0)
        with gather_on(device):
            read()
        return machine.max_memory_allocated(0) - before

    for name in ("W_Q", "W_in"):
        weight = getattr(model, name)
        assert made_at_home(device(0), lambda name=name: getattr(model, name)) == weight.nbytes
        assert made_at_home("cpu", lambda name=name: getattr(model, name)) == 0
    scores = made_at_home("cpu", lambda: model.all_composition_scores("K"))
    assert scores < model.W_Q.nbytes / 4
    machine.reset_transfers()
    with gather_on("cpu"):
        directions = model.tokens_to_residual_directions(5)
    assert sum(transfer.bytes for transfer in machine.transfers) == directions.nbytes


@pytest.mark.parametrize("n_devices", [1, 4])
def test_analyses_within_gather_on_compute_on_its_device(n_devices, shared, on_one, tokens):
    def computed(model):
        _, cache = model.run_with_cache(tokens.to(model.cfg.device))
        with gather_on("cpu"):
            return [
                [getattr(model, name) for name in WEIGHTS],
                cache.stack_head_results(apply_ln=True),
                dict(cache.items()),
                getattr(scores := model.all_composition_scores("K"), "scores", scores),
                model.accumulated_bias(5),
                model.tokens_to_residual_directions("w5"),
                model.OV.AB,
                dict(model.tl_parameters().items()) if hasattr(model, "tl_parameters") else {},
            ]

    expected = computed(on_one("gpt2", folded=True))
    assert_agrees(computed(shared("gpt2", n_devices, folded=True)), expected, CPU)


def keep(model, tokens, *layers):
    """What hooks have kept in a plain dict, by the hooks' names."""
    kept = {}

    def keeping(name):  # a Bridge's hook points have other names
        return name, lambda activation, hook: kept.update({name: activation.detach()})

    names = [f"blocks.{i}.hook_resid_post" for i in layers or range(model.cfg.n_layers)]
    model.run_with_hooks(tokens.to(model.cfg.device), fwd_hooks=list(map(keeping, names)))
    return kept


@pytest.mark.fails_unpatched
def test_a_plain_dict_is_read_at_home_and_left_as_it_is(shared, machine, tokens):
    model = shared("llama", 4)  # not a fixture: unpatched, the test fails and no fixture does
    kept, home = keep(model, tokens), machine.devices[0]
    as_it_was = {name: (id(value), value.device) for name, value in kept.items()}
    assert {device for _, device in as_it_was.values()} == set(machine.devices)
    _, expected = model.run_with_cache(tokens.to(home))

    cache = ActivationCache(kept, model)

    reads = [cache["resid_post", -1], cache[LAST], [*cache.values()][-1], dict(cache.items())[LAST]]
    assert_agrees(reads, [expected[LAST]] * 4, home)
    stack = expected.stack_activation("resid_post")
    assert_agrees(cache.stack_activation("resid_post"), stack, home)
    assert (cache["resid_post", 4] @ model.W_U).device == home
    assert cache.cache_dict is kept
    assert {name: (id(value), value.device) for name, value in kept.items()} == as_it_was
    of_last = {LAST: kept[LAST]}
    assert ActivationCache(of_last, model)["resid_post", 4].device == home != kept[LAST].device
    with gather_on("cpu"):
        assert {cache["resid_post", 4].device, *(value.device for value in cache.values())} == {CPU}


@pytest.mark.parametrize("device", ["cpu", device(3)])
def test_a_cache_that_was_moved_is_read_where_it_is(model, machine, tokens, device):
    tokens, read_on = tokens.to(model.cfg.device), torch.device(device)
    kept = keep(model, tokens)
    _, cached = model.run_with_cache(tokens)
    machine.reset_transfers()
    moved = cached.to(device)
    assert {transfer.target for transfer in machine.transfers} == {read_on}  # and not home
    for cache in (
        ActivationCache(kept, model).to(device),
        ActivationCache({name: value.to(device) for name, value in kept.items()}, model),
        model.run_with_cache(tokens, device=device)[1],
        moved,
    ):
        assert cache["resid_post", 4].device == read_on
        assert {value.device for value in cache.values()} == {read_on}
        assert cache.stack_activation("resid_post").device == read_on
    of_one_block = ActivationCache(keep(model, tokens, 4), model).to(device)
    assert of_one_block["resid_post", 4].device == read_on


def test_methods_that_change_a_plain_dict_leave_it_where_it_is(model, machine, tokens):
    kept = keep(model, tokens[:1])
    devices = {name: value.device for name, value in kept.items()}
    cache = ActivationCache(kept, model)
    sliced = cache.apply_slice_to_batch_dim(0)
    cache.remove_batch_dim()
    for changed in (sliced, cache):
        assert {name: value.device for name, value in changed.cache_dict.items()} == devices
        assert changed["resid_post", 4].device == machine.devices[0]
        assert changed["resid_post", 4].shape == (tokens.shape[1], model.cfg.d_model)


def test_cache_accepts_any_object_with_weights_as_its_model():
    """As in TransformerLens's own tests: a cache asks its model for weights, not for parameters."""
    block = SimpleNamespace(attn=SimpleNamespace(W_O=torch.ones(2, 4, 8)))
    stub = SimpleNamespace(cfg=SimpleNamespace(n_layers=1, n_heads=2), blocks=[block])
    cache = ActivationCache({"blocks.0.attn.hook_z": torch.ones(1, 3, 2, 4)}, stub)
    cache.compute_head_results()
    assert torch.equal(cache["blocks.0.attn.hook_result"], torch.full((1, 3, 2, 8), 4.0))


@pytest.mark.bridge
@pytest.mark.fails_unpatched
def test_changing_a_deep_copys_dtype_leaves_the_original(load):
    """Hugging Face's `to` of a model over devices is bound to the model that was copied."""
    bridge = load("llama")
    copy.deepcopy(bridge).to(torch.float64)
    assert {parameter.dtype for parameter in bridge.parameters()} == {torch.float32}
