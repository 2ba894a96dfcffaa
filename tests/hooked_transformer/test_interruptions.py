"""A load that fails or is interrupted, wherever it is, leaves everything as it was before."""

import contextlib
import itertools
import pkgutil
import re
import sys
import threading
from unittest import mock

import pytest
import torch
from comparison import Snapshot, assert_same_weights
from devices import device
from model_classes import HookedTransformer
from parameters import in_turn
from torch import nn
from transformer_lens import loading_from_pretrained as tl_loading

import tl_devicefix

pytestmark = [pytest.mark.hooked, pytest.mark.usefixtures("hub")]  # so that nothing is fetched

TL_MODEL = sys.modules[HookedTransformer.__module__]
PLACES = (HookedTransformer, nn.Module, nn.Linear, tl_loading, TL_MODEL)
"""Classes and modules in which something may be replaced for a moment."""


@pytest.fixture
def n_devices():
    return 3


@pytest.fixture(params=["checkpoint", "hf_model"])
def load(request, checkpoints, load):
    """`load()`: a tiny GPT-2 over three devices."""
    if request.param == "hf_model":
        return lambda: load("gpt2", n_devices=3)
    return lambda: HookedTransformer.from_pretrained(checkpoints("gpt2"), n_devices=3)


@pytest.fixture
def state(machine):
    """`state()`: what must be as it was: memory, settings, threads, and what is replaced where."""

    def state():
        # Memory first: it must not depend on what else is done here.
        memory = [machine.memory_allocated(device) for device in machine.devices]
        for thread in threading.enumerate():
            if thread.name.startswith("ThreadPoolExecutor"):
                thread.join(timeout=5)  # which an interruption has left to end
        replaced = {
            (place.__name__, name): id(value)
            for place in PLACES
            for name, value in vars(place).items()
        }
        threads = [t for t in threading.enumerate() if type(t).__name__ != "TMonitor"]  # tqdm's
        settings = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
        return memory, replaced, threads, settings, tl_devicefix.patches.is_enabled()

    return state


_WING = "tl_devicefix.hooked_transformer"
STAGES = {
    "the plan": (f"{_WING}.loading.decide_fitting", 1),
    "reading a component": ("tl_devicefix.checkpoints.sources.HuggingFaceSource.read", 4),
    "folding the last slice": (f"{_WING}.processing.process_component", 13),
    "writing the thirtieth weight": ("tl_devicefix.weight_processing.slices.write", 30),
    "aligning the model": (f"{_WING}.moving.settle", 1),
}
"""What to interrupt: a function, and which of its calls."""


@contextlib.contextmanager
def stopped_at(stage, stop):
    """Within it, `stop` is called when a call of a stage's function has done what it does."""
    target, which = STAGES[stage]
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original, calls = getattr(owner, name), itertools.count(1)

    def stopping(*args, **kwargs):
        result = original(*args, **kwargs)
        if next(calls) == which:
            stop()
        return result

    with mock.patch.object(owner, name, stopping):
        yield


@pytest.mark.parametrize(
    ("stage", "kind", "load"),
    in_turn(STAGES, [KeyboardInterrupt, torch.OutOfMemoryError], ["checkpoint", "hf_model"]),
    indirect=["load"],
)
def test_an_error_at_any_stage_leaves_nothing_behind(
    stage, kind, load, state, hf_models, checkpoints, on_one
):
    checkpoints("gpt2")  # saving changes the model's config
    reference = on_one("gpt2")
    unchanged, before = Snapshot(hf_models("gpt2")), state()

    stop = mock.Mock(side_effect=kind("stop here"))
    with stopped_at(stage, stop), pytest.raises(kind) as caught:
        load()

    assert state() == before
    unchanged.assert_unchanged()
    assert caught.value is not None  # it is alive with all of its traceback, as in a notebook
    model = load()
    assert [str(device) for device in model.placement.devices] == [device(0), device(1), device(2)]
    assert_same_weights(model, reference)


def test_out_of_memory_error_names_the_device_and_its_plan(checkpoints):
    directory = checkpoints("gpt2")
    with tl_devicefix.simulate(2):
        placement = tl_devicefix.plan(directory, n_devices=2)
    first, second = map(placement.bytes_on, placement.devices)
    hogs = []

    def take_memory_after_the_plan():
        hogs.append(torch.empty(second, dtype=torch.uint8, device="sim:1"))

    with tl_devicefix.simulate(2, memory=int(max(first, second) * 1.5)) as machine:
        with (
            stopped_at("the plan", take_memory_after_the_plan),
            pytest.raises(torch.OutOfMemoryError, match=r"requested|allocate") as caught,
        ):
            HookedTransformer.from_pretrained(directory, n_devices=2)

        says = r"sim:1 ran out of memory while blocks\.\d was brought .*, with ([\d.]+) KiB planned"
        (planned,) = re.findall(says, str(caught.value))
        assert float(planned) == pytest.approx(second / 2**10, rel=0.05)
        assert [machine.memory_allocated(device) for device in (0, 1)] == [0, second]
