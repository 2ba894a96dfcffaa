"""Fixtures of HookedTransformers: the unpatched reference, models without weights, and refusals."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_lens.loading_from_pretrained as tl_loading
from architectures import ALL_ARCHITECTURES, NO_PROCESSING, TOYS, load_hooked, toy_config
from hf_models import randomize
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix.placement.devices import joined
from tl_devicefix.simulation.machine import Machine

_load_state_dict = torch.nn.Module.load_state_dict


def _load_one_where_it_belongs(
    model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """torch's `load_state_dict`, on the module whose weight it is.

    TransformerLens loads a weight at a time, and torch looks at every module each time: a sixth of
    what these tests took.
    """
    if len(state_dict) == 1 and not strict:
        ((key, weight),) = state_dict.items()
        path, _, name = key.rpartition(".")
        with contextlib.suppress(AttributeError):  # of no module here: torch leaves it out
            model, state_dict = model.get_submodule(path), {name: weight}
    return _load_state_dict(model, state_dict, strict, assign)


@contextlib.contextmanager
def as_installed() -> Iterator[None]:
    """Within it, TransformerLens is unpatched, but that it loads weights sooner."""
    sooner = mock.patch.object(torch.nn.Module, "load_state_dict", _load_one_where_it_belongs)
    with tl_devicefix.disabled(), sooner:
        yield


@pytest.fixture(scope="session")
def references(hf_models: Any, tokenizer: Any) -> Callable[..., HookedTransformer]:
    """`references("gpt2", fold_ln=False)`: as unpatched TransformerLens loads it on one CPU."""

    def load(name: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        architecture = ALL_ARCHITECTURES[name]
        if architecture.official_name not in tl_loading.OFFICIAL_MODEL_NAMES:
            pytest.skip(f"the installed TransformerLens has no {architecture.official_name}")
        hf_model = copy.deepcopy(hf_models(name, dtype))
        with as_installed():
            try:
                options |= {"device": "cpu", "dtype": dtype}
                return load_hooked(architecture, hf_model, tokenizer, **options)
            except AttributeError as error:
                # Each TransformerLens knows the attributes that transformers had at its time.
                pytest.skip(f"TransformerLens itself cannot convert {name} here: {error}")

    return cache(load)


@pytest.fixture(scope="session")
def from_pretrained(
    hf_models: Any, tokenizer: Any, references: Any, checkpoints: Any
) -> Callable[..., Any]:
    """`from_pretrained("gpt2", n_devices=4)`: as users load it, on the machine that is entered.

    Of the tiny model in float32, or of one that is given.
    """

    def load(name: str, hf_model: Any = None, **options: Any) -> HookedTransformer:
        references(name)  # skips what TransformerLens itself cannot convert
        if joined():  # who load from files
            return HookedTransformer.from_pretrained(str(checkpoints(name)), **options)
        hf_model = hf_models(name) if hf_model is None else hf_model
        return load_hooked(ALL_ARCHITECTURES[name], hf_model, tokenizer, **options)

    return load


@pytest.fixture(scope="session")
def unprocessed(references: Any) -> Callable[[str], HookedTransformer]:
    """`unprocessed("gpt2")`, on the CPU, for all of ARCHITECTURES and TOYS; not to be changed."""

    def make(name: str) -> HookedTransformer:
        if name in ALL_ARCHITECTURES:
            return references(name, **NO_PROCESSING)
        with tl_devicefix.disabled():
            model = HookedTransformer(TOYS[name](), move_to_device=False)
        randomize(model)
        return model

    return cache(make)


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
def config() -> Callable[..., Any]:
    """`config(n_layers=26, d_vocab=500)`."""
    sizes = {"n_layers": 6, "d_mlp": 24, "n_ctx": 8, "act_fn": "relu", "init_weights": True}
    return lambda **options: toy_config(**{**sizes, **options})


class Snapshot:
    """A Hugging Face model as it is now: its modules, tensors and config."""

    def __init__(self, hf_model: torch.nn.Module) -> None:
        self._model = hf_model
        self._before, self._tensors = self._now(), self._tensors_now()  # which keep their ids
        self._values = [tensor.detach().clone() for _, tensor in self._tensors]

    def _tensors_now(self) -> list[tuple[str, torch.Tensor]]:
        parameters = self._model.named_parameters(remove_duplicate=False)
        return [*parameters, *self._model.named_buffers(remove_duplicate=False)]

    def _now(self) -> Any:
        modules = list(self._model.named_modules(remove_duplicate=False))
        tensors = [(name, id(t), t.device, t.requires_grad) for name, t in self._tensors_now()]
        config: Any = getattr(self._model, "config", None)
        return modules, tensors, config and config.to_dict()

    def assert_unchanged(self) -> None:
        assert self._now() == self._before
        for (name, tensor), value in zip(self._tensors_now(), self._values):
            assert tensor.is_meta or torch.equal(tensor.detach(), value), name


@pytest.fixture
def snapshot() -> type[Snapshot]:
    return Snapshot


def in_use(machine: Machine) -> list[int]:
    gc.collect()
    return [machine.memory_allocated(device) for device in machine.devices]


@pytest.fixture
def refused(machine: Machine) -> Callable[..., Any]:
    """`with refused("sim:7"): ...` is refused in one sentence that says so, leaving nothing behind.

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
