"""Fixtures that all tests share: tiny models, the unpatched reference, and a simulated machine."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path

import pytest

import real_devices  # isort: skip  # before what names devices
import torch
from covering import fails_unpatched, is_left_to_others, left_out, parameters_of
from hf_models import D_VOCAB, HF_CONFIGS, make_hf_model, make_tokenizer, save_checkpoint
from hub_cache import HubCache, go_offline
from local_hosts import simulated_by_hosts
from machines import machine, n_devices, simulated  # noqa: F401

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer, installed

if has_hooked_transformer():
    from hooked_fixtures import *  # noqa: F403

# A Bridge's tests of a package are in its folder `transformer_bridge`.
HERE = Path(__file__).parent
SHARED_ROOMS = ("fusing", "planning", "checking", "pipelining")
SHARED_ROOMS += ("offload", "gathering", "dispatch", "racing")
# What is written once for both classes, beside "..._of_either_class".
OF_EITHER = ("test_within_simulate", "test_put_in_by_hand")
OF_BRIDGE = [
    "transformer_bridge",
    *(f"{room}/transformer_bridge" for room in SHARED_ROOMS),
    "surface/test_bridge_sweep.py",
    "twin/test_bridge_twin.py",
]
OF_HOOKED_TRANSFORMER = [
    *("checkpoints", "weight_processing", "hooked_transformer", "parity", "placement"),
    *("libraries/test_sae_lens*.py", "libraries/test_circuit_tracer.py"),
    *(
        str(path.relative_to(HERE))
        for room in SHARED_ROOMS
        for path in sorted((HERE / room).glob("test_*.py"))
        if path.stem not in OF_EITHER and not path.stem.endswith("_of_either_class")
    ),
    "surface/test_sweep.py",
    "twin/test_hooked_twin.py",
]
collect_ignore_glob = [
    *([] if has_bridge() else OF_BRIDGE),
    *([] if has_hooked_transformer() else OF_HOOKED_TRANSFORMER),
    *real_devices.NOT_RUN,
]


def pytest_report_header() -> str:
    left_out = ", ".join(collect_ignore_glob) or "nothing"
    on = f"{real_devices.device_count()} {real_devices.TYPE}" if real_devices.TYPE else "simulated"
    return f"transformer_lens {installed()}, {on} devices; these are not run: {left_out}"


torch.set_num_threads(1)  # the models are tiny, and threads that wait cost more than they save


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, meaning in {
        "--unpatched": "run only tests marked fails_unpatched, without the patches: they fail",
        "--asynchronous": "run tests of simulated devices on devices that run behind the host, "
        "where what nothing orders is an error (tests/racing)",
        "--hosts": "run tests/surface with all blocks but the first device's on other hosts, which "
        "are threads of this process",
        "--full": "run every combination of what tests are parametrised over, and what other "
        "versions run; by default, some run that have every value between them (tests/covering.py)",
    }.items():
        parser.addoption(option, action="store_true", help=meaning)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hosts"):
        tl_devicefix.simulate = simulated_by_hosts  # type: ignore[assignment]
    if real_devices.TYPE and config.getoption("--unpatched"):
        raise pytest.UsageError(
            "--unpatched is for simulated devices: leave TL_DEVICEFIX_TEST_DEVICE out"
        )
    for marker in (
        "fails_unpatched: holds with tl_devicefix and fails without, unless n_devices is 1",
        "full: runs with --full only; its reason says what else runs",
        "cover(*groups): without --full, the combinations of its parameters that run have every "
        "value between them, and every combination of the parameters in a group",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if real_devices.TYPE:
        real_devices.skip_what_names_others(items)
    others: set[pytest.Item] = set()
    if config.getoption("--hosts"):  # of which a model on one device uses none
        others |= {item for item in items if parameters_of(item).get("n_devices") == 1}
    if not config.getoption("--full"):
        others |= {it for it in items if it.get_closest_marker("full") or is_left_to_others(it)}
        others.update(left_out([item for item in items if item not in others]))
    if config.getoption("--unpatched"):
        others |= {item for item in items if not fails_unpatched(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def hf_models():
    """`hf_models("gpt2")`, or `hf_models("gpt2", torch.float64)`: shared, so not to be changed.

    With two dtypes the weights are rounded to the first and then held in the second.
    """

    def make(name, *dtypes):
        with torch.device("cpu"):  # because the first test may have another default device
            return make_hf_model(HF_CONFIGS[name](), *dtypes)

    return cache(make)


@pytest.fixture(scope="session")
def checkpoints(hf_models, tokenizer, tmp_path_factory):
    """`checkpoints("gpt2")` is a directory with the weights of `hf_models("gpt2")`.

    The directory's name says nothing of the architecture.
    """

    def save(name, *dtypes):
        directory = tmp_path_factory.mktemp("checkpoint")
        return save_checkpoint(hf_models(name, *dtypes), tokenizer, directory)

    return cache(save)


@pytest.fixture(scope="session")
def tokens():
    """A batch of two sequences of tokens, on the CPU."""
    return torch.randint(3, D_VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection():
    """Collections need not look at what is there before a module's tests: a third of a second.

    A load that fails collects, and so do tests before they measure what a device holds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_network(tmp_path_factory):
    """Whoever asks the hub is told at once that it cannot be reached.

    No load is tried on a tiny twin either, because that takes as long as loading a tiny model;
    tests/twin does so.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TL_DEVICEFIX_NUMBERS", "ignore")
        go_offline(patch, tmp_path_factory.mktemp("hub"))
        yield


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The default cache of a hub that cannot be reached: empty until `hub.add(...)`."""
    go_offline(monkeypatch, tmp_path / "hub")
    return HubCache(tmp_path / "hub")
