"""A long KV cache grows in place, and reads as TransformerLens's own does."""

import copy

import pytest
import torch
from comparison import assert_agrees
from hf_models import padded
from kinds import new_kv_cache
from parameters import in_turn

import tl_devicefix
from tl_devicefix.hooked_transformer import fused as fused_module

pytestmark = [pytest.mark.hooked, pytest.mark.fuses]
N_TOKENS = 14
KINDS = ["llama", "gpt2", "gpt-neo", "pythia"]  # grouped, not rotary, local, rotary in part


@pytest.fixture(scope="module")
def text():
    return torch.randint(3, 40, (2, N_TOKENS), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def grow_from_the_start(monkeypatch):
    """Short caches are made anew for each token, by default."""
    monkeypatch.setattr("tl_devicefix.fusing.kv_cache.GROWS_FROM", 0)


MASKS = {"all": torch.ones(2, N_TOKENS, dtype=torch.long)}
MASKS["padded"] = padded(MASKS["all"], slice(2, 5))  # in one sequence, behind two tokens


def read(model, text, mask, step=None):
    """Read a text with a cache: some tokens, then one by one, then three; the logits.

    `step(cache, at)` is called before each part.
    """
    cache, logits, at = new_kv_cache(model, len(text)), [], 0
    for n in (6, *[1] * (N_TOKENS - 9), 3):
        if step is not None:
            step(cache, at)
        part = slice(at, at + n)
        logits.append(model(text[:, part], past_kv_cache=cache, attention_mask=mask[:, part]))
        at += n
    return logits, cache


def assert_as_installed(model, run):
    """A run gives what the installed TransformerLens does."""
    with tl_devicefix.disabled():
        expected = run(model)
    assert_agrees(run(model), expected)


def assert_grows_as_installed(model, text, mask, step=None):
    """The logits of a text, and what is in the cache afterwards, are the same either way."""

    def run(model):
        logits, cache = read(model, text, mask.clone(), step)
        contents = [(entry.past_keys, entry.past_values) for entry in cache.entries]
        return [logits, contents, cache.previous_attention_mask, getattr(cache, "cut", [])]

    assert_as_installed(model, run)


@pytest.mark.parametrize(
    ("name", "inference", "mask"), in_turn(KINDS, [False, True], ["all", "padded"])
)
def test_growing_cache_gives_installed_logits_and_entries(name, inference, mask, fused, text):
    model = fused(name)
    with torch.inference_mode() if inference else torch.no_grad():
        assert_grows_as_installed(model, text, MASKS[mask])


def test_new_keys_are_appended_in_place_and_rotated_once(fused, text, monkeypatch):
    model, places, rotated = fused("llama"), set(), []
    attention = model.blocks[0].attn
    original = fused_module._rotated

    def rotate(attn, x, *args):
        if attn is attention and x.shape[2] == 2:  # keys, of which there are two heads
            rotated.append(x.shape[1])
        return original(attn, x, *args)

    def look(cache, at):
        places.add(cache[0].past_keys.data_ptr())

    monkeypatch.setattr(fused_module, "_rotated", rotate)
    with torch.no_grad():
        read(model, text, MASKS["all"], look)

    assert len(places) == 2  # empty, and with room for all
    assert rotated == [6, *[1] * (N_TOKENS - 9), 3]


@torch.no_grad()
def test_cache_grows_beyond_its_reserved_room(fused, text, monkeypatch):
    monkeypatch.setattr("tl_devicefix.fusing.kv_cache.MIN_ROOM", 2)
    assert_grows_as_installed(fused("gpt2"), text, MASKS["padded"])


def replace_values(cache):
    cache[0].past_values = cache[0].past_values * 2


def replace_mask(cache):
    cache.previous_attention_mask = cache.previous_attention_mask.clone()
    cache.previous_attention_mask[1, 1] = 0


def cut(cache):
    cache.cut = [entry.past_keys for entry in cache.entries]  # they stay as they are
    for entry in cache.entries:
        entry.past_keys, entry.past_values = entry.past_keys[:, :5], entry.past_values[:, :5]
    cache.previous_attention_mask = cache.previous_attention_mask[:, :5]


BY_HAND = {
    "edit keys": (9, lambda cache: cache[1].past_keys[:, 2].fill_(0.5)),
    "replace values": (9, replace_values),
    "edit the mask": (9, lambda cache: cache.previous_attention_mask[1, 1].fill_(0)),
    "replace the mask": (9, replace_mask),
    "cut": (9, cut),
    "freeze for a while": (N_TOKENS - 3, lambda cache: cache.freeze()),
}
"""Before which token a cache is changed, and how."""


@pytest.mark.parametrize(
    ("how", "mask", "mode"),
    in_turn(BY_HAND, ["all", "padded"], [torch.no_grad, torch.inference_mode]),
)
def test_cache_changed_by_hand_grows_as_the_installed_one(how, mask, mode, fused, text):
    model, (token, change) = fused("llama"), BY_HAND[how]

    def step(cache, at):
        if at == token:
            change(cache)

    with mode():
        assert_grows_as_installed(model, text, MASKS[mask], step)


@torch.no_grad()
@pytest.mark.parametrize("of", [lambda value: value, lambda value: value.data], ids=["it", "data"])
def test_hook_editing_rotated_keys_acts_as_installed(of, fused, text):
    def edit(value, hook):
        of(value)[:, 1] += 1

    def run(model):
        with model.hooks(fwd_hooks=[("blocks.1.attn.hook_rot_k", edit)]):
            return read(model, text, MASKS["all"])[0]

    assert_as_installed(fused("llama"), run)


@torch.no_grad()
def test_rotated_keys_that_were_cached_stay_when_keys_are_edited(fused, text):
    model = fused("llama")
    cache = new_kv_cache(model, 2)
    model(text[:, :6], past_kv_cache=cache)
    options = {"names_filter": "blocks.0.attn.hook_rot_k", "past_kv_cache": cache}
    _, kept = model.run_with_cache(text[:, 6:7], **options)
    before = kept["rot_k", 0].clone()
    cache[0].past_keys.mul_(2)
    model(text[:, 7:8], past_kv_cache=cache)
    assert torch.equal(kept["rot_k", 0], before)


def shallow(cache):
    """A cache with entries of its own that have the same tensors."""
    copied = copy.copy(cache)
    copied.entries = [copy.copy(entry) for entry in cache.entries]
    return copied


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [shallow, copy.deepcopy])
def test_copied_cache_continues_two_texts_from_one_beginning(duplicate, fused, text):
    model, other = fused("llama"), text.flip(1)
    together = [torch.cat([text[:, :6], tokens[:, 6:9]], dim=1) for tokens in (text, other)]
    expected = [model(tokens)[:, 6:] for tokens in together]

    first = new_kv_cache(model, 2)
    everything = torch.ones_like(text[:, :1])
    model(text[:, :6], past_kv_cache=first, attention_mask=everything.expand(-1, 6))
    second = duplicate(first)
    actual = [[], []]
    for at in range(6, 9):
        for logits, cache, tokens in zip(actual, (first, second), (text, other)):
            options = {"past_kv_cache": cache, "attention_mask": everything}
            logits.append(model(tokens[:, at : at + 1], **options))

    assert_agrees([torch.cat(logits, dim=1) for logits in actual], expected)


def test_autograd_graph_keeps_its_keys_while_the_cache_grows(fused, text):
    model = fused("llama")
    cache = new_kv_cache(model, 2)
    with torch.no_grad():
        model(text[:, :6], past_kv_cache=cache)
        keys = cache[0].past_keys
        weight = torch.ones(keys.shape[-1], requires_grad=True)
        with torch.enable_grad():
            weighed = (keys * weight).sum()
        model(text[:, 6:7], past_kv_cache=cache)

    (gradient,) = torch.autograd.grad(weighed, weight)
    assert_agrees(gradient, keys.sum(dim=(0, 1, 2)))


def test_growing_cache_gives_installed_gradients(fused, text):
    def run(model):
        logits = torch.cat(read(model, text, MASKS["all"])[0], dim=1)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.autograd.grad(model.loss_fn(logits, text), weights, allow_unused=True)

    assert_as_installed(fused("llama"), run)
