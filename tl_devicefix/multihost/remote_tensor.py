"""A tensor of another host, which comes home when its values are used.

It shows its shape, its dtype, and home as its device, so code that reads weights or cached
activations need not know of other hosts. There are three kinds:

1. A weight is fetched at each use, and cannot be changed.
2. A cached activation, or a part of a KV cache, is fetched once.
3. The output of blocks that have not run yet. Reading it runs them. This kind exists only within
   the model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from tl_devicefix.placement.devices import storage_of
from tl_devicefix.placement.elsewhere import TensorElsewhere

_TorchFunction = Callable[..., Any]
"""A function of torch, or a method of `torch.Tensor`."""

_T: Any = torch.Tensor
_FACTS = frozenset(
    [
        *(_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.__len__),
        *(_T.is_floating_point, _T.is_complex, _T.is_inference, _T.get_device),
        *(_T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__),
        *(_T.layout.__get__, _T.itemsize.__get__, _T.nbytes.__get__, _T.is_meta.__get__),
        *(_T.is_cuda.__get__, _T.is_sparse.__get__, _T.is_quantized.__get__),
    ]
)
"""Functions that need no values."""
_WITHOUT_GRAPH = frozenset(
    [_T.requires_grad.__get__, _T.grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__]
)
"""Functions that need no values if the tensor has no graph."""
_VIEWS = (_T.view, _T.reshape, _T.transpose)


class RemoteTensor(TensorElsewhere):
    """A tensor of another host; see the module.

    Attributes:
        handle: the `RemoteHandle` that keeps it, or what it views, on the worker; None if the
            worker does not keep it.
        kept: its `KeptTensor`; None for a view, and if the worker does not keep it.
    """

    handle: Any
    kept: Any
    _is_param: bool  # makes torch take it for a parameter
    _weight_is: str
    _waits: bool
    _fetch: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[RemoteTensor],
        fetch: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight_is: str = "",
        waits: bool = False,
        handle: object = None,
        kept: object = None,
        strides: tuple[int, ...] | None = None,
    ) -> RemoteTensor:
        """Make a tensor whose values `fetch` returns, as a plain tensor at home (`device`).

        Args:
            shape, dtype, device: what it shows before it is fetched.
            weight_is: where a weight is: "blocks.7.attn.W_Q is on node-b"; "" for other kinds.
            waits: True for the output of blocks that have not run, which may have a graph.
            handle, kept: see the class.
            strides: the strides of the values; None if they are contiguous.
        """
        made = torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=device)
        made._is_param, made._weight_is, made._waits = bool(weight_is), weight_is, waits
        made._fetch, made._value, made.handle, made.kept = fetch, None, handle, kept
        return made

    @property
    def is_fetched(self) -> bool:
        """True if the values are at home, where somebody may have changed them."""
        return self._value is not None

    def read(self) -> torch.Tensor:
        """Return the values, as a plain tensor at home."""
        if self._weight_is:  # it may be too large to keep
            return self._fetch()
        if self._value is None:
            self._value = self._fetch()
            del self._fetch  # it may hold inputs of the blocks that have run
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: _TorchFunction, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        this = args[0] if args and type(args[0]) is RemoteTensor else None
        if this is not None and this._value is None:
            if func == _T.is_leaf.__get__:  # an optimiser asks this of each of its parameters
                refuse_weights([this])
            if func in _FACTS or (func in _WITHOUT_GRAPH and not this._waits):
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            # There is no graph to detach from, and reads need no copy.
            is_same = func in (_T.detach, _T.data.__get__) and not this._waits
            if is_same or _changes_nothing(func, this, args[1:], kwargs):
                return this
            # A view fetches nothing yet: `cache.remove_batch_dim()` indexes all entries, and a
            # Bridge's hook points split heads, but few of the activations are read.
            is_view = func in _VIEWS or (func is _T.__getitem__ and _is_basic(args[1]))
            if is_view and not this._waits:
                with DisableTorchFunctionSubclass():
                    like = torch.empty_strided(
                        this.shape, this.stride(), dtype=this.dtype, device="meta"
                    )
                # Read now if `reshape` may copy: a copy must not see later changes.
                if func is not _T.reshape or like.is_contiguous():
                    like = func(like, *args[1:], **kwargs)
                    return RemoteTensor(
                        lambda: func(this.read(), *args[1:], **kwargs),
                        *(like.shape, like.dtype, this.device, this._weight_is),
                        handle=this.handle,
                        strides=like.stride(),
                    )
        _refuse_changes(func, args, kwargs)
        weights: dict[int, str] = {}  # storage of a fetched weight -> where it is

        def read(tensor: RemoteTensor) -> torch.Tensor:
            value = tensor.read()
            if tensor._weight_is:
                weights[storage_of(value)] = tensor._weight_is
            return value

        args, kwargs = tree_map_only(RemoteTensor, read, (args, kwargs))
        result = func(*args, **kwargs)
        if not weights:
            return result

        def frozen(part: torch.Tensor) -> torch.Tensor:
            # A view of a weight, such as `W_O.T`, is frozen too: a change would be lost.
            where = weights.get(storage_of(part))
            if where is None:
                return part
            like = part.shape, part.dtype, part.device
            return RemoteTensor(lambda: part, *like, where, strides=part.stride())

        return tree_map_only(torch.Tensor, frozen, result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no default arguments
        cls, func: _TorchFunction, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Calls from C++ bypass `__torch_function__`.
        return cls.__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        # A weight cannot be changed, so the copy may share it.
        return self if self._weight_is else self.read().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.read().__reduce_ex__(protocol)


def _changes_nothing(
    func: _TorchFunction, tensor: RemoteTensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    """Return True for a `to` with the same device and dtype, and for freezing a weight."""
    if func in (_T.requires_grad_, _T.requires_grad.__set__):
        return bool(tensor._weight_is) and args == (False,)
    like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return func is _T.to and func(like, *args, **kwargs) is like


def _is_basic(index: object) -> bool:
    """Return True if an index selects a view, whose shape does not depend on values."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or type(part) in (int, slice) for part in parts)


def _refuse_changes(
    func: _TorchFunction, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Refuse to change a weight: the change would not reach its host."""
    # In-place functions are called `mul_`, `__imul__`, `__set__`, or from C++ `mul_.Tensor`.
    name = func.__name__.partition(".")[0]
    in_place = (
        name in ("__set__", "__setitem__")
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    )
    changed = tree_leaves([(*args, *kwargs.values())[:1] if in_place else (), kwargs.get("out")])
    refuse_weights(changed)


def refuse_weights(tensors: Iterable[object]) -> None:
    """Refuse weights of other hosts.

    Raises:
        RuntimeError: if one of the tensors is such a weight; the message names it.
    """
    for tensor in tensors:
        if type(tensor) is RemoteTensor and tensor._weight_is:
            raise RuntimeError(
                f"{tensor._weight_is}, where weights are frozen: they cannot be changed and get no "
                "gradients; change a .clone() of it, give the optimiser only parameters with "
                "requires_grad, or load the model on this host's devices alone"
            )


@cache  # once a process
def refuse_in_steps() -> None:
    """Refuse weights of other hosts in steps of optimizers with `differentiable=True` too."""

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        refuse_weights(weight for group in optimizer.param_groups for weight in group["params"])

    register_optimizer_step_pre_hook(refuse)
