"""Operations on shared state, which pipelined runs do in the order of their items.

All runs share the generators of random numbers, and the parameters in which gradients add up. In a
loop, a run comes to these when all earlier results have been fetched: so it waits there for that.
Its operations before were pipelined with those of the others.
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
"""Functions of torch, by name, that run in order unless an argument is zero: its position, its
names, and its default."""

_GRAD: Any = torch.Tensor.grad
_OF_GRAD = {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}
"""What reads and sets `.grad`, in which gradients add up."""


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
    """Within it, a pipelined run waits for the earlier ones before an operation on shared state.

    It `ends` anywhere when nobody waits for it, but not within torch's autograd engine, of which
    simulated devices are part.
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
        if func is torch.autograd.grad:  # whose hooks may draw
            if _redispatch is not None:
                with InOrder(self._run, ends=False):
                    return _redispatch(func, types, args, kwargs)
            self._run.wait_for_earlier()
        return func(*args, **kwargs)


_SEEDS = (
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
    *("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"),
)
"""Functions of torch's that read or set the state of a generator that all runs share."""

_lock = threading.RLock()
_n_within = 0
_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""While any thread is within `seeding_in_order`: owner and name -> its own function, and ours."""


@contextlib.contextmanager
def seeding_in_order(kinds: Iterable[str]) -> Iterator[None]:
    """Within it, pipelined runs call torch's functions of seeds in order too, of these devices'."""
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
                if getattr(owner, name) is ours:  # or else someone has replaced it since
                    setattr(owner, name, own)


def _after_earlier(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def in_order(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is not None:
            run.wait_for_earlier()
        return own(*args, **kwargs)

    return in_order
