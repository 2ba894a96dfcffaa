"""A misspelt hook point is named with the nearest one, whichever method of a model is given it."""

import pytest
from model_classes import BRIDGE
from parameters import in_turn

from tl_devicefix.monkeypatch.versions import installed

MISSPELT = "blocks.3.hook_resid_pots"
SENTENCE = f"no hook point '{MISSPELT}'; did you mean 'blocks.3.hook_resid_post'"
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
def test_an_unknown_hook_point_is_named_with_the_nearest(name, model_class, model, tokens):
    if model_class == BRIDGE and installed().major < 4:
        with pytest.warns(UserWarning, match=f"a hook does not run: .*{SENTENCE}"):
            ADDING[name](model, tokens)  # which TransformerLens 3 ignores
        return
    with pytest.raises(KeyError, match=SENTENCE) as caught:
        ADDING[name](model, tokens)
    assert str(caught.value).startswith("this model has")


@pytest.mark.parametrize("given", [(MISSPELT, print), [MISSPELT, print], {MISSPELT: print}])
def test_hooks_that_are_no_list_of_pairs_are_refused(given, model, tokens):
    with pytest.raises(TypeError, match=rf"but '{MISSPELT}' is in it: write \[\(name, function"):
        model.run_with_hooks(tokens, fwd_hooks=given)


@pytest.mark.parametrize(
    ("key", "says", "spread"),
    in_turn(
        [
            (("resid_pos", 3), "no hook point 'blocks.3.hook_resid_pos'; did you mean 'blocks.3."),
            (("resid_post", 80), "no hook point 'blocks.80.hook_resid_post'; the model has blocks"),
            ("blocks.80.hook_out", "no hook point 'blocks.80.hook_out'; the model has blocks 0 to"),
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
