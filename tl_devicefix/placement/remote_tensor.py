"""A tensor of another host, which comes home when its values are used.

It shows its shape, its dtype, and home as its device, so code that reads weights or cached
activations needs to know nothing of other hosts. There are three kinds:

1. A weight is fetched at each use, because it may be large, and cannot be changed.
2. A cached activation, or a part of a KV cache, is fetched once.
3. The output of blocks that have not run yet: to read it runs them. It does not leave the model's
   forward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from tl_devicefix.placement.devices import Host, storage_of

_numbers = count(1)


class RemoteHandle:
    """A number of something that a worker keeps, until this object is freed."""

    def __init__(self, host: Host) -> None:
        self.host, self.number, self.has_graph = host, next(_numbers), False
        # Not at exit, because workers end with this process.
        weakref.finalize(self, host.forgotten.append, self.number).atexit = False

    def __deepcopy__(self, memo: object) -> RemoteHandle:
        return self  # because a second one of the same number would free it too early


_T: Any = torch.Tensor  # because type checkers know no `__get__` of its attributes
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
"""Functions that need no values of a tensor that has no graph."""


class RemoteTensor(torch.Tensor):
    """A tensor of another host; see the module.

    Attributes:
        handle: what keeps a cached activation on its host; None of other kinds.
    """

    handle: RemoteHandle | None
    _is_param: bool  # because torch takes what has it for a parameter
    _weight_is: str
    _waits: bool
    _fetch: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    def __new__(
        cls,
        fetch: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight_is: str = "",
        waits: bool = False,
        handle: RemoteHandle | None = None,
    ) -> RemoteTensor:
        """Make one whose values `fetch` returns.

        Args:
            fetch: returns a plain tensor at home.
            shape: its shape, as it is known before it is fetched; and so `dtype`.
            dtype: see `shape`.
            device: home.
            weight_is: of a weight, where it is: "blocks.7.attn.W_Q is on node-b".
            waits: True for the output of blocks that have not run, because that may have a graph.
            handle: see the class.
        """
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._is_param, made._weight_is, made._waits = bool(weight_is), weight_is, waits
        made._fetch, made._value, made.handle = fetch, None, handle
        return made

    @property
    def is_fetched(self) -> bool:
        """True if the values are at home, where somebody may have changed them."""
        return self._value is not None

    def read(self) -> torch.Tensor:
        """Return the values, as a plain tensor at home."""
        if self._weight_is:
            return self._fetch()
        if self._value is None:
            self._value = self._fetch()
            del self._fetch  # because it may hold inputs of the blocks that have run
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        this = args[0] if args and type(args[0]) is RemoteTensor else None
        if this is not None and this._value is None:
            if func in _FACTS or (func in _WITHOUT_GRAPH and not this._waits):
                with DisableTorchFunctionSubclass():  # because these call this method again
                    return func(*args, **kwargs)
            is_same = func in (_T.detach, _T.data.__get__) and not this._waits
            if is_same or _changes_nothing(func, this, args[1:], kwargs):
                return this
            # Not read yet, because `cache.remove_batch_dim()` indexes all entries; few are read.
            if func is _T.__getitem__ and _is_basic(args[1]) and not this._waits:
                shape = torch.empty(this.shape, device="meta")[args[1]].shape
                fetch = functools.partial(lambda whole, index: whole.read()[index], this, args[1])
                return RemoteTensor(fetch, shape, this.dtype, this.device, this._weight_is)
        _refuse_changes(func, args, kwargs)
        weights: dict[int, str] = {}  # where the weights are, by their storages here

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
            # A view of a weight, such as `W_O.T`, is frozen too: a change of it would be lost.
            where = weights.get(storage_of(part))
            if where is None:
                return part
            return RemoteTensor(lambda: part, part.shape, part.dtype, part.device, where)

        return tree_map_only(torch.Tensor, frozen, result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Here too, because calls from C++ pass `__torch_function__` by.
        return cls.__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        # A weight stays, because a copied model has its blocks on the same hosts.
        return self if self._weight_is else self.read().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as a plain tensor, because the host is gone when it is loaded again.
        return self.read().__reduce_ex__(protocol)


def plain(value: Any) -> Any:
    """Return a tensor of another host as a plain one, and anything else as it is."""
    return value.read() if type(value) is RemoteTensor else value


def _changes_nothing(
    func: object, tensor: RemoteTensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    """Return True for a `to` the same device and dtype, and for freezing a weight."""
    if func in (_T.requires_grad_, _T.requires_grad.__set__):
        # Libraries freeze whole models, and weights of other hosts are frozen already.
        return bool(tensor._weight_is) and args == (False,)
    return (
        func is _T.to
        and kwargs.keys() <= {"device", "dtype"}
        and all(
            value is None
            or value == tensor.dtype
            or (isinstance(value, str | torch.device) and torch.device(value) == tensor.device)
            for value in (*args, *kwargs.values())
        )
    )


def _is_basic(index: object) -> bool:
    """Return True if indexing gives a view, whatever the values are."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or type(part) in (int, slice) for part in parts)


def _refuse_changes(
    func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Refuse to change a weight, because the change would not reach its host."""
    name = func.__name__.partition(".")[0]
    # As torch names them: `x[i] = 1`, `add_` but not `__add__`, and `__iadd__`.
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
        RuntimeError: if one of the tensors is a weight of another host, naming it.
    """
    for tensor in tensors:
        if type(tensor) is RemoteTensor and tensor._weight_is:
            raise RuntimeError(
                f"{tensor._weight_is}, where weights are frozen: they cannot be changed and get no "
                "gradients; change a .clone() of it, give the optimiser only parameters with "
                "requires_grad, or load the model on this host's devices alone"
            )


@register_optimizer_step_pre_hook
def _refuse_to_train(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    # Before the step, because foreach kernels of optimizers would change only some weights.
    refuse_weights(p for group in optimizer.param_groups for p in group["params"])
