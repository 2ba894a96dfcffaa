"""Refuse operations on state that all runs in flight share: random numbers, `backward`, `.grad`."""

from __future__ import annotations

from typing import Any

import torch

from tl_devicefix.around import Args, Forward, Kwargs
from tl_devicefix.dispatch.mixing import OutsideBlocks
from tl_devicefix.dispatch.scheduler import Run
from tl_devicefix.types import Model

# Compare names: torch, torch.Tensor and torch.nn.functional have different objects for one name.
_RANDOM = {
    *("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout"),
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "gumbel_softmax"),
    *("multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
    *("randn_like", "random", "randperm", "rrelu", "rrelu_with_noise", "uniform"),
    *("_sample_dirichlet", "_standard_gamma", "gru", "lstm", "rnn_relu", "rnn_tanh"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("lobpcg", "pca_lowrank", "svd_lowrank", "kaiming_normal", "kaiming_uniform", "orthogonal"),
    *("sparse", "trunc_normal", "log_normal", "xavier_normal", "xavier_uniform"),
}
# Functions that draw unless an argument is false or zero: its position, names and default.
_UNLESS: dict[str, tuple[int, tuple[str, ...], float]] = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d"), (2, ("training", "train"), True)
    ),
    "scaled_dot_product_attention": (4, ("dropout_p",), 0.0),
}
_GRAD: Any = torch.Tensor.grad  # a descriptor
_OF_GRAD = {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}


def _shared_by(func: Forward, args: Args, kwargs: Kwargs) -> str | None:
    """Return the state that a function of torch shares with other runs, if any."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        # Runs share only the gradients of leaves that need them.
        is_shared = func in _OF_GRAD and args[0].is_leaf and args[0].requires_grad
        return ".grad" if is_shared else None
    # "rand.default" is one of torch.ops.aten, and "normal_" works in place.
    name = name.partition(".")[0].rstrip("_")
    if name == "backward":
        return ".grad"
    draws = name in _RANDOM
    if name in _UNLESS:
        position, names, default = _UNLESS[name]
        given = (kwargs[name] for name in names if name in kwargs)
        draws = bool(args[position] if len(args) > position else next(given, default))
    return "random numbers" if draws and kwargs.get("generator") is None else None


class RefuseShared(OutsideBlocks):
    """A mode that raises if a run uses what all runs share, or goes on after the map has ended.

    A model's own forward draws no random numbers outside of training, so it runs without the mode.

    Args:
        run: the run.
        pauses: False if users' torch hooks or `forward`s run in the model's forward.
    """

    def __init__(self, run: Run, pauses: bool) -> None:
        super().__init__()
        self._run = run
        self._pauses = pauses

    def pauses_in(self, model: Model) -> bool:
        """Return True if the mode is off in a model's forward."""
        return self._pauses

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        self._run.queue.check()
        if (shared := _shared_by(func, args, kwargs)) is not None:
            name = getattr(func, "__name__", "")
            called = "reading or setting it" if name.startswith("__") else name
            raise RuntimeError(_REMEDIES[shared].format(called))
        return func(*args, **kwargs)


_REMEDIES = {
    "random numbers": (
        "{} draws random numbers in a run in flight, where runs would draw them in no fixed "
        "order: draw them before and pass them in the items, give the run its own "
        "torch.Generator (or `generate` do_sample=False), or pass max_in_flight=1"
    ),
    ".grad": (
        "{} uses .grad, which all runs in flight share: use torch.autograd.grad(loss, tensors), "
        "or pass max_in_flight=1"
    ),
}
