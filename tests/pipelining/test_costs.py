"""What `sweep` and `pipeline_map` add to a run does not grow with the model's blocks."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from hf_models import HF_CONFIGS, make_hf_model, save_checkpoint
from model_classes import load_of
from runs_of_users import double

import tl_devicefix
from tl_devicefix.dispatch.scheduler import DeviceQueue
from tl_devicefix.dispatch.views import View, _State

PACKAGE = str(Path(tl_devicefix.__file__).parent)


def calls_of(call, n_runs):
    """Return how many calls into the package some runs make."""
    calls = []

    def note(frame, event, argument):
        code = frame.f_code
        # Garbage is collected at any time.
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "__del__":
            calls.append(code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call(n_runs)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(calls)


def uncounted(method):
    """Return a method within which calls do not count."""

    def calling(*args, **kwargs):
        counting = sys.getprofile()
        sys.setprofile(None)
        try:
            return method(*args, **kwargs)
        finally:
            sys.setprofile(counting)

    return calling


def test_one_more_run_costs_as_many_calls_at_4_and_14_blocks(
    machine, model_class, tokenizer, tokens, monkeypatch, tmp_path
):
    of_runs, config = [], HF_CONFIGS["llama"]()
    for n_layers in (4, 14):
        config.num_hidden_layers = n_layers
        directory = save_checkpoint(make_hf_model(config), tokenizer, tmp_path / str(n_layers))
        model = load_of(model_class)(str(directory), n_devices=2)
        if not of_runs:
            # Those of views are called for each view, and not for each run.
            methods = [(type(model), "forward"), (View, "__init__"), (View, "kept_setting")]
            # `acquire` makes one call more each time that it wakes up.
            methods += [(_State, "give_own"), (DeviceQueue, "acquire")]
            for owner, name in methods:
                monkeypatch.setattr(owner, name, uncounted(getattr(owner, name)))
        at_home = tokens.to(model.cfg.device)
        runs = [[(f"blocks.{n_layers // 2}.hook_resid_pre", double)]] * 4

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
