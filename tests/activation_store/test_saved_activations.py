"""`save_activations` of a model of either class: what is read back, and what is refused."""

import threading
from functools import partial

import datasets
import numpy
import pytest
import torch
from comparison import assert_agrees, assert_bit_equal
from hf_models import padded
from racing import asynchronous
from torch.utils.data import DataLoader, TensorDataset
from transformer_lens import ActivationCache
from written_by_hand import RESID as WRITTEN
from written_by_hand import write_by_hand

from tl_devicefix import save_activations
from tl_devicefix.activation_store.format import INDEX

RESID = "blocks.3.hook_resid_post"


@pytest.fixture
def batches(tokens):
    """Five batches, the last of which has one example."""
    return [*(tokens.roll(shift, 1) for shift in range(4)), tokens[:1].roll(4, 1)]


@pytest.fixture
def run(tmp_path):
    """`run(model, batches, ...)` saves to `tmp_path / "out"`."""
    return partial(save_activations, directory=tmp_path / "out", progress=False)


def cache_of(model, batches, **options):
    return model.run_with_cache(torch.cat(batches).to(model.cfg.device), **options)[1]


@pytest.fixture(scope="module")
def machine():
    """Devices that compute later than they are told to, with streams and pinned memory."""
    with asynchronous(4) as machine:
        yield machine


def test_saved_activations_equal_a_loops_bit_for_bit(machine, load, batches, run):
    model = load("llama", 4, folded=True)
    names = [name for name in model.hook_dict if name.endswith(("resid_post", "pattern"))]
    expected = [model.run_with_cache(batch, names_filter=names)[1] for batch in batches]

    result = run(model, batches, names, shard_size=8000)

    assert len(result.index.shards) > 2
    assert result.names == [name for name in expected[0] if name in names]  # but for aliases
    assert result.is_complete
    for name in result.names:
        in_memory = [cache[name].cpu() for cache in expected]
        assert_bit_equal(result[name][:], torch.cat(in_memory))
    assert torch.equal(result.tokens[:], torch.cat(batches))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("activations", "pipeline_map"))]


def test_a_cache_of_saved_activations_is_as_one_in_memory(machine, load, batches, run):
    """As docs/save_activations.md has it."""
    model = load("llama", 4, folded=True)
    saved = run(model, batches[:2])
    in_memory = cache_of(model, batches[:2])
    rows = {name: saved[name][:] for name in saved.names}
    cache = ActivationCache(rows, model).to(model.cfg.device)
    for read in (
        lambda cache: cache.decompose_resid(mode="all", return_labels=True),
        lambda cache: [cache.compute_head_results(), cache["result", 3]][1],
        lambda cache: [cache["resid_post", -1], cache["z", 3], cache["embed"]],
    ):
        assert_agrees(read(cache), read(in_memory), machine.devices[0])


def test_masks_reach_the_forward_and_are_stored(machine, load, tokens, run):
    model, mask = load("llama"), padded(tokens)
    _, cache = model.run_with_cache(tokens, attention_mask=mask, names_filter=RESID)
    items = [{"input_ids": tokens, "attention_mask": mask}] * 2
    result = run(model, items, RESID, stop_at_layer=4)
    # But for what is seen by nothing.
    assert_agrees(result[RESID][:2][mask.bool()], cache[RESID].cpu()[mask.bool()])
    assert torch.equal(result.masks[:], torch.cat([mask.bool()] * 2))


@pytest.mark.once
def test_loaders_and_datasets_are_batched_and_saved(on_one, batches, tmp_path):
    model, tokens = on_one("llama", folded=True), torch.cat(batches)
    dataset = datasets.Dataset.from_dict({"input_ids": tokens.tolist()})
    without_a_length = dataset.with_format("torch").to_iterable_dataset()
    expected = cache_of(model, batches)[RESID].cpu()
    for number, source in enumerate(
        (
            dataset.iter(3),
            DataLoader(TensorDataset(tokens), batch_size=3),
            DataLoader([{"input_ids": x, "attention_mask": x * 0 + 1} for x in tokens], 3),
            DataLoader(without_a_length, batch_size=3),
        )
    ):
        directory = tmp_path / str(number)
        result = save_activations(model, source, RESID, directory=directory, progress=False)
        assert torch.equal(result.tokens[:], tokens)
        assert_agrees(result[RESID][:], expected)


