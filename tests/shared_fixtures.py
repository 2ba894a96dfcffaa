"""Fixtures that all tests share: tiny models, the unpatched reference, and a simulated machine."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# On CPUs with AVX512-BF16, bitsandbytes warns when it is imported (by TransformerLens, below) that
# an optional kernel is missing. We silence it, because workers of pytest-xdist print it after the
# summary, where it reads like the reason of a failure.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# ruff: noqa: E402

import devices
import torch
import transformers.utils.logging as hf_logging
from comparison import Snapshot, in_use
from hf_models import (
    D_VOCAB,
    HF_CONFIGS,
    balanced_map,
    make_hf_model,
    make_tokenizer,
    save_checkpoint,
)
from hub_cache import HubCache, go_offline
from local_hosts import simulated_by_hosts
from model_classes import BRIDGE, CLASSES, FUSES_SINCE, HOOKED
from offloads import DEVICE_MAPS
from racing import asynchronous

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer, installed
from tl_devicefix.multihost.hosts import joined_hosts
from tl_devicefix.placement import devices as placement_devices
from tl_devicefix.simulation.machine import Machine

if has_hooked_transformer():
    import architectures
    from kinds import load_kind
    from model_classes import HookedTransformer

if has_bridge():
    from model_classes import TransformerBridge
if devices.TYPE:
    devices.use_real_devices()


torch.set_num_threads(1)  # the models are tiny, and threads that wait cost more than they save


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hosts"):
        tl_devicefix.simulate = simulated_by_hosts  # type: ignore[assignment]
    if devices.TYPE and config.getoption("--unpatched"):
        raise pytest.UsageError(
            "--unpatched is for simulated devices: leave TL_DEVICEFIX_TEST_DEVICE out"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the options leave out."""
    left_out = {item for item in items if is_of_another_class(item)}
    if not config.getoption("--full"):
        left_out |= {item for item in items if item.get_closest_marker("full")}
        left_out |= {item for item in items if is_left_to_others(item)}
    if config.getoption("--unpatched"):
        tests = [item for item in items if item not in left_out and fails_unpatched(item)]
        if not config.getoption("--full"):  # of each test, one combination of parameters
            tests = list({(test.path, test.originalname): test for test in tests}.values())
        left_out |= set(items).difference(tests)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With `--unpatched`, swap "passed" and "failed"; an error in a fixture stays one."""
    report = yield
    if item.config.getoption("--unpatched") and call.when == "call" and not report.skipped:
        # A model without the patches has no `placement`: this error says nothing about them.
        lacks_ours = call.excinfo and "no attribute 'placement'" in str(call.excinfo.value)
        if report.passed:
            report.outcome, report.longrepr = "failed", "marked fails_unpatched, and passes"
        elif not lacks_ours:
            report.outcome, report.longrepr = "passed", None
    return report


def parameters_of(test: pytest.Item) -> dict[str, Any]:
    """Return the values of a test's parameters, by their names."""
    return test.callspec.params if hasattr(test, "callspec") else {}


def fails_unpatched(test: pytest.Item) -> bool:
    """Return True if a test is marked fails_unpatched, and runs on more than one device."""
    marked = test.get_closest_marker("fails_unpatched") is not None
    return marked and parameters_of(test).get("n_devices") != 1


def classes_of(test: pytest.Item) -> set[str]:
    """Return the classes of models that a test is marked with or has as its parameter."""
    classes = {name for name in (HOOKED, BRIDGE) if test.get_closest_marker(name)}
    return classes | {parameters_of(test).get("model_class")} - {None}


def is_of_another_class(test: pytest.Item) -> bool:
    """Return True if a test's mark and parameter disagree, or its class is not installed.

    Tests marked `fuses` also need a version with blocks of the class that can be fused.
    """
    if len(classes := classes_of(test)) > 1 or not classes <= set(CLASSES):
        return True
    fuses = test.get_closest_marker("fuses") is not None
    return fuses and installed() < FUSES_SINCE[next(iter(classes), CLASSES[0])]


def is_left_to_others(test: pytest.Item) -> bool:
    """Return True if the default run with another TransformerLens version has this test."""
    if test.config.getoption("--both"):
        return False
    if BRIDGE in classes_of(test) and has_hooked_transformer():
        mark = test.get_closest_marker(BRIDGE)
        return mark is None or not mark.kwargs.get("in_3")
    return test.get_closest_marker("once") is not None and installed().major != 3


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def hf_models():
    """`hf_models("gpt2")`, or `hf_models("gpt2", torch.float64)`: shared, so not to be changed.

    With two dtypes the weights are rounded to the first and then held in the second.
    """
    return cache(lambda name, *dtypes: make_hf_model(HF_CONFIGS[name](), *dtypes))


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
    """Freeze the objects that exist before a module's tests, so that collections skip them.

    A failed load, or a test that measures memory, then takes a third of a second less.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_network(tmp_path_factory):
    """Refuse connections at once, and do not check loads on a tiny model of the same config.

    The check takes as long as loading a tiny model. In tests/twin it is on.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TL_DEVICEFIX_ON_MISMATCH", "ignore")
        go_offline(patch, tmp_path_factory.mktemp("hub"))
        yield


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The default cache of a hub that cannot be reached: empty until `hub.add(...)`."""
    go_offline(monkeypatch, tmp_path / "hub")
    return HubCache(tmp_path / "hub")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def bars_as_before():
    """Restore transformers' progress bars, which our commands turn off for the process."""
    were_on = hf_logging.is_progress_bar_enabled()
    yield
    if were_on:
        hf_logging.enable_progress_bar()


