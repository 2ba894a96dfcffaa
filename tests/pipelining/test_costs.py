"""What `sweep` and `pipeline_map` add to a run does not grow with the model's blocks."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from hf_models import HF_CONFIGS, make_hf_model, save_checkpoint
from model_classes import load_of

import tl_devicefix
from tl_devicefix.dispatch.scheduler import DeviceQueue
from tl_devicefix.dispatch.views import View, _State

PACKAGE = str(Path(tl_devicefix.__file__).parent)


class Calls:
    """Counts calls into the package."""

    def __init__(self):
        self.count = 0

    def __call__(self, frame, event, argument):
        code = frame.f_code
        # Garbage is collected at any time.
        is_ours = code.co_filename.startswith(PACKAGE) and code.co_name != "__del__"
        self.count += event == "call" and is_ours


def calls_of(call, n_runs):
    counting = Calls()
    threading.setprofile(counting)
    sys.setprofile(counting)
    try:
        call(n_runs)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counting.count


@pytest.fixture
def uncounted(monkeypatch):
    """`uncounted(owner, name)`: calls within a method do not count."""

    def replace(owner, name):
        original = getattr(owner, name)

        def method(*args, **kwargs):
            counting = sys.getprofile()
            sys.setprofile(None)
            try:
                return original(*args, **kwargs)
            finally:
                sys.setprofile(counting)

        monkeypatch.setattr(owner, name, method)

    return replace


@pytest.fixture
def deep(model_class, tokenizer, tmp_path):
    """`deep(18, **options)`: a model of 18 blocks."""

    def load(n_layers, **options):
        config = HF_CONFIGS["llama"]()
        config.num_hidden_layers = n_layers
        directory = save_checkpoint(make_hf_model(config), tokenizer, tmp_path / str(n_layers))
        return load_of(model_class)(str(directory), **options)

    return load


def edit(activation, hook):
    return activation * 2


def test_one_more_run_costs_as_many_calls_at_6_and_18_blocks(machine, deep, tokens, uncounted):
    of_runs = []
    for n_layers in (6, 18):
        model = deep(n_layers, n_devices=2)
        if not of_runs:
            uncounted(type(model), "forward")
            # These are called for each view, and not for each run.
            uncounted(View, "__init__")
            uncounted(View, "kept_setting")
            uncounted(_State, "give_own")
            uncounted(DeviceQueue, "acquire")  # one call more each time that it wakes up
        at_home = tokens.to(model.cfg.device)
        runs = [[(f"blocks.{n_layers // 2}.hook_resid_pre", edit)]] * 4

        def sweep(n, model=model, at_home=at_home, runs=runs):
            list(tl_devicefix.sweep(model, at_home, runs[:n]))

        def pipeline_map(n, model=model, at_home=at_home, runs=runs):
            run = lambda view, hooks: view.run_with_hooks(at_home, fwd_hooks=hooks)  # noqa: E731
            list(tl_devicefix.pipeline_map(model, run, runs[:n]))

        with torch.no_grad():
            model(at_home)  # a Bridge's blocks wire their hooks in the first forward
            of_runs += [calls_of(call, 4) - calls_of(call, 3) for call in (sweep, pipeline_map)]
    assert min(of_runs) > 0
    # The threads' timing decides whether a run gets the view of one that has ended.
    assert of_runs[:2] == pytest.approx(of_runs[2:], abs=8)
