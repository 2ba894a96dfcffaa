"""A misspelt hook point is named, whichever method of a model is given it."""

import warnings

import pytest
from model_classes import BRIDGE, HOOKED
from parameters import in_turn

from tl_devicefix.monkeypatch.versions import installed

MISSPELT = "blocks.3.hook_resid_pots"
SENTENCE = f"this model has no hook point '{MISSPELT}'; see model.hook_dict"
HOOKS = [(MISSPELT, print)]


@pytest.fixture
def model(model_class, on_one, kind):
    return on_one(kind)


def within_hooks(model, tokens):
    with model.hooks(bwd_hooks=HOOKS):
        pass


ADDING = {
    "run_with_hooks": lambda model, tokens: model.run_with_hooks(tokens, fwd_hooks=HOOKS),
    "hooks": within_hooks,
}


@pytest.mark.parametrize("name", ADDING)
def test_an_unknown_hook_point_is_named(name, model_class, model, tokens):
    if model_class == BRIDGE and installed().major < 4:
        with pytest.warns(UserWarning, match=f"a hook does not run: .*{SENTENCE}"):
            ADDING[name](model, tokens)  # which TransformerLens 3 ignores
        return
    with pytest.raises(KeyError, match=SENTENCE):
        ADDING[name](model, tokens)


@pytest.mark.parametrize("given", [(MISSPELT, print), [MISSPELT, print], {MISSPELT: print}])
def test_hooks_that_are_no_list_of_pairs_are_refused(given, model, tokens):
    with pytest.raises(TypeError, match=rf"but '{MISSPELT}' is in it: write \[\(name, function"):
        model.run_with_hooks(tokens, fwd_hooks=given)


@pytest.mark.parametrize(
    ("key", "says", "spread"),
    in_turn(
        [
            (("resid_post", 80), "no hook point 'blocks.80.hook_resid_post'; see model.hook_dict"),
            (("result", 3), r"cache.keys\(\): .* or a setting such as model.set_use_attn_result\("),
            (
                "blocks.3.hook_resid_pre",
                "not in this cache, see cache.keys.*: names_filter or stop_at",
            ),
        ],
        [1, 4],
    ),
)
def test_activations_that_are_not_cached_are_named_with_why(
    key, says, spread, shared, kind, tokens
):
    model = shared(kind, spread)
    at_home = tokens.to(model.cfg.device)
    _, cache = model.run_with_cache(at_home, names_filter=lambda name: "resid_post" in name)
    with pytest.raises(KeyError, match=says):
        cache[key]


@pytest.mark.parametrize(
    ("names_filter", "says"),
    [
        ([MISSPELT, "hook_embed"], SENTENCE),
        (lambda name: name == MISSPELT, "names_filter selects no hook point"),
    ],
)
def test_names_filter_of_unknown_names_warns(names_filter, says, model, tokens):
    with pytest.warns(UserWarning, match=says):
        model.run_with_cache(tokens, names_filter=names_filter)


@pytest.mark.parametrize("names_filter", [None, "hook_embed", ["blocks.3.hook_resid_post"]])
def test_names_filter_of_known_names_does_not_warn(names_filter, model_class, model, tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.run_with_cache(tokens, names_filter=names_filter)
        if model_class == HOOKED or installed().major > 3:
            model.get_caching_hooks(names_filter)
        model.run_with_hooks(tokens, fwd_hooks=[(lambda name: False, print)])
