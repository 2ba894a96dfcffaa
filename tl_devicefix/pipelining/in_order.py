"""What has to happen in the order of the runs: a run in flight waits for all earlier ones first.

Random numbers are drawn from generators that all runs share, and gradients are added up in
parameters that all runs share. In a plain loop the runs come to these one after the other, and
none before the result of the one before it has been fetched: so a run waits there for as long.
What it has done before was in flight with the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tl_devicefix.dispatch.joining import OutsideBlocks, redispatch
from tl_devicefix.dispatch.scheduler import Run, current_run
from tl_devicefix.monkeypatch.replacing import Replacing

Condition = Callable[[Any, dict[str, Any]], bool]


def _always(args: Any, kwargs: dict[str, Any]) -> bool:
    return True


def _switched_on(position: int, names: tuple[str, ...], default: Any) -> Condition:
    """Whether the argument that has a function draw is there, and not zero."""

    def is_on(args: Any, kwargs: dict[str, Any]) -> bool:
        if len(args) > position:
            return bool(args[position])
        return bool(next((kwargs[name] for name in names if name in kwargs), default))

    return is_on


_DRAWING = (
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
)
_IN_TRAINING = {
    **dict.fromkeys(("dropout", "feature_dropout"), True),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), True),
    **dict.fromkeys(("dropout_", "feature_dropout_", "alpha_dropout_"), True),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout", "feature_alpha_dropout_"), False),
}
IN_ORDER: dict[str, Condition] = {
    **dict.fromkeys(_DRAWING, _always),
    **{
        name: _switched_on(2, ("training", "train"), default)
        for name, default in _IN_TRAINING.items()
    },
    **dict.fromkeys(("rrelu", "rrelu_"), _switched_on(3, ("training",), False)),
    "scaled_dot_product_attention": _switched_on(4, ("dropout_p",), 0.0),
    "backward": _always,
}
"""Functions of torch, by name, and whether a call is to be in order."""

_GRAD: Any = torch.Tensor.grad
_OF_GRAD = {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}
"""What reads and sets `.grad`, in which gradients add up."""


def _is_in_order(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return func in _OF_GRAD and args[0].is_leaf and args[0].requires_grad
    condition = IN_ORDER.get(name.partition(".")[0])  # "rand.default" is one of torch.ops.aten
    return condition is not None and condition(args, kwargs)


class InOrder(OutsideBlocks, TorchFunctionMode):
    """Within it, a run in flight comes to what is to be in order when the earlier ones are done.

    Args:
        run: this thread's.
        ends: whether it ends anywhere when nobody waits for it; not within torch's autograd engine,
            of which simulated devices are part.
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
            self._run.turns.check()
        if _is_in_order(func, args, kwargs):
            self._run.wait_for_earlier()
        if func is torch.autograd.grad:  # whose hooks may draw
            if redispatch is not None:
                with InOrder(self._run, ends=False):
                    return redispatch(func, types, args, kwargs)
            self._run.wait_for_earlier()
        return func(*args, **kwargs)


_SEEDS = (
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
    *("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"),
)
"""Functions of torch's that read or set the state of a generator that all runs share."""

_replacing = Replacing()


def seeding_in_order(kinds: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Within it, runs in flight come to torch's seeds in order too; other threads as ever.

    Args:
        kinds: the types of the model's devices.
    """
    owners = (torch, torch.random, *map(torch.get_device_module, kinds))
    return _replacing(
        (owner, name, _after_earlier) for owner in owners for name in _SEEDS if name in vars(owner)
    )


def _after_earlier(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def in_order(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is not None:
            run.wait_for_earlier()
        return own(*args, **kwargs)

    return in_order
