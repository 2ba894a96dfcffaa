"""Twins of the published models that are known here, on the installed TransformerLens.

A new TransformerLens or transformers is judged here, before its users are.
"""

import pytest
import torch
from packaging.version import Version
from transformers import CONFIG_MAPPING

from tl_devicefix.checkpoints.hub import known_config, known_fields
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.twin import LIMIT, undisturbed

NAMES = {
    str(fields): name
    for name, fields in known_fields().items()
    if fields["model_type"] in CONFIG_MAPPING  # Qwen 1's code comes with its checkpoint
}.values()
"""One name of each config."""


def one_name_of_each(*types):
    """One name of all configs that differ in values of these types alone."""

    def without(fields):
        return str({name: None if type(v) in types else v for name, v in fields.items()})

    return {without(known_fields()[name]): name for name in NAMES}.values()


WITHOUT_SIZES = one_name_of_each(int)
OF_BRIDGES = one_name_of_each(int, float)  # which a Bridge leaves to transformers

FIXED_IN = {"mixtral": "3.0", "phi3": "3.8"}
"""Models that a plain load of a HookedTransformer warns of, until a version of TransformerLens."""

CONVERTED_AGAIN_IN = {"gpt_neox": "3.9", "mixtral": "3.8"}
"""Models of transformers 5 that TransformerLens 3 cannot read, until a version."""


def twin_of_hooked(name):
    """The difference of a HookedTransformer's twin; None if TransformerLens cannot convert it."""
    import transformer_lens.loading_from_pretrained as tl_loading

    from tl_devicefix.hooked_transformer.config import model_config
    from tl_devicefix.hooked_transformer.loading import applicable_steps
    from tl_devicefix.hooked_transformer.twin import difference

    if name not in tl_loading.OFFICIAL_MODEL_NAMES:
        return 0.0
    flags = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    asked = {**dict.fromkeys(flags, True), "refactor_factored_attn_matrices": False}
    options = {"dtype": torch.float32, "device": "cpu", "fold_ln": True}
    cfg = model_config(name, prefer_known=True, **options)
    try:
        return difference(known_config(name), cfg, applicable_steps(cfg, asked), None)
    except ValueError as error:
        if "cannot convert" not in str(error):
            raise
        return None


def until(versions):
    return {kind for kind, version in versions.items() if installed() < Version(version)}


@pytest.mark.hooked
def test_twins_of_known_models_as_HookedTransformer(pytestconfig):
    names = NAMES if pytestconfig.getoption("--full") else WITHOUT_SIZES
    with undisturbed():
        found = {name: twin_of_hooked(name) for name in names}
    unread = until(CONVERTED_AGAIN_IN) if installed() >= Version("3") else set()
    assert {kind_of(name) for name, far in found.items() if far is None} == unread
    wrong = {kind_of(name) for name, far in found.items() if far is not None and not far <= LIMIT}
    assert wrong == until(FIXED_IN)


def kind_of(name):
    return known_fields()[name]["model_type"]


@pytest.mark.bridge
@pytest.mark.parametrize(
    "compatibility",
    [
        pytest.param(None, id="as booted", marks=pytest.mark.full("the same, less folding")),
        pytest.param({}, id="compatibility mode"),
    ],
)
def test_twins_of_known_models_as_TransformerBridge(compatibility):
    from tl_devicefix.transformer_bridge.twin import difference

    with undisturbed():
        found = {name: difference(known_config(name), name, compatibility) for name in OF_BRIDGES}
    assert {name: far for name, far in found.items() if not far <= LIMIT} == {}
