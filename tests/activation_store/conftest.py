"""Models over the devices of a machine that is open for a whole module, and what they run on."""

from __future__ import annotations

import pytest
import transformers.utils.logging as hf_logging

from tl_devicefix import save_activations


@pytest.fixture
def batches(tokens):
    """Five batches, the last of which has one example."""
    return [*(tokens.roll(shift, 1) for shift in range(4)), tokens[:1].roll(4, 1)]


@pytest.fixture
def run(tmp_path):
    """`run(model, batches, ...)` saves to `tmp_path / "out"`."""

    def run(model, batches, *args, **options):
        return save_activations(
            model, batches, *args, directory=tmp_path / "out", progress=False, **options
        )

    return run


@pytest.fixture
def bars():
    """Progress bars are shown, whatever a command has chosen before."""
    were_shown = hf_logging.is_progress_bar_enabled()
    hf_logging.enable_progress_bar()
    yield
    if not were_shown:
        hf_logging.disable_progress_bar()
