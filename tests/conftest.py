"""Fixtures that all tests share: tiny models, the unpatched reference, and a simulated machine."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_lens.loading_from_pretrained as tl_loading
from architectures import (
    ALL_ARCHITECTURES,
    D_VOCAB,
    NO_PROCESSING,
    TOYS,
    load_hooked,
    make_hf_model,
    make_tokenizer,
    randomize,
    save_checkpoint,
)
from hub_cache import HubCache, go_offline
from transformer_lens import HookedTransformer
from transformers import PreTrainedModel
from unpatched_tl import transformer_lens_alone

import tl_devicefix
from tl_devicefix.simulation.machine import Machine

torch.set_num_threads(1)  # the models are tiny, and threads that wait cost more than they save


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unpatched",
        action="store_true",
        help="run only the tests marked fails_unpatched, against TransformerLens without the "
        "patches of tl_devicefix: they fail, which shows what the patches are for",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fails_unpatched: holds with tl_devicefix and fails without; see --unpatched",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--unpatched"):
        others = [item for item in items if item.get_closest_marker("fails_unpatched") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


class OnDemand:
    """A mapping whose values are made when they are first asked for, then kept."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._made: dict[Any, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        key = (args, tuple(sorted(options.items(), key=lambda item: item[0])))
        if key not in self._made:
            self._made[key] = self._make(*args, **options)
        return self._made[key]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def hf_models() -> Callable[..., PreTrainedModel]:
    """`hf_models("gpt2")`, or `hf_models("gpt2", torch.float64)`: shared, so not to be changed.

    With two dtypes the weights are rounded to the first and then held in the second.
    """
    return OnDemand(lambda name, *dtypes: make_hf_model(ALL_ARCHITECTURES[name], *dtypes))


@pytest.fixture(scope="session")
def checkpoints(
    hf_models: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`checkpoints("gpt2")` is a directory with the weights of `hf_models("gpt2")`.

    The directory's name says nothing of the architecture.
    """

    def save(name: str, *dtypes: torch.dtype) -> Path:
        directory = tmp_path_factory.mktemp("checkpoint")
        return save_checkpoint(hf_models(name, *dtypes), tokenizer, directory)

    return OnDemand(save)


@pytest.fixture(scope="session")
def references(hf_models: Any, tokenizer: Any) -> Callable[..., HookedTransformer]:
    """`references("gpt2", fold_ln=False)`: as unpatched TransformerLens loads it on one CPU."""

    def load(name: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        architecture = ALL_ARCHITECTURES[name]
        if architecture.official_name not in tl_loading.OFFICIAL_MODEL_NAMES:
            pytest.skip(f"the installed TransformerLens has no {architecture.official_name}")
        hf_model = copy.deepcopy(hf_models(name, dtype))
        with tl_devicefix.unpatched():
            try:
                return load_hooked(
                    architecture, hf_model, tokenizer, device="cpu", dtype=dtype, **options
                )
            except AttributeError as error:
                # Each TransformerLens knows the attributes that transformers had at its time.
                pytest.skip(f"TransformerLens itself cannot convert {name} here: {error}")

    return OnDemand(load)


@pytest.fixture(scope="session")
def unprocessed(references: Any) -> Callable[[str], HookedTransformer]:
    """`unprocessed("gpt2")`, on the CPU, for all of ARCHITECTURES and TOYS; not to be changed."""

    def make(name: str) -> HookedTransformer:
        if name in ALL_ARCHITECTURES:
            return references(name, **NO_PROCESSING)
        with tl_devicefix.unpatched():
            model = HookedTransformer(TOYS[name](), move_to_device=False)
        randomize(model)
        return model

    return OnDemand(make)


@pytest.fixture
def without_weights(unprocessed: Any) -> Callable[..., HookedTransformer]:
    """`without_weights("gpt2", n_devices=4)`: a new model, spread over devices, to be loaded.

    Without `n_devices` it is on the CPU. Its norms are identities and its weights anything.
    """

    def make(name: str, n_devices: int | None = None) -> HookedTransformer:
        cfg = copy.deepcopy(unprocessed(name).cfg)
        cfg.tokenizer_name = None  # which could not be fetched
        if n_devices is None:
            return HookedTransformer(cfg, move_to_device=False)
        # Set on the finished config: making one with n_devices > 1 wants that many CUDA devices.
        cfg.device, cfg.n_devices = "sim:0", n_devices
        return HookedTransformer(cfg)

    return make


@pytest.fixture
def n_devices() -> int:
    """How many devices `machine` has; parametrise `n_devices` for others."""
    return 4


@pytest.fixture
def machine(n_devices: int, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A simulated machine, on which models load by default."""
    with tl_devicefix.simulate(n_devices) as machine:
        unpatched = request.config.getoption("--unpatched")
        with transformer_lens_alone(machine) if unpatched else contextlib.nullcontext():
            yield machine


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """A batch of two sequences of tokens, on the CPU."""
    return torch.randint(3, D_VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session", autouse=True)
def no_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever asks the hub is told at once that it cannot be reached."""
    with pytest.MonkeyPatch.context() as patch:
        go_offline(patch, tmp_path_factory.mktemp("hub"))
        yield


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """The default cache of a hub that cannot be reached: empty until `hub.add(...)`."""
    go_offline(monkeypatch, tmp_path / "hub")
    return HubCache(tmp_path / "hub")
