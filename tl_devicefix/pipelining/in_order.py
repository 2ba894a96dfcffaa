"""Run operations on shared state in the order of the items.

Runs share the RNG state and `.grad`. To match a sequential loop, a run waits here until all earlier
results have been fetched. Its earlier operations were pipelined with those of other runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tl_devicefix.around import Args, Forward, Kwargs
from tl_devicefix.dispatch.mixing import OutsideBlocks
from tl_devicefix.dispatch.scheduler import Run, current_run, using_shared

# Functions of torch that run in order, by name, because torch, torch.Tensor and torch.nn.functional
# have each another object for one name.
_ALWAYS = {
    *("backward", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout"),
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "gumbel_softmax"),
    *("multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
    *("randn_like", "random", "randperm", "rrelu", "rrelu_with_noise", "uniform"),
    *("_sample_dirichlet", "_standard_gamma", "gru", "lstm", "rnn_relu", "rnn_tanh"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("lobpcg", "pca_lowrank", "svd_lowrank", "kaiming_normal", "kaiming_uniform", "orthogonal"),
    *("sparse", "trunc_normal", "log_normal", "xavier_normal", "xavier_uniform"),
}
# Functions that run in order unless an argument is zero: its position, names and default.
_UNLESS: dict[str, tuple[int, tuple[str, ...], float]] = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d"), (2, ("training", "train"), True)
    ),
    "scaled_dot_product_attention": (4, ("dropout_p",), 0.0),
}
_GRAD: Any = torch.Tensor.grad  # a descriptor
_OF_GRAD = {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}


def _is_in_order(func: Forward, args: Args, kwargs: Kwargs) -> bool:
    name = getattr(func, "__name__", "")
    # `.grad` of leaves that need gradients, because runs share no other gradients.
    if name.startswith("__"):
        return func in _OF_GRAD and args[0].is_leaf and args[0].requires_grad
    # "rand.default" is one of torch.ops.aten, and "normal_" works in place.
    name = name.partition(".")[0].rstrip("_")
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

    Args:
        run: the run.
        cancels: True if its next operation cancels the run once nobody waits for it.
    """

    def __init__(self, run: Run, cancels: bool = True) -> None:
        super().__init__()
        self._run = run
        self._cancels = cancels

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self._cancels:
            self._run.queue.check()
        if _is_in_order(func, args, kwargs):
            self._run.wait_for_earlier()
        if func is torch.autograd.grad:  # because its hooks may draw
            if _redispatch is not None:
                # An error in torch's engine would end the process on simulated devices.
                with InOrder(self._run, cancels=False):
                    return _redispatch(func, types, args, kwargs)
            self._run.wait_for_earlier()
        return func(*args, **kwargs)


_SEEDS = (
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
    *("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"),
)
"""Functions of torch that read or set the state of a shared generator."""

_n_within = 0  # because several threads may be within it, and the last one puts all back
_replaced: dict[tuple[ModuleType, str], tuple[Forward, Forward]] = {}
"""Owner and name -> torch's function and ours, while a thread is within `seeding_in_order`."""


@contextlib.contextmanager
def seeding_in_order(kinds: Iterable[str]) -> Iterator[None]:
    """Make pipelined runs call these devices' seed functions in order, within a `with` block."""
    global _n_within
    owners = torch, torch.random, *map(torch.get_device_module, kinds)
    with using_shared:
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
        with using_shared:
            _n_within -= 1
            while _replaced and not _n_within:
                (owner, name), (own, ours) = _replaced.popitem()
                if getattr(owner, name) is ours:  # because somebody may have replaced it since
                    setattr(owner, name, own)


def _after_earlier(own: Forward) -> Forward:
    @functools.wraps(own)
    def in_order(*args: object, **kwargs: object) -> object:
        run = current_run()
        if run is not None:
            run.wait_for_earlier()
        return own(*args, **kwargs)

    return in_order
