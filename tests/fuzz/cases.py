"""A case of the random trial: a model and operations on it, all from one seed.

`outcome(case)` is what the case shows. It runs here with the package, and in a process of its own
with the installed TransformerLens alone (`Installed`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import operator
import os
import pickle
import random
import re
import sys
import tempfile
import typing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from operations import CHANGES, LOSES_CACHE, RUNS, Trial, tokens
from pools import BETWEEN, BLOCKS, IS_BRIDGE, POOLS, VARIANTS, Module, Point, Weight, config_of

EXTRAS: dict[str, Any] = {
    "use_attn_result": True,
    "use_split_qkv_input": True,
    "use_hook_mlp_in": True,
    "ungroup_grouped_query_attention": True,
    "scale_attn_by_inverse_layer_idx": True,
    "dtype": torch.bfloat16,
}
FUSED = 0.8
"""The share of cases that are fused."""
BRIDGES = ("llama", "gpt2", "pythia", "gemma-2", "qwen3", "bloom", "gpt-j")


class Case(NamedTuple):
    """What `outcome` takes; its `repr` can be pasted."""

    model: tuple[Any, ...]
    """A HookedTransformer's options; a Bridge's architecture and mode."""
    n_devices: int
    """How many simulated devices it is spread over, with the package; 1 is the CPU."""
    operations: list[tuple[Any, ...]]
    is_fused: bool = True


def draw(seed: int) -> Case:
    """The case of a seed."""
    random_ = random.Random(seed)
    n_devices = random_.choice((*(1,) * 6, 2, 3, 4))
    if IS_BRIDGE:
        model: tuple[Any, ...] = (
            random_.choice(BRIDGES),
            random_.choice(("", "", "unprocessed", "compatible")),
        )
    else:
        extras = list(EXTRAS)[: -1 if n_devices > 1 else None]  # float32 there, for its rounding
        extra = random_.choice(extras) if random_.random() < 0.25 else None
        model = random_.choice(list(VARIANTS)), random_.choice((2, 3)), extra
    is_fused = random_.random() < FUSED
    draw = Draw(random_, model, is_spread=n_devices > 1, is_fused=is_fused)
    operations = [draw.any_operation() for _ in range(random_.randint(3, 8))]
    case = Case(model, n_devices, [*operations, draw.one_of(RUNS)], is_fused)
    if is_fused and has_16_bits(case):  # the likeliest token is a matter of their rounding
        case.operations[:] = [op for op in case.operations if op[0] != "generate"]
    return case


class Draw:
    """Draws operations for a model, mostly such as it has the modules for."""

    def __init__(
        self, random_: random.Random, model: tuple[Any, ...], is_spread: bool, is_fused: bool
    ) -> None:
        self._random = random_
        self._paths = paths(model)
        self._is_spread, self._is_fused = is_spread, is_fused
        # Over devices, torch's error about devices follows where a grafted block's parts are
        # exchanged again, or a block has lost the forward pre-hook that carries its inputs. And
        # blocks share masks and rotary tables, so that one changed in place is so for all. Of a
        # backward that a hook ends, the engine has run other nodes before. Where a hook makes
        # another dtype of what attention computes, TransformerLens's own raises, and a fused casts.
        self._left_out = {"graft", "_forward_pre_hooks", "buffer", "raise"} if is_spread else set()
        self._left_out |= {"raise", "attn.hook_.*upcast"} if is_fused else set()
        # A row that sees no token may differ, and these have others see it.
        is_left = random_.random() < 0.5 and "bidirectional" not in model
        self._left_out |= {"IGNORE", "zero", "bidirectional"} if is_left else {"left"}
        if LOSES_CACHE:  # in which two blocks of one number would meet
            self._left_out.add("graft")

    def any_operation(self) -> tuple[Any, ...]:
        """A run, a change, or a change that a hook makes within a later run."""
        kind = self._random.random()
        if kind < 0.35:
            return self.one_of(RUNS)
        if kind < 0.85:
            return self.one_of(CHANGES)
        # From between two blocks all of them may change; from within a block, another one.
        block, other = self._random.sample(BLOCKS, 2)
        points = [point for point in self._pool(Point) if point.startswith(block)]
        while True:
            change = self.one_of(CHANGES)
            # Over devices, torch ends the process where a backward meets another dtype, and asks
            # for global hooks as a call ends where a component has hooks that carry.
            if self._is_spread and change[0] in ("set_mode", "global_hook"):
                continue
            # Fused and not, backward needs other weights and tables, and torch refuses those that
            # were changed since. Half way, a fused block casts where TransformerLens's raises.
            if self._is_fused and change[-1] in ("in place", "parametrized", "float64", "bfloat16"):
                continue
            if other in str(change) and block not in str(change) and "filter" not in change:
                return "within", self._random.choice(points), change
            if change[0] == "global_hook":
                # Not from a block's last hook point: torch looks for hooks as a call begins, and
                # may not call them as it ends.
                return "within", BETWEEN[0], change
            if "blocks" not in str(change) and "'embed'" not in str(change):
                return "within", self._random.choice(BETWEEN), change

    def one_of(self, operations: list[Any]) -> tuple[Any, ...]:
        """An operation, with arguments drawn by their types."""
        function = self._random.choice(operations)
        hints = typing.get_type_hints(function)
        arguments = [
            self._random.choice(self._pool(hint))
            for name, hint in hints.items()
            if name not in ("trial", "return")
        ]
        operation = function.__name__, *arguments
        is_left_out = re.search("|".join(self._left_out), str(operation))
        return self.one_of(operations) if is_left_out else operation

    def _pool(self, hint: Any) -> Sequence[Any]:
        if hint in (Module, Point):
            return [path for path in POOLS[hint] if path in self._paths]
        if hint is Weight:
            return [name for name in POOLS[hint] if f"blocks.0.{name}" in self._paths]
        return POOLS.get(hint) or typing.get_args(hint)


@functools.cache
def paths(model: tuple[Any, ...]) -> set[str]:
    """What can be drawn that a model has, by its paths."""
    built = build(model, n_devices=1)
    some = [*POOLS[Module], *POOLS[Point]]
    some += [f"blocks.0.{name}" for name in POOLS[Weight]]
    known = set(built.hook_dict)
    for path in some:
        with contextlib.suppress(AttributeError):
            operator.attrgetter(path)(built)
            known.add(path)
    return known


class Outcome(NamedTuple):
    """What a case shows."""

    seen: list[tuple[str, Any]]
    messages: list[str]
    """Of errors: what is raised is compared, not what it says."""


def outcome(case: Case, *, spread: bool = False) -> Outcome:
    """Build a case's model, on one CPU or spread, and do the operations on it."""
    n_devices = case.n_devices if spread else 1
    devices: Any = contextlib.nullcontext()
    if n_devices > 1:
        import tl_devicefix

        devices = tl_devicefix.simulate(n_devices)
    with devices:
        trial = Trial(build(case.model, n_devices), lambda: build(case.model, n_devices, seed=2))
        if IS_BRIDGE and "replace_hook_dicts" in str(case.operations):
            # TransformerLens registers hooks of its own in a block's first forward, which go too.
            trial.model(tokens(1))
        if spread and case.is_fused:
            sys.modules["tl_devicefix"].fuse_blocks(trial.model)
        with trial.undo:
            for operation in case.operations:
                trial.leaves_out = "left" in operation
                trial.do(operation)
    return Outcome(trial.seen, trial.messages)