@pytest.mark.bridge
def test_batches_are_moved_to_a_bridge_on_one_device(machine, load, batches, run, tmp_path):
    model, home = load("llama", n_devices=1), machine.devices[0]
    loader = DataLoader([{"input_ids": x, "attention_mask": x * 0 + 1} for x in batches[0]], 2)
    expected = cache_of(model, [batches[0].to(home)])[RESID].cpu()
    for n, source in enumerate(([batches[0].tolist()], loader)):
        assert_agrees(run(model, source, RESID, directory=tmp_path / f"{n}")[RESID][:], expected)


def test_transform_and_dtype_act_on_the_activations_device(machine, load, batches, run):
    """A dict transforms the names that it has."""
    model = load("llama")
    n_rows = []
    seen = set()
    logits, expected = model.run_with_cache(torch.cat(batches).to(model.cfg.device))
    names = [RESID, "blocks.1.hook_resid_post"]

    def mean(activation):
        seen.add(activation.device)
        n_rows.append(len(activation))
        return activation.mean(1)

    with torch.enable_grad():
        result = run(model, batches, names, transform={RESID: mean}, dtype=torch.bfloat16)
        assert torch.is_grad_enabled()

    assert_bit_equal(result[RESID][:], expected[RESID].mean(1).bfloat16().cpu())
    assert_bit_equal(result[names[1]][:], expected[names[1]].bfloat16().cpu())
    assert seen == {model.placement.device_of(RESID)}
    assert sorted(n_rows) == sorted(map(len, batches))  # each batch runs once
    assert torch.equal(model(torch.cat(batches)), logits)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


@pytest.mark.once
def test_token_mask_leaves_tokens_out(on_one, batches, run):
    model, tokens = on_one("llama", folded=True), torch.cat(batches)
    expecteds = tokens % 3 != 0
    expected = cache_of(model, batches)[RESID].cpu()

    result = run(model, batches, RESID, token_mask=lambda tokens: tokens % 3 != 0, shard_size=2000)

    assert len(result.index.shards) > 1
    assert torch.equal(result.token_mask[:], expecteds)
    assert_agrees(result[RESID][:], expected[expecteds])
    assert_agrees(result[RESID][4], expected[4][expecteds[4]])
    assert_agrees(result[RESID][2:5], expected[2:5][expecteds[2:5]])
    picked = result[RESID][[5, 1]]
    assert_agrees(picked, torch.cat([expected[i][expecteds[i]] for i in (5, 1)]))
    rows = torch.cat(list(result.activations(RESID, 5, shuffle=False)))
    assert_agrees(rows, expected[expecteds])


PATTERN = "blocks.1.attn.hook_pattern"


@pytest.mark.once
def test_a_transform_may_give_an_activation_its_tokens(on_one, batches, run):
    options = {"transform": lambda pattern: pattern.mean(1)}  # [batch, head, query, key]
    options["token_mask"] = lambda tokens: tokens % 3 != 0
    result = run(on_one("llama"), batches[:1], PATTERN, **options)
    assert len(result[PATTERN][0]) == (batches[0][0] % 3 != 0).sum()


@pytest.mark.once
def test_a_transform_in_place_is_seen_in_inference_mode(on_one, batches, run):
    with torch.inference_mode(), pytest.raises(ValueError, match="in place, which other names"):
        run(on_one("llama"), batches[:1], RESID, transform=lambda a: a.mul_(2))


