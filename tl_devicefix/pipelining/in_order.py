"""Run operations on shared state in the order of the items.

Runs share the RNG state and `.grad`. To match a sequential loop, a run waits here until all earlier
results have been fetched. Its earlier operations were pipelined with those of other runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tl_devicefix.dispatch.mixing import OutsideBlocks
from tl_devicefix.dispatch.scheduler import Run, current_run

_ALWAYS = {
    *("backward", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "rrelu", "rrelu_"),
    *("feature_alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_"),
    *("gumbel_softmax", "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand"),
    *("rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm"),
    *("uniform_", "_sample_dirichlet", "_standard_gamma", "native_dropout"),
    *("rrelu_with_noise", "rrelu_with_noise_"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("gru", "lstm", "rnn_relu", "rnn_tanh", "lobpcg", "pca_lowrank", "svd_lowrank"),
    *("kaiming_normal_", "kaiming_uniform_", "orthogonal_", "sparse_", "trunc_normal_"),
    *("xavier_normal_", "xavier_uniform_"),
}
"""Functions of torch, by name, that run in order."""
_UNLESS: dict[str, tuple[int, tuple[str, ...], Any]] = {
    **dict.fromkeys(
        ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"),
        (2, ("training", "train"), True),
    ),
    "scaled_dot_product_attention": (4, ("dropout_p",), 0.0),
}
"""Functions of torch that run in order unless an argument is zero: name -> the argument's position,
names and default."""

_GRAD: Any = torch.Tensor.grad
_OF_GRAD = {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}
"""Functions that read and set `.grad`."""


def _is_in_order(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return func in _OF_GRAD and args[0].is_leaf and args[0].requires_grad
    name = name.partition(".")[0]  # "rand.default" is one of torch.ops.aten
    if name in _ALWAYS:
        return True
    if name not in _UNLESS:
        return False
    position, names, default = _UNLESS[name]
    if len(args) > position:
        return bool(args[position])
    return bool(next((kwargs[name] for name in names if name in kwargs), default))


# Calls a function within a mode that it has just left; not every supported torch has it.
_redispatch = getattr(torch.overrides, "redispatch_function", None)


class InOrder(OutsideBlocks, TorchFunctionMode):
    """A mode in which a pipelined run waits for earlier ones before operations on shared state.

    It also cancels a run that nobody waits for, at any operation outside of torch's autograd
    engine, because errors within the engine end the process on simulated devices.
    """

    def __init__(self, run: Run, ends: bool = True) -> None:
        super().__init__()
        self._run = run
        self._ends = ends

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._ends:
            self._run.queue.check()
        if _is_in_order(func, args, kwargs):
            self._run.wait_for_earlier()
        if func is torch.autograd.grad:  # because its hooks may draw
            if _redispatch is not None:
                with InOrder(self._run, ends=False):
                    return _redispatch(func, types, args, kwargs)
            self._run.wait_for_earlier()
        return func(*args, **kwargs)


_SEEDS = (
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
    *("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"),
)
"""Functions of torch that read or set the state of a shared generator."""

_lock = threading.RLock()
_n_within = 0
_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""Owner and name -> torch's function and ours, while a thread is within `seeding_in_order`."""


@contextlib.contextmanager
def seeding_in_order(kinds: Iterable[str]) -> Iterator[None]:
    """Make pipelined runs call these devices' seed functions in order, within a `with` block."""
    global _n_within
    owners = torch, torch.random, *map(torch.get_device_module, kinds)
    with _lock:
        _n_within += 1
        for owner in owners:
            for name in _SEEDS:
                if name in vars(owner) and (owner, name) not in _replaced:
                    own = getattr(owner, name)
                    _replaced[owner, name] = own, _after_earlier(own)
                    setattr(owner, name, _replaced[owner, name][1])
    try:
        yield
    finally:
        with _lock:
            _n_within -= 1
            while _replaced and not _n_within:
                (owner, name), (own, ours) = _replaced.popitem()
                if getattr(owner, name) is ours:  # because somebody may have replaced it since
                    setattr(owner, name, own)


def _after_earlier(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def in_order(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is not None:
            run.wait_for_earlier()
        return own(*args, **kwargs)

    return in_order