# The machine.


@pytest.fixture
def n_devices() -> int:
    """How many devices `machine` has, unless a module shares it; parametrise it for others."""
    return 4


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`with simulated(4) as machine`: like `tl_devicefix.simulate`, or with real devices.

    With `--unpatched`, the patches are off; with `--asynchronous`, devices run behind the host.
    """

    @contextlib.contextmanager
    def simulated(*args: Any, **options: Any) -> Iterator[Machine]:
        behind = request.config.getoption("--asynchronous")
        enter: Any = asynchronous if behind else tl_devicefix.simulate
        if devices.TYPE:
            enter = devices.real_machine
        with enter(*args, **options) as machine:
            unpatched: Any = contextlib.nullcontext()
            if request.config.getoption("--unpatched"):
                alone = has_hooked_transformer()
                unpatched = transformer_lens_alone(machine) if alone else tl_devicefix.disabled()
            with unpatched:
                yield machine

    return simulated


@contextlib.contextmanager
def transformer_lens_alone(machine: Machine) -> Iterator[None]:
    """Within it, unpatched TransformerLens takes the machine's devices for its CUDA devices.

    It splits a model across devices whose type is called "cuda", and asks torch.cuda how many there
    are and how full they are. Here it gets the simulated devices' answers instead.
    """
    import transformer_lens.loading_from_pretrained as tl_loading

    tl_model = sys.modules[HookedTransformer.__module__]
    configure = tl_loading.get_pretrained_model_config

    def configure_on_first_device(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        kwargs["device"] = device or str(machine.devices[0])
        return configure(*args, **kwargs)

    def get_best_available_device(cfg: Any) -> torch.device:
        device = torch.device(cfg.device)
        if device.type == "cpu" or cfg.n_devices <= 1:
            return device
        # As its get_best_available_cuda_device: whichever of the first n has most memory free.
        return max(machine.devices[: cfg.n_devices], key=lambda d: machine.mem_get_info(d)[0])

    with (
        tl_devicefix.disabled(),
        mock.patch("torch.cuda.device_count", return_value=len(machine.devices)),
        mock.patch.object(tl_loading, "get_pretrained_model_config", configure_on_first_device),
        mock.patch.object(tl_model, "get_best_available_device", get_best_available_device),
    ):
        yield


SHARE_A_MACHINE = {
    *("activation_store", "dispatch", "fusing", "gathering", "libraries", "offload", "pipelining"),
    *("surface", "versions"),
}
"""Folders in which the tests of a module share one machine, and so models."""


@pytest.fixture(scope="module")
def machine_of_module(simulated: Any) -> Iterator[Machine]:
    """A machine with four devices, for all tests of a module."""
    with simulated(4) as machine:
        yield machine


@pytest.fixture
def machine(request: pytest.FixtureRequest, n_devices: int, simulated: Any) -> Iterator[Machine]:
    """A simulated machine, on which models load by default."""
    if request.path.relative_to(Path(__file__).parent).parts[0] in SHARE_A_MACHINE:
        yield request.getfixturevalue("machine_of_module")
        return
    with simulated(n_devices) as machine:
        yield machine


# Models. Tests run with both classes, unless they are marked as one's.


@pytest.fixture(params=CLASSES)
def model_class(request: pytest.FixtureRequest) -> str:
    """The class of the models."""
    return request.param


@pytest.fixture
def kind() -> str:
    """The kind of `model`, or its architecture; parametrise it for others."""
    return "llama"


@pytest.fixture
def spread() -> int | str:
    """The number of devices of `model`, or a key of `DEVICE_MAPS`; parametrise it for others."""
    return 4


@pytest.fixture
def load(
    model_class: str,
    hf_models: Any,
    checkpoints: Any,
    tokenizer: Any,
    request: pytest.FixtureRequest,
) -> Callable[..., Any]:
    """`load("llama", 2)`: a new model across two devices, as users load it.

    Without a number, options such as `device_map` place it. Without those, it is split across four
    devices, a Bridge like accelerate's "balanced". `folded` is as for `on_one`. A HookedTransformer
    has the weights of `hf_model`, if one is given.
    """

    def load(kind: str, spread: Any = None, *, hf_model: Any = None, **options: Any) -> Any:
        is_entered = placement_devices.simulated_device() or joined_hosts()
        if not is_entered and options.get("device") != "cpu":
            request.getfixturevalue("machine")
        if spread in DEVICE_MAPS:
            options["device_map"] = DEVICE_MAPS[spread]
        elif spread is not None:
            options["n_devices"] = spread
        elif {"device", "device_map", "n_devices", "max_memory"}.isdisjoint(options):
            balanced = balanced_map(kind, [devices.device(i) for i in range(4)])
            options |= {"n_devices": 4} if model_class == HOOKED else {"device_map": balanced}
        if model_class == HOOKED:
            # Workers of other hosts load from files.
            source = checkpoints if joined_hosts() else hf_models
            source = source if hf_model is None else lambda _: hf_model
            return load_kind(kind, source, tokenizer, **options)
        if hf_model is not None:
            options["hf_model"] = hf_model
        return boot(checkpoints(kind), **options)

    return load


def boot(checkpoint: Path, folded: bool | None = None, **options: Any) -> Any:
    """A Bridge of a checkpoint, in compatibility mode if `folded`."""
    bridge = TransformerBridge.boot_transformers(str(checkpoint), **options)
    if folded:
        bridge.enable_compatibility_mode()
    return bridge


@pytest.fixture(scope="module")
def loaded_in_module() -> dict[Any, Any]:
    """The models of `shared`."""
    return {}


@pytest.fixture
def shared(model_class: str, load: Any, loaded_in_module: dict[Any, Any]) -> Callable[..., Any]:
    """Like `load`, but loaded once for the tests of a module: not to be changed.

    Hooks and gradients of earlier tests are removed.
    """

    def get(*args: Any, **options: Any) -> Any:
        key = model_class, args, repr(options)
        if key not in loaded_in_module:
            loaded_in_module[key] = load(*args, **options)
        return clean(loaded_in_module[key])

    return get


@pytest.fixture(scope="session")
def references(hf_models: Any, checkpoints: Any, tokenizer: Any) -> Callable[..., Any]:
    """`references(HOOKED, "gpt2")`: like `on_one`, but shared, so not to be changed."""

    def load(model_class: str, kind: str, **options: Any) -> Any:
        def source(name: str) -> Any:
            return copy.deepcopy(hf_models(name, options.get("dtype", torch.float32)))

        options |= {"device": "cpu"}
        with tl_devicefix.disabled():
            if model_class == BRIDGE:
                return boot(checkpoints(kind), **options)
            return load_kind(kind, source, tokenizer, **options)

    return cache(load)


@pytest.fixture
def on_one(model_class: str, references: Any) -> Callable[..., Any]:
    """`on_one("gpt2")`: a new copy of what unpatched TransformerLens loads on one CPU.

    A HookedTransformer is processed unless `folded=False`, a Bridge only if `folded=True`.
    """
    return lambda kind, **options: copy.deepcopy(references(model_class, kind, **options))


@pytest.fixture
def model(shared: Any, kind: str, spread: Any) -> Any:
    """The model under test."""
    model = shared(kind, spread)
    if hasattr(model, "placement"):  # not if it is unpatched
        assert spread == 1 or len(model.placement.memories) > 1
    return model


@pytest.fixture
def reference(on_one: Any, kind: str) -> Any:
    """The same weights as `model` has, on the CPU."""
    return on_one(kind)


def clean(model: Any) -> Any:
    """Remove the hooks, gradients and ALiBi biases of earlier tests."""
    model.reset_hooks(including_permanent=True)
    model.zero_grad()
    for module in model.modules():
        # TransformerLens keeps the ALiBi bias of the longest input. A shorter input gets a slice
        # of it, which differs from its own bias by a constant for each query.
        if "alibi" in vars(module):
            module.alibi = None
    return model


@pytest.fixture
def at_home(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens, where the model wants them."""
    return tokens.to(model.cfg.device)


@pytest.fixture
def config() -> Callable[..., Any]:
    """`config(n_layers=26, d_vocab=500)`: a HookedTransformer's config, without a checkpoint."""
    sizes = {"n_layers": 6, "d_mlp": 24, "n_ctx": 8, "act_fn": "relu", "init_weights": True}
    return lambda **options: architectures.toy_config(**{**sizes, **options})


@pytest.fixture
def refused(machine: Machine) -> Callable[..., Any]:
    """`with refused("5 blocks"): ...` is refused in one sentence that says so.

    Afterwards memory is given back, TransformerLens is patched as before, and `hf_model`, if one
    is given, is as it was.
    """

    @contextlib.contextmanager
    def refused(
        *says: str, error: Any = ValueError, hf_model: torch.nn.Module | None = None
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        memory, patched = in_use(machine), dict(vars(HookedTransformer))
        before = None if hf_model is None else Snapshot(hf_model)
        with pytest.raises(error) as caught:
            yield caught
        message = str(caught.value)

        for text in says:
            assert text in message
        assert "\n" not in message
        assert in_use(machine) == memory
        assert vars(HookedTransformer) == patched
        if before is not None:
            before.assert_unchanged()

    return refused
