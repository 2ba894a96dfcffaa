"""Fixtures that all tests share: tiny models, the unpatched reference, and a simulated machine."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest

# On CPUs with AVX512-BF16, bitsandbytes warns when it is imported (by TransformerLens, below) that
# an optional kernel is missing. We silence it, because workers of pytest-xdist print it after the
# summary, where it reads like the reason of a failure.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# ruff: noqa: E402

import devices
import torch
from comparison import Snapshot, in_use
from hf_models import (
    D_VOCAB,
    HF_CONFIGS,
    balanced_map,
    make_hf_model,
    make_tokenizer,
    randomize,
    save_checkpoint,
)
from hub_cache import HubCache, go_offline
from local_hosts import simulated_by_hosts
from machines import as_installed, transformer_lens_alone
from model_classes import BRIDGE, CLASSES, HOOKED
from racing import asynchronous

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer, installed
from tl_devicefix.placement.devices import joined_hosts
from tl_devicefix.simulation.machine import Machine, Transfer

if has_hooked_transformer():
    import architectures
    import transformer_lens.loading_from_pretrained as tl_loading
    from kinds import KINDS, Spread, where_to
    from transformer_lens import HookedTransformer

if has_bridge():
    from transformer_lens.model_bridge import TransformerBridge

OF_HOOKED = [
    *("checkpoints/*", "hooked_transformer/*", "parity/*", "placement/*", "weight_processing/*"),
    "checking/test_check.py",
    *(f"dispatch/test_{of}.py" for of in ("attached", "forward", "hooks")),
    *(f"dispatch/test_{of}.py" for of in ("mixing", "moving", "transfers")),
    *("fusing/test_kv_caches_that_grow.py", "fusing/test_parameters_named_anew.py"),
    "gathering/test_gathering.py",
    *("libraries/test_sae_lens.py", "libraries/test_sae_lens_training.py"),
    "libraries/test_circuit_tracer.py",
    *("offload/test_offload_memory.py", "offload/test_offload_results.py"),
    "planning/test_plan.py",
    *("racing/test_detector.py", "racing/test_offload.py"),
    "twin/test_hooked_twin.py",
]
OF_BRIDGE = ["transformer_bridge/*", "fusing/transformer_bridge/*"]
OF_BRIDGE += ["twin/test_bridge_twin.py"]
collect_ignore_glob = [
    *([] if has_hooked_transformer() else OF_HOOKED),
    *([] if has_bridge() else OF_BRIDGE),
]
"""Tests of a class that the installed TransformerLens does not have."""

if devices.TYPE:
    devices.use_real_devices()


def pytest_report_header() -> str:
    on = f"{devices.device_count()} {devices.TYPE}" if devices.TYPE else "simulated"
    return f"transformer_lens {installed()}, {on} devices"


Get = Callable[[str], Any]
"""An architecture ("llama", "gpt2") -> a model."""

torch.set_num_threads(1)  # the models are tiny, and threads that wait cost more than they save


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, meaning in {
        "--unpatched": "run only tests marked fails_unpatched, without the patches: they fail",
        "--asynchronous": "run on simulated devices that run behind the host (tests/racing)",
        "--hosts": "run tests/surface with all blocks but the first device's on other hosts, which "
        "are threads of this process",
        "--full": "run every combination of what tests are parametrised over, and what other "
        "versions run; by default, each value runs (tests/parameters.py)",
    }.items():
        parser.addoption(option, action="store_true", help=meaning)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hosts"):
        tl_devicefix.simulate = simulated_by_hosts  # type: ignore[assignment]
    if devices.TYPE and config.getoption("--unpatched"):
        raise pytest.UsageError(
            "--unpatched is for simulated devices: leave TL_DEVICEFIX_TEST_DEVICE out"
        )
    for marker in (
        "fails_unpatched: holds with tl_devicefix and fails without, unless n_devices is 1",
        "full: runs with --full only; its reason says what else runs",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the options leave out."""
    left_out: set[pytest.Item] = set()
    if not config.getoption("--full"):
        left_out |= {it for it in items if it.get_closest_marker("full") or is_left_to_others(it)}
    if config.getoption("--unpatched"):
        left_out |= {item for item in items if not fails_unpatched(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def parameters_of(test: pytest.Item) -> dict[str, Any]:
    """Return the values of a test's parameters, by their names."""
    return test.callspec.params if hasattr(test, "callspec") else {}


def fails_unpatched(test: pytest.Item) -> bool:
    """Return True if a test is marked so; on one device there is nothing for patches to mend."""
    marked = test.get_closest_marker("fails_unpatched") is not None
    return marked and parameters_of(test).get("n_devices") != 1


def is_left_to_others(test: pytest.Item) -> bool:
    """Return True if another version's default run has this test, of the same code.

    1. The newest HookedTransformer is in TransformerLens 3 and the newest Bridge in 4, so where
       there are HookedTransformers, Bridges are left to 4: all but their parity.
    2. Simulated devices, Ray and saved files know nothing of TransformerLens: 3 runs them.
    """
    stem, folder = test.path.stem, test.path.parent.name
    if has_hooked_transformer() and (
        folder == "transformer_bridge"
        or "bridge" in stem
        or parameters_of(test).get("model_class") == BRIDGE
    ):
        return stem != "test_parity"
    files = "test_saved_activations_resumed", "test_load_activations"
    return installed().major != 3 and (folder in ("simulation", "hosts") or stem in files)


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
    """Freeze what exists before a module's tests, because collections then skip it.

    That saves a third of a second each: of loads that fail, and of tests that measure memory.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_network(tmp_path_factory):
    """Refuse connections at once, and do not try loads on a tiny twin.

    The trial takes as long as loading a tiny model; tests/twin has it.
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


# The machine.


@pytest.fixture
def n_devices() -> int:
    """How many devices `machine` has; parametrise `n_devices` for others."""
    return 4


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`with simulated(4) as machine`: as `tl_devicefix.simulate`, or real devices.

    With `--unpatched` it is without the patches, and with `--asynchronous` behind the host.
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


@pytest.fixture
def machine(n_devices: int, simulated: Any) -> Iterator[Machine]:
    """A simulated machine, on which models load by default."""
    with simulated(n_devices) as machine:
        yield machine


# Either class.


@pytest.fixture
def kind() -> str:
    """Which architecture the model has; parametrise it for others."""
    return "llama"


@pytest.fixture
def at_home(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens, where the model wants them."""
    return tokens.to(model.cfg.device)


@pytest.fixture(params=CLASSES)
def model_class(request: pytest.FixtureRequest) -> str:
    """The class of the models."""
    return request.param


@pytest.fixture
def over_devices(model_class: str, request: pytest.FixtureRequest) -> Get:
    """`over_devices("llama")`: a new model over four devices.

    A Bridge lies as accelerate's "balanced" has it, and is not folded.
    """
    return request.getfixturevalue({HOOKED: "load", BRIDGE: "dispatched"}[model_class])


@pytest.fixture
def from_checkpoint(model_class: str, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`from_checkpoint("llama", device_map=...)`: a new model, as users load it."""
    return request.getfixturevalue({HOOKED: "from_pretrained", BRIDGE: "boot"}[model_class])


@pytest.fixture
def on_one(model_class: str, request: pytest.FixtureRequest) -> Get:
    """`on_one("llama")`: the same weights, as TransformerLens alone has them on one CPU."""
    if model_class == BRIDGE:
        return partial(request.getfixturevalue("boot"), device="cpu")
    return request.getfixturevalue("on_cpu")


@pytest.fixture
def folded(model_class: str, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`folded("llama", 4)`: a new model with folded weights, over so many devices."""
    if model_class == BRIDGE:
        boot = request.getfixturevalue("boot")
        return lambda kind, n, **where: boot(kind, compatible=True, n_devices=n, **where)
    return request.getfixturevalue("load")


@pytest.fixture
def folded_on_one(model_class: str, request: pytest.FixtureRequest) -> Get:
    """`folded_on_one("llama")`: the same on one CPU."""
    if model_class == BRIDGE:
        return partial(request.getfixturevalue("bridge_references"), compatible=True)
    return request.getfixturevalue("on_cpu")


# TransformerBridge.


@pytest.fixture(scope="session")
def bridge_references(checkpoints: Any) -> Callable[..., Any]:
    """`bridge_references("gpt2", compatible=True)`: as the unpatched release boots it, on one CPU.

    Shared, so not to be changed. Other options are those of `enable_compatibility_mode`.
    """

    def boot(
        name: str, *, compatible: bool = False, dtype: torch.dtype = torch.float32, **options: Any
    ) -> Any:
        with tl_devicefix.disabled():
            bridge = TransformerBridge.boot_transformers(
                str(checkpoints(name)), device="cpu", dtype=dtype
            )
            if compatible:
                bridge.enable_compatibility_mode(**options)
        return bridge

    return cache(boot)


@pytest.fixture
def dispatched(checkpoints: Any, machine: Machine, n_devices: int) -> Callable[[str], Any]:
    """`dispatched("llama")`: over the devices by `balanced_map`, as booted."""

    def boot(name: str) -> Any:
        device_map = balanced_map(name, [devices.device(index) for index in range(n_devices)])
        return TransformerBridge.boot_transformers(str(checkpoints(name)), device_map=device_map)

    return boot


@pytest.fixture(scope="session")
def boot(checkpoints: Any) -> Callable[..., Any]:
    """`boot("gpt2", n_devices=4)`: a new Bridge, from a checkpoint; `compatible=True` folds it."""

    def boot(name: str, *, compatible: bool = False, **options: Any) -> Any:
        bridge = TransformerBridge.boot_transformers(str(checkpoints(name)), **options)
        if compatible:
            bridge.enable_compatibility_mode()
        return bridge

    return boot


# HookedTransformer.


@pytest.fixture(scope="session")
def references(hf_models: Any, tokenizer: Any) -> Callable[..., HookedTransformer]:
    """`references("gpt2", fold_ln=False)`: as unpatched TransformerLens loads it on one CPU."""

    def load(name: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        architecture = architectures.ALL_ARCHITECTURES[name]
        if (official := architecture.official_name) not in tl_loading.OFFICIAL_MODEL_NAMES:
            pytest.skip(f"the installed TransformerLens has no {official}")
        hf_model = copy.deepcopy(hf_models(name, dtype))
        with as_installed():
            options |= {"device": "cpu", "dtype": dtype}
            return architectures.load_hooked(architecture, hf_model, tokenizer, **options)

    return cache(load)


@pytest.fixture(scope="session")
def from_pretrained(
    hf_models: Any, tokenizer: Any, references: Any, checkpoints: Any
) -> Callable[..., Any]:
    """`from_pretrained("gpt2", n_devices=4)`: as users load it, on the machine that is entered.

    The weights are the tiny model's in float32, or those of `hf_model`.
    """

    def load(name: str, hf_model: Any = None, **options: Any) -> HookedTransformer:
        references(name)  # skips what TransformerLens has no name for
        if joined_hosts():  # because workers load from files
            return HookedTransformer.from_pretrained(str(checkpoints(name)), **options)
        hf_model = hf_models(name) if hf_model is None else hf_model
        return architectures.load_hooked(
            architectures.ALL_ARCHITECTURES[name], hf_model, tokenizer, **options
        )

    return load


@pytest.fixture(scope="session")
def unprocessed(references: Any) -> Callable[[str], HookedTransformer]:
    """`unprocessed("gpt2")`, on the CPU, of an architecture or a toy; not to be changed."""

    def make(name: str) -> HookedTransformer:
        if name in architectures.ALL_ARCHITECTURES:
            return references(name, **architectures.NO_PROCESSING)
        with tl_devicefix.disabled():
            model = HookedTransformer(architectures.TOYS[name](), move_to_device=False)
        randomize(model)
        return model

    return cache(make)


@pytest.fixture
def config() -> Callable[..., Any]:
    """`config(n_layers=26, d_vocab=500)`."""
    sizes = {"n_layers": 6, "d_mlp": 24, "n_ctx": 8, "act_fn": "relu", "init_weights": True}
    return lambda **options: architectures.toy_config(**{**sizes, **options})


@pytest.fixture
def snapshot() -> type[Snapshot]:
    return Snapshot


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
        assert vars(HookedTransformer).keys() == patched.keys()
        assert all(vars(HookedTransformer)[name] is value for name, value in patched.items())
        if before is not None:
            before.assert_unchanged()

    return refused


# HookedTransformers that the tests of a module share.


@pytest.fixture(scope="module")
def load(machine: Machine, from_pretrained: Any, tokenizer: Any) -> Callable[..., Any]:
    """`load("gpt2", 4)`: a model over four devices, for one test to change as it likes."""

    def load(kind: str, spread: Spread = 4, **options: Any) -> HookedTransformer:
        if kind == "attention-only":
            model = architectures.build_toy(
                architectures.attention_only_config(), tokenizer, devices.device(0), spread
            )
        else:
            name, how = KINDS.get(kind, (kind, {}))
            model = from_pretrained(name, **{**where_to(name, spread), **how, **options})
        if hasattr(model, "placement"):  # not if it is unpatched
            assert spread == 1 or len(model.placement.memories) > 1
        return model

    return load


@pytest.fixture(scope="module")
def models(load: Any) -> Callable[..., HookedTransformer]:
    """As `load`, but loaded once for the tests of a module: not to be changed."""
    return cache(load)


@pytest.fixture
def spread() -> Spread:
    """Over how many devices the model lies; parametrise it for others."""
    return 4


@pytest.fixture
def model(models: Any, kind: str, spread: Spread) -> HookedTransformer:
    """The model under test, without traces of earlier tests."""
    model = models(kind, spread)
    _clean(model)
    return model


@pytest.fixture
def on_cpu(references: Any) -> Callable[..., HookedTransformer]:
    """`on_cpu("gpt2")`: as TransformerLens loads it there, without traces of earlier tests."""

    def get(name: str, **options: Any) -> HookedTransformer:
        reference = references(name, **options)
        _clean(reference)
        return reference

    return get


@pytest.fixture
def reference(on_cpu: Any, tokenizer: Any, kind: str) -> HookedTransformer:
    """The same weights as `model` has, on the CPU."""
    if kind == "attention-only":
        return architectures.build_toy(architectures.attention_only_config(), tokenizer)
    name, how = KINDS[kind]
    return on_cpu(name, **how)


def _clean(model: HookedTransformer) -> None:
    model.reset_hooks(including_permanent=True)
    model.zero_grad()
    for block in model.blocks:
        # TransformerLens keeps the ALiBi bias of the longest input, and adds a part of it to the
        # attention scores of a shorter one that differs by a constant for each query.
        block.attn.alibi = None


@pytest.fixture
def transfers_of(machine: Machine) -> Callable[..., list[Transfer]]:
    """`transfers_of(f, x)` calls `f(x)` and returns the copies that it made."""

    def transfers_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Transfer]:
        machine.reset_transfers()
        function(*args, **kwargs)
        return list(machine.transfers)

    return transfers_of
