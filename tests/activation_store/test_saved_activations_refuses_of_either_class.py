"""Misspelt and impossible arguments are refused in a sentence, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from written_by_hand import RESID as WRITTEN
from written_by_hand import write_by_hand

from tl_devicefix import load_activations
from tl_devicefix.activation_store.format import INDEX
from tl_devicefix.activation_store.reader import SavedActivations

RESID, PATTERN = "blocks.3.hook_resid_post", "blocks.1.attn.hook_pattern"
IDS = torch.arange(3, 12)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"names_filter": [RESID, RESID[:-1]]}, "'blocks.3.hook_resid_pos', .* mean 'blocks.3.hook"),
    ({"names_filter": "blocks.*.hook_resid_post"}, "a function such as lambda name"),
    ({"names_filter": "resid_post"}, "did you mean .blocks.0.hook_resid_post., or that of another"),
    ({"names_filter": []}, "names_filter is empty"),
    ({"names_filter": lambda name: False}, "names_filter selects no activation"),
    ({"stop_at_layer": 2}, "no tensor at blocks.3.hook_resid_post: .* raise stop_at_layer=2"),
    ({"names_filters": RESID}, "no argument 'names_filters'; did you mean 'names_filter'"),
    ({"stop_at_layers": 5}, "no argument 'stop_at_layers'; did you mean 'stop_at_layer'"),
    ({"remove_batch_dim": True}, r"no argument 'remove_batch_dim': .*saved.cache\(3\)"),
    ({"attention_mask": torch.ones(2)}, "give batches that are dicts"),
    ({"transform": {RESID: "mean"}}, "'str' object is not callable"),
    ({"transform": {RESID[:-1]: abs}}, "blocks.3.hook_resid_pos, which is not saved; did you mean"),
    ({"transform": lambda a: (a, a)}, r"must return a tensor, but for blocks.3\S* it .* a tuple"),
    ({"transform": lambda a: a.to(torch.complex64)}, "complex64, which"),
    ({"transform": lambda a: a.mean((0, 1))}, r"is \[16\], which has no row for each of 1 exam"),
    ({"dtype": "bfloat17"}, "dtype must be a floating-point torch.dtype or its name, .*'bfloat17'"),
    ({"token_mask": lambda tokens: tokens.tolist()}, "must return a tensor .*, but returned list"),
    ({"token_mask": lambda tokens: tokens[0] > 3}, r"of booleans \[1, 9\].* torch.bool \[9\]"),
    ({"names_filter": PATTERN, "token_mask": "attention_mask"}, f"leave tokens out of {PATTERN}"),
    ({"data": []}, "batches has no batch"),
    ({"data": ["w4 w5"]}, "item 0 of batches is a str: give .* a list of texts"),
    ({"data": [IDS[None] / 2]}, r"must be one or more tokens .* of torch\.float32"),
    ({"data": [torch.zeros(0, 9).long()]}, r"must be one or more tokens .* but is \[0, 9\]"),
    ({"data": [{"content": "w4"}]}, r"with \['content'\]"),
    ({"data": [[torch.ones(2, 9).long()] * 2]}, "item 0 of batches is a list: give"),  # or a mask
    ({"data": [IDS]}, r"is \[9\] of torch\.int64: make batches"),
    ({"data": [{"tokens": IDS[None], "attention_mask": IDS}]}, r"is \[9\], but .* \[1, 9\]"),
    ({"model": 3}, "the model must be a"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_sentence_says_what_is_wrong(options, message, folded_on_one, run, tmp_path):
    options = {"names_filter": RESID, "data": [IDS[None]], **options}
    model = options.pop("model", None) or folded_on_one("llama")
    with pytest.raises((ValueError, TypeError), match=message):
        run(model, options.pop("data"), **options)
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_token_mask_without_tokens_is_refused_at_the_end(folded_on_one, run, tmp_path):
    with pytest.raises(ValueError, match="token_mask leaves out every token"):
        run(folded_on_one("llama"), [IDS[None]] * 2, RESID, token_mask=lambda tokens: tokens < 0)
    assert not load_activations(tmp_path / "out").is_complete


def test_a_directory_without_shards_is_used_again(folded_on_one, run, tmp_path):
    def ends():
        yield IDS[None]
        raise InterruptedError

    model = folded_on_one("llama")
    with pytest.raises(InterruptedError):
        run(model, ends(), RESID)
    assert len(load_activations(tmp_path / "out")) == 0
    name = RESID.replace("post", "pre")
    saved = run(model, [IDS[None]], {name: 1}.keys(), dtype="bfloat16")  # names of any kind
    assert len(saved) == 1
    assert saved[name].dtype == torch.bfloat16


READ: list[tuple[Callable[[SavedActivations], Any], str]] = [
    (lambda h: h.cache("a"), "numbers, slices and lists of numbers, not by str"),
    (lambda h: h.cache([0, 99]), "there is no example 99 among 11"),
    (lambda h: h.cache(0)["embed"], "hook_embed is not in this cache"),
    (lambda h: h[3], "3 was not saved"),
    (lambda h: h["resid_post", 5], "blocks.5.hook_resid_post was not saved; did you mean"),
    (lambda h: h[WRITTEN][11], "no example 11 among 11"),
    (lambda h: h[WRITTEN][3, 5], "indexed by examples only"),
    (lambda h: h[WRITTEN][[True, False]], "not by bool"),
    (lambda h: h.activations(WRITTEN, device="cpuu"), "'cpuu' cannot be used here"),
    (lambda h: h.activations(WRITTEN, batch_size=0), "batch_size must be 1 or more, but is 0"),
    (lambda h: h.activations(WRITTEN).load_state_dict({}), "the state has batch_size=None, but"),
]


def test_what_cannot_be_read(tmp_path):
    h = write_by_hand(tmp_path)
    for read, message in READ:
        with pytest.raises((KeyError, TypeError, IndexError, ValueError), match=message):
            read(h)
    assert torch.equal(h["resid_post", 0][:], h[WRITTEN][:])
    assert torch.equal(h.cache([3, 1])[WRITTEN], h[WRITTEN][[3, 1]])