IDS = torch.arange(3, 12)
REFUSED = [
    ({"names_filter": [RESID, RESID[:-1]]}, "'blocks.3.hook_resid_pos', which is no hook"),
    ({"names_filter": "blocks.*.hook_resid_post"}, "lambda name: name.endswith"),
    ({"names_filter": []}, "names_filter selects no activation"),
    ({"stop_at_layer": 2}, "no tensor at blocks.3.hook_resid_post: .* raise stop_at_layer"),
    ({"names_filters": RESID}, "no argument 'names_filters'; did you mean 'names_filter'"),
    ({"remove_batch_dim": True}, "no argument 'remove_batch_dim': batches have the tokens"),
    ({"transform": {RESID[:-1]: abs}}, "transform has blocks.3.hook_resid_pos, which is not saved"),
    ({"token_mask": "mask"}, "token_mask must be 'attention_mask' or a function, not 'mask'"),
    ({"transform": lambda a: a.mean((0, 1))}, r"is \[16\], which has no row for each of 1 exam"),
    ({"past_key_values": []}, "would grow from batch to batch|no argument .past_key_values."),
    ({"past_kv_cache": []}, "would grow from batch to batch|no argument .past_kv_cache."),
    ({"transform": lambda a: a.zero_()}, f"transform changed {RESID} in place"),
    ({"transform": lambda a: None}, f"transform must return a tensor, but returned None: {RESID}"),
    ({"transform": lambda a: a + 0j}, f"{RESID} is complex64: give one of the dtypes float64"),
    ({"dtype": "bfloat17"}, "dtype must be a floating-point torch.dtype or its name, .*'bfloat17'"),
    ({"token_mask": lambda tokens: tokens[0] > 3}, r"of booleans \[1, 9\].* torch.bool \[9\]"),
    ({"names_filter": PATTERN, "token_mask": lambda t: t > 3}, f"leave tokens out of {PATTERN}"),
    ({"token_mask": "attention_mask"}, "batches with an attention_mask, but item 0 has none"),
    ({"data": []}, "batches has no batch"),
    ({"data": 5}, "'int' object is not iterable"),
    ({"data": ["w4 w5"]}, r"item 0 of batches is a str: give .* model.to_tokens\(texts\)"),
    ({"data": [IDS[None] / 2]}, r"is a tensor \[1, 9\] of torch\.float32"),
    ({"data": [{"content": "w4"}]}, r"with \['content'\]"),
    ({"data": [[torch.ones(2, 9).long()] * 2]}, "item 0 of batches is a list: give"),  # or a mask
    ({"data": [IDS]}, r"is a tensor \[9\] of torch\.int64"),
    ({"data": [{"tokens": IDS[None], "attention_mask": IDS}]}, r"is \[9\], but .* \[1, 9\]"),
    ({"data": [{"tokens": IDS[None], "position_ids": IDS[None]}]}, "position_ids, which are not"),
    ({"data": [{"tokens": ["w4"]}]}, r"with \['tokens'\]"),
    ({"model": 3}, "the model must be a"),
]


@pytest.mark.once
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_arguments_are_refused_before_an_index_is_written(
    options, message, on_one, run, tmp_path
):
    options = {"names_filter": RESID, "data": [IDS[None]], **options}
    model = options.pop("model", None) or on_one("llama", folded=True)
    with pytest.raises((ValueError, TypeError), match=message):
        run(model, options.pop("data"), **options)
    assert not (tmp_path / "out" / INDEX).exists()


READ = [
    (lambda h: h[WRITTEN]["a"], "only integers, slices"),
    (lambda h: h[WRITTEN][[0, 99]], "index 99 is out of bounds"),
    (lambda h: h[3], "3 was not saved"),
    (lambda h: h["resid_post", 5], "blocks.5.hook_resid_post was not saved: see saved.names"),
    (lambda h: h[WRITTEN][11], "has .* examples, and no example 11"),
    (lambda h: h[WRITTEN][3, 5], "indexed by examples only"),
    (lambda h: h[WRITTEN][..., 0], "indexed by examples only"),
    (lambda h: h[WRITTEN][[True, False]], "boolean index did not match"),
    (lambda h: h.activations(WRITTEN, -1, epochs=None), "batch_size must be 1 or more, but is -1"),
    (lambda h: h.activations(WRITTEN, 2, epochs=0), "epochs must be 1 or more, but is 0"),
    (lambda h: h[WRITTEN][True], "is indexed by examples, but True is none: write a number"),
    (lambda h: h.activations(WRITTEN).load_state_dict({}), "the state has batch_size=None, but"),
]


@pytest.mark.once
def test_unreadable_names_and_indices_are_refused(tmp_path):
    h = write_by_hand(tmp_path)
    for read, message in READ:
        with pytest.raises((KeyError, TypeError, IndexError, ValueError), match=message):
            read(h)
    assert torch.equal(h["resid_post", 0][:], h[WRITTEN][:])
    assert torch.equal(h[WRITTEN][[3, 1]], h[WRITTEN][[numpy.int64(3), 1]])
