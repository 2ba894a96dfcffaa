"""A load that fails or is interrupted, wherever it is, leaves everything as it was before.

The error is kept while the devices are measured, as a notebook keeps the last one: nothing here
empties its frames.
"""

from __future__ import annotations

import inspect
import io
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_lens.loading_from_pretrained as tl_loading
from architectures import ARCHITECTURES, load_hooked
from comparison import assert_same_weights
from torch import nn
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix.simulation.machine import Machine

pytestmark = pytest.mark.usefixtures("hub")  # so that nothing is fetched

FORMS = ("checkpoint", "hf_model")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("stop here"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("Tried to allocate 1.00 GiB."),
}
TL_MODEL = sys.modules[HookedTransformer.__module__]


@pytest.fixture
def n_devices():
    return 3


@pytest.fixture(params=FORMS)
def load(request, hf_models, checkpoints, tokenizer):
    """`load(n_devices=2)`: a tiny GPT-2, by default over three devices."""

    def load(**options):
        options = {"n_devices": 3, **options}
        with redirect_stdout(io.StringIO()):
            if request.param == "checkpoint":
                return HookedTransformer.from_pretrained(checkpoints("gpt2"), **options)
            return load_hooked(ARCHITECTURES["gpt2"], hf_models("gpt2"), tokenizer, **options)

    return load


def settled_threads() -> list[threading.Thread]:
    """The threads there are, once those that an interruption has left to end have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(timeout=5)
    return threading.enumerate()


class AsBefore:
    """What must be as it was: the devices' memory, the user's model, and what is replaced where."""

    def __init__(self, machine: Machine, unchanged: Any) -> None:
        self._machine = machine
        self._unchanged = unchanged
        self._memory = self._memory_now()
        self._objects = self._objects_now()
        self._modes = self._modes_now()

    def _memory_now(self) -> list[int]:
        return [self._machine.memory_allocated(device) for device in self._machine.devices]

    @staticmethod
    def _objects_now() -> dict[tuple[str, str], Any]:
        """Everything in the classes and modules in which something may be replaced for a moment."""
        places = (HookedTransformer, nn.Module, nn.Linear, tl_loading, TL_MODEL)
        return {(place.__name__, name): value for place in places for name, value in _vars(place)}

    @staticmethod
    def _modes_now() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            tl_devicefix.patches.is_enabled(),
            [thread for thread in settled_threads() if type(thread).__name__ != "TMonitor"],
        )  # tqdm keeps a monitor from its first bar on

    def assert_is(self) -> None:
        # The model's memory first: this must not depend on what else is done here.
        assert self._memory_now() == self._memory
        objects = self._objects_now()
        assert objects.keys() == self._objects.keys()
        replaced = [key for key, value in objects.items() if value is not self._objects[key]]
        assert replaced == []
        assert self._modes_now() == self._modes
        self._unchanged.assert_unchanged()


def _vars(place: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(place).items() if name != "__builtins__"]


@pytest.fixture
def as_before(machine, snapshot, hf_models, checkpoints):
    checkpoints("gpt2")  # saving changes the model's config
    return AsBefore(machine, snapshot(hf_models("gpt2")))


def assert_the_next_load_is_right(load: Any, references: Any) -> None:
    model = load()
    assert [str(device) for device in model.placement.devices] == ["sim:0", "sim:1", "sim:2"]
    assert_same_weights(model, references("gpt2"))


# --------------------------------------------------------------------------------------------
# At each stage


_WING = "tl_devicefix.hooked_transformer"
STAGES: dict[str, tuple[str, int]] = {
    "the plan": (f"{_WING}.loading.decide_fitting", 1),
    "constructing the third block": ("transformer_lens.components.TransformerBlock.__init__", 3),
    "reading a component": ("tl_devicefix.checkpoints.sources.HuggingFaceSource.read", 4),
    "folding the last slice": (f"{_WING}.processing.process_component", 13),
    "writing the thirtieth weight": (f"{_WING}.processing.slicing.write", 30),
    "placing the buffers": ("tl_devicefix.placement.fitting.naming_full_devices", 2),
    "aligning the model": (f"{_WING}.moving.settle", 1),
}
"""What to interrupt: a function, and which of its calls."""


@contextmanager
def stopped_at(stage: str, stop: Callable[[], Any]) -> Iterator[list[int]]:
    """Within it, `stop` is called when a call of a stage's function has done what it does.

    Yields a list that has the number of calls.
    """
    target, which = STAGES[stage]
    path, _, name = target.rpartition(".")
    owner: Any = pkgutil.resolve_name(path)
    original, calls, counting = getattr(owner, name), [0], threading.Lock()

    def stopping(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with counting:
            calls[0] += 1
            is_it = calls[0] == which
        if is_it:
            stop()
        return result

    with mock.patch.object(owner, name, stopping):
        yield calls


def raising(error: BaseException) -> Callable[[], None]:
    def stop() -> None:
        raise error

    return stop


@pytest.mark.cover
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_any_stage_leaves_nothing_behind(stage, kind, load, as_before, references):
    error = ERRORS[kind]()

    with stopped_at(stage, raising(error)) as calls, pytest.raises(type(error)) as caught:
        load()

    assert calls[0] >= STAGES[stage][1]  # workers of other devices finish what they have begun
    as_before.assert_is()
    assert caught.value is not None  # it is alive, with all of its traceback
    assert_the_next_load_is_right(load, references)


def test_an_error_that_the_caller_handles_meanwhile_keeps_its_frames(load, machine):
    def look():
        looked_at = "here"
        raise KeyError(looked_at)

    try:
        look()
    except KeyError as error:
        with (
            stopped_at("the plan", raising(RuntimeError("stop here"))),
            pytest.raises(RuntimeError, match="stop here"),
        ):
            load()
        innermost = inspect.getinnerframes(error.__traceback__)[-1].frame
    assert innermost.f_locals == {"looked_at": "here"}


# --------------------------------------------------------------------------------------------
# Out of memory


def test_running_out_of_memory_says_what_was_there(checkpoints):
    directory = checkpoints("gpt2")
    with tl_devicefix.simulate(2):
        placement = tl_devicefix.plan(directory, n_devices=2)
    first, second = map(placement.bytes_on, placement.devices)
    hogs = []

    def take_memory_after_the_plan():
        hogs.append(torch.empty(second, dtype=torch.uint8, device="sim:1"))

    with tl_devicefix.simulate(2, memory=int(max(first, second) * 1.5)) as machine:
        with (
            redirect_stdout(io.StringIO()),
            stopped_at("the plan", take_memory_after_the_plan),
            pytest.raises(torch.OutOfMemoryError) as caught,
        ):
            HookedTransformer.from_pretrained(directory, n_devices=2)

        message = str(caught.value)
        allocated, planned = re.search(  # type: ignore[union-attr]
            r"sim:1.* ran out of memory while blocks\.\d was brought there or processed: "
            r"([\d.]+) KiB of the ([\d.]+) KiB planned for it were there",
            message,
        ).groups()
        assert 0 < float(allocated) < float(planned) == pytest.approx(second / 2**10, rel=0.05)
        assert "requested" in message or "allocate" in message
        assert [machine.memory_allocated(device) for device in (0, 1)] == [0, second]
