"""What was misspelt or cannot be is refused in a sentence, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparison import assert_agrees
from written_by_hand import RESID as WRITTEN
from written_by_hand import write_by_hand

from tl_devicefix import load_activations
from tl_devicefix.activation_store import beginning
from tl_devicefix.activation_store.batches import get_attention_mask
from tl_devicefix.activation_store.loading import SavedActivations

RESID = "blocks.3.hook_resid_post"
IDS = torch.arange(3, 12)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"names_filter": [RESID, "blocks.4.hook_residpost"]},
        "'blocks.4.hook_residpost', which is no hook .* mean 'blocks.4.hook_resid_post'",
    ),
    ({"names_filter": ["blocks.9.hook_resid_post"]}, "is no hook point of this model; did you"),
    ({"names_filter": "resid_post"}, r"mean 'blocks.\d.hook_resid_post'\?: give names of"),
    ({"names_filter": "blocks.*.hook_resid_post"}, "or a function such as lambda name"),
    ({"names_filter": [("resid_post", 2)]}, r"has \('resid_post', 2\), which is no hook"),
    ({"names_filter": []}, "names_filter has no names"),
    ({"names_filter": 3}, "names_filter must be .* but is a int"),
    (
        {"names_filter": [RESID, "blocks.1.hook_resid_post"], "stop_at_layer": 2},
        "no tensor at blocks.3.hook_resid_post: .* stop later than at stop_at_layer=2",
    ),
    ({"names_filters": RESID}, "no argument 'names_filters'; did you mean 'names_filter'"),
    ({"stop_at": 2}, "takes no stop_at: give stop_at_layer"),
    ({"remove_batch_dim": True}, r"takes no remove_batch_dim: .*h.cache\(3\)"),
    ({"transform": "mean"}, "transform must be a function .* but has 'mean'"),
    (
        {"transform": {RESID: "mean"}},
        "transform must be a function .* but has 'mean'",
    ),
    ({"dtype": "bfloat17"}, "dtype='bfloat17' is no floating-point dtype: give one of bf16"),
    ({"token_mask": lambda tokens: tokens.tolist()}, "must return a tensor .* returned a list"),
    (
        {"token_mask": lambda tokens: tokens < 0},
        "token_mask has left out every token",
    ),
    ({"data": [IDS, IDS[1:]]}, "different numbers of tokens: pad all examples to one width"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[each[1] for each in REFUSED])
def test_a_sentence_says_what_is_wrong(
    options: Any, message: str, folded_on_one: Any, run: Any, tmp_path: Path
) -> None:
    given = {"names_filter": RESID, "data": [IDS[None]], **options}
    with pytest.raises((ValueError, TypeError), match=message):
        run(folded_on_one("llama"), given.pop("data"), **given)
    begun = "every token" in message  # it is known at the end only
    assert (tmp_path / "out").exists() == begun


@pytest.mark.parametrize("names", [(RESID,), {RESID: 1}.keys()])
def test_names_of_any_kind_texts_of_a_column_and_a_dtype_by_its_name(
    names: Any, folded_on_one: Any, run: Any
) -> None:
    found = run(folded_on_one("llama"), [{"text": "w4 w5"}], names, dtype="bfloat16")
    assert RESID in found
    assert found[RESID].dtype == torch.bfloat16


def test_tokens_of_numpy(folded_on_one: Any, run: Any) -> None:
    ids = IDS.numpy().astype(np.uint16)
    found = run(folded_on_one("llama"), [ids, {"tokens": ids}], RESID)
    assert torch.equal(found.tokens[:], torch.stack([IDS, IDS]))


def test_texts_of_different_lengths_are_padded_together_before(
    folded_on_one: Any, run: Any
) -> None:
    """As docs/save_activations.md has it."""
    model, texts = folded_on_one("llama"), ["w4 w5 w6", "w7"]
    tokens = model.to_tokens(texts, prepend_bos=True)
    masks = get_attention_mask(model.tokenizer, tokens, True)
    rows = zip(tokens.split(1), masks.split(1))
    found = run(model, [{"tokens": t, "attention_mask": m} for t, m in rows], RESID)

    _, cache = model.run_with_cache(texts, names_filter=RESID, prepend_bos=True)
    assert_agrees(found[RESID][:][masks.bool().cpu()], cache[RESID].cpu()[masks.bool().cpu()])


def test_what_was_begun_and_has_nothing_is_replaced(
    folded_on_one: Any, run: Any, tmp_path: Path
) -> None:
    def ends() -> Any:
        yield IDS[None]
        raise InterruptedError

    model = folded_on_one("llama")
    with pytest.raises(InterruptedError):
        run(model, ends(), RESID)
    assert len(load_activations(tmp_path / "out")) == 0
    assert len(run(model, [IDS[None]], RESID[:8] + RESID[8:].replace("post", "pre"))) == 1


def test_a_lock_that_was_removed_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        beginning.fcntl, "flock", lambda file, how: (tmp_path / beginning.LOCK).unlink()
    )
    with pytest.raises(RuntimeError, match="someone else"), beginning.alone_in(tmp_path):
        pass


def test_a_file_is_no_directory(folded_on_one: Any, run: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match="out is a file: give a directory"):
        run(folded_on_one("llama"), [IDS[None]], RESID)
    with pytest.raises(FileNotFoundError, match="there are no saved activations in"):
        load_activations(tmp_path / "out")


READ: list[tuple[Callable[[SavedActivations], Any], str]] = [
    (lambda h: h.cache("a"), "an example's number, a slice or a list of numbers, not a str"),
    (lambda h: h.cache([0, 99]), "there is no example 99 among 11"),
    (lambda h: h.cache(0)["embed"], "hook_embed was not harvested"),
    (lambda h: h.activations([WRITTEN]), "give the name of one activation, and not a list"),
    (lambda h: h[3], "give the name of one activation, and not a int"),
    (lambda h: h["resid_post", 5], "blocks.5.hook_resid_post was not harvested; did you mean"),
    (lambda h: h.activations(WRITTEN).load_state_dict({}), "give what state_dict.. returned"),
]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    written = write_by_hand(tmp_path)
    for read, message in READ:
        with pytest.raises((KeyError, TypeError, IndexError, ValueError), match=message):
            read(written)
    assert torch.equal(written["resid_post", 0][:], written[WRITTEN][:])
    assert torch.equal(written.cache([3, 1])[WRITTEN], written[WRITTEN][[3, 1]])


def test_a_shard_that_is_cut_off_is_named_where_it_is_read(tmp_path: Path) -> None:
    written = write_by_hand(tmp_path)
    path = tmp_path / written.index.shards[1].file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00001.* is damaged .* activations verify"):
        written[WRITTEN][5]
