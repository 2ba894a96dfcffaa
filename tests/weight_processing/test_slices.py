"""A component is processed slice by slice, and comes out as if it had been processed whole."""

import copy
from functools import cache

import pytest
import torch
from architectures import NO_PROCESSING, TOYS
from comparison import assert_same_tensors
from hf_models import N_LAYERS
from kinds import load_kind
from model_classes import HOOKED, HookedTransformer
from parameters import in_turn

from tl_devicefix.hooked_transformer.processing import processing_units
from tl_devicefix.weight_processing import slices as slices_module

pytestmark = [pytest.mark.hooked, pytest.mark.usefixtures("hub")]  # so that nothing is fetched

EVERYTHING = 10**9


# --------------------------------------------------------------------------------------------
# What comes out

SIZES = (1, 37, 300, 1500)
"""From the smallest slices that there are to some that hold half a component."""
NAMES = ("gpt2", "qwen2", "mixtral", "gemma-2", "pythia", "olmo-2", "gpt-oss", *TOYS)


@pytest.fixture(scope="module")
def load_in_slices(hf_models, references, tokenizer):
    """`load_in_slices("gpt2", 300)`: the weights in float64, processed so many elements at once."""

    def load(name, elements, **options):
        with pytest.MonkeyPatch.context() as patch:
            for kind in ("ELEMENTS_ON_CPU", "ELEMENTS_ON_DEVICE"):
                patch.setattr(slices_module, kind, elements)
            if name in TOYS:
                toy = references(HOOKED, name)
                cfg = copy.deepcopy(toy.cfg)
                cfg.dtype = torch.float64
                model = HookedTransformer(cfg, move_to_device=False)
                weights = {key: value.double() for key, value in toy.state_dict().items()}
                model.load_and_process_state_dict(weights, **options)
            else:
                options |= {"dtype": torch.float64, "device": "cpu"}
                hf_model = hf_models(name, torch.float64)
                model = load_kind(name, lambda _, made=hf_model: made, tokenizer, **options)
        return dict(model.named_parameters())

    return cache(load)


REFACTORED = {"refactor_factored_attn_matrices": True}


@pytest.mark.parametrize(
    ("name", "elements", "options"),
    [
        *in_turn(NAMES, SIZES, [{}]),
        *in_turn(["bloom", "solu"], [1, 300], [REFACTORED]),
    ],
)
def test_slices_of_any_size_give_what_the_whole_gives(name, elements, options, load_in_slices):
    uncut = load_in_slices(name, EVERYTHING, **options)

    in_slices = load_in_slices(name, elements, **options)

    assert_same_tensors(in_slices, uncut, tolerance=1e-12)


# --------------------------------------------------------------------------------------------
# What is copied


def test_without_steps_a_device_never_holds_more_than_its_share(hf_models, load, machine):
    options = {"dtype": torch.bfloat16, "n_devices": 4, **NO_PROCESSING}
    model = load("qwen2", hf_model=hf_models("qwen2", torch.bfloat16), **options)

    for device in model.placement.devices:
        share = model.placement.bytes_on(device)
        assert machine.max_memory_allocated(device) == machine.memory_allocated(device) == share


def test_while_loading_a_device_holds_its_share_and_a_slice(load, machine, monkeypatch):
    monkeypatch.setattr(slices_module, "ELEMENTS_ON_DEVICE", 200)
    model = load("gpt2", n_devices=4)

    assert len(processing_units(model.cfg)) == N_LAYERS + 3
    for device in model.placement.devices:
        of_a_head = 4 * model.cfg.d_model * model.cfg.d_head * 4
        beyond = machine.max_memory_allocated(device) - model.placement.bytes_on(device)
        # A step makes a few results of a slice's size, and its vectors.
        assert beyond <= 3 * of_a_head