def build(model: tuple[Any, ...], n_devices: int, seed: int = 1) -> Any:
    """A model with random weights, which depend on the seed alone."""
    build_one: Any = build_bridge if IS_BRIDGE else build_hooked
    return build_one(*model, n_devices, seed)


def build_hooked(name: str, n_layers: int, extra: str | None, n_devices: int, seed: int) -> Any:
    from transformer_lens import HookedTransformer

    cfg = config_of(VARIANTS[name] | ({extra: EXTRAS[extra]} if extra else {}), n_layers)
    if n_devices > 1:  # as an argument of the config, TransformerLens would count CUDA devices
        cfg.device, cfg.n_devices = "sim:0", n_devices
    model = HookedTransformer(cfg)
    randomize(model, seed)
    return model


def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.4
            parameter.copy_(values + 1 if name.endswith(("ln1.w", "ln2.w")) else values)


def build_bridge(name: str, mode: str, n_devices: int, seed: int) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    options = {"n_devices": n_devices} if n_devices > 1 else {"device": "cpu"}
    bridge = TransformerBridge.boot_transformers(str(checkpoint(name, seed)), **options)
    if mode:
        bridge.enable_compatibility_mode(no_processing=mode == "unprocessed")
    return bridge


@functools.cache
def checkpoint(name: str, seed: int) -> Path:
    """A directory with a tiny model of an architecture, which goes when the process ends."""
    from hf_models import HF_CONFIGS, make_tokenizer, save_checkpoint
    from transformers import AutoModelForCausalLM

    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    model = AutoModelForCausalLM.from_config(HF_CONFIGS[name]())
    randomize(model, seed)
    return save_checkpoint(model, make_tokenizer(Path(directory.name)), Path(directory.name))


# The installed TransformerLens.


class Installed:
    """A process that runs cases with the installed TransformerLens, without the package."""

    def __init__(self) -> None:
        self._ahead: dict[int, Future[bytes]] = {}
        with mock.patch.dict(os.environ, TL_DEVICEFIX_DISABLE="1"):
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            self._pool.submit(os.getpid).result()  # which starts it

    def run(self, case: Case) -> bytes:
        """What a case shows there, pickled."""
        return self._pool.submit(_installed_outcome, case).result()

    def run_seed(self, seed: int) -> bytes:
        """Likewise for the case of a seed; the next seed's begins meanwhile."""
        ahead = self._ahead.pop(seed, None) or self._pool.submit(_installed_outcome, draw(seed))
        self._ahead[seed + 1] = self._pool.submit(_installed_outcome, draw(seed + 1))
        return ahead.result()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _installed_outcome(case: Case) -> bytes:
    torch.set_num_threads(1)
    assert "tl_devicefix" not in sys.modules
    return pickle.dumps(outcome(case))  # torch would share the memory of each tensor


def difference(case: Case, expected: bytes) -> str | None:
    """The first value of a case that is not the installed TransformerLens's; None if none is."""
    installed: Outcome = pickle.loads(expected)
    actual = outcome(case, spread=True)
    # This package folds weights in an order of its own.
    exact = case.n_devices == 1 and "compatible" not in case.model and not case.is_fused
    for i, (this, that) in enumerate(itertools.zip_longest(actual.seen, installed.seen)):
        # Some gradients, as of b_K, are the rounding of others.
        gradients = [x for name, x in installed.seen if "grad" in name and hasattr(x, "amax")]
        scale = max((float(_largest(x)) for x in gradients if "grad" in that[0]), default=0.0)
        if not equal(this, that, exact, scale, has_16_bits(case)):
            messages = "\n".join(("errors:", *actual.messages, "installed:", *installed.messages))
            return f"value {i}: {this}\ninstalled: {that}\n{messages}"
    return None


def has_16_bits(case: Case) -> bool:
    """Return True if a case computes with 16 bits anywhere."""
    return any(word in str(case) for word in ("bfloat16", "half", "'dtype'"))


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0, 0, 0).abs().amax() if x.numel() else torch.zeros(())


def equal(this: Any, that: Any, exact: bool, scale: float, has_16_bits: bool) -> bool:
    """Return True if two values that cases show are the same, to rounding of values of a scale."""
    if this is None or that is None or this[0] != that[0]:
        return False
    a, b = this[1], that[1]
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if IS_BRIDGE and ("grad" in this[0] or a.dtype == torch.float64):
        exact = False  # its gradients are added up otherwise; some softmax is in float32
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if exact or not a.is_floating_point():
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    within = 0.1 if has_16_bits or a.dtype.itemsize == 2 else 1e-4
    atol = within * max(1.0, scale, float(_largest(b)))
    return torch.allclose(a, b, rtol=10 * within, atol=atol, equal_nan=True)
