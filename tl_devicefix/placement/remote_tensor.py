"""A tensor of another host, which comes home when its values are used.

Whoever has it sees its shape, its dtype, and home as its device. So what reads weights or cached
activations needs to know nothing of other hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

Fetch = Callable[[], torch.Tensor]
_OF: Any = torch.Tensor
_FACTS = frozenset(
    [
        *(
            _OF.size,
            _OF.dim,
            _OF.ndimension,
            _OF.numel,
            _OF.nelement,
            _OF.element_size,
            _OF.__len__,
        ),
        *(_OF.is_floating_point, _OF.is_complex, _OF.is_inference, _OF.get_device),
        *(_OF.shape.__get__, _OF.dtype.__get__, _OF.device.__get__, _OF.ndim.__get__),
        *(_OF.layout.__get__, _OF.itemsize.__get__, _OF.nbytes.__get__, _OF.is_meta.__get__),
        *(_OF.is_cuda.__get__, _OF.is_sparse.__get__, _OF.is_quantized.__get__),
    ]
)
"""What is known of a tensor without its values."""
_FACTS_OF_GRADIENTS = frozenset(
    [_OF.requires_grad.__get__, _OF.grad.__get__, _OF.grad_fn.__get__, _OF.is_leaf.__get__]
)
_SAME = frozenset([_OF.detach, _OF.data.__get__])


class RemoteTensor(torch.Tensor):
    """An activation of another host, which is fetched once; or a weight.

    A weight is fetched each time that it is used, and cannot be changed: `weight_is` says where it
    is, as "blocks.7.attn.W_Q is on node-b". An activation that `has_graph` is fetched before
    anybody asks about its gradient.
    """

    _is_param: bool  # so torch takes it for a parameter
    _weight_is: str
    _has_graph: bool
    _fetch: Fetch
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: Any,
        fetch: Fetch,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight_is: str = "",
        has_graph: bool = False,
    ) -> Any:
        """Make one that is `fetch()`, of this shape and dtype; the device is home."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._is_param, made._weight_is, made._has_graph = bool(weight_is), weight_is, has_graph
        made._fetch, made._value = fetch, None
        return made

    @property
    def is_fetched(self) -> bool:
        """Whether an activation's values are at home, where they may have been changed."""
        return self._value is not None

    def read(self) -> torch.Tensor:
        """Its values, as a plain tensor at home."""
        if self._weight_is:
            return self._fetch()
        if self._value is None:
            self._value = self._fetch()
            del self._fetch
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        this = args[0] if args and type(args[0]) is RemoteTensor else None
        if this is not None and this._value is None:
            if func in _FACTS or (func in _FACTS_OF_GRADIENTS and not this._has_graph):
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _SAME and not this._has_graph:
                return this
            if func is _OF.to and _is_so(this, args[1:], kwargs):
                return this
            if this._weight_is and _freezes(func, args):
                return this
            if func is _OF.__getitem__ and _is_basic(args[1]) and not this._has_graph:
                shape = torch.empty(this.shape, device="meta")[args[1]].shape
                fetch = functools.partial(_item, this, args[1])
                return RemoteTensor(fetch, shape, this.dtype, this.device, this._weight_is)
        _refuse_changes(func, args, kwargs)
        weights: dict[int, str] = {}

        def read(tensor: RemoteTensor) -> torch.Tensor:
            value = tensor.read()
            if tensor._weight_is:
                weights[_storage(value)] = tensor._weight_is
            return value

        result = func(
            *tree_map_only(RemoteTensor, read, args), **tree_map_only(RemoteTensor, read, kwargs)
        )
        if not weights:
            return result

        def weight_or_not(part: torch.Tensor) -> torch.Tensor:  # part of a weight, such as W_O[3]
            where = weights.get(_storage(part))
            if where is None:
                return part
            return RemoteTensor(lambda: part, part.shape, part.dtype, part.device, where)

        return tree_map_only(torch.Tensor, weight_or_not, result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Of what torch calls in C++.
        return cls.__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self if self._weight_is else self.read().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


def plain(value: Any) -> Any:
    """A tensor of another host as a plain one; anything else as it is."""
    return value.read() if type(value) is RemoteTensor else value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_so(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `tensor.to(...)` asks for what it is already."""
    return kwargs.keys() <= {"device", "dtype"} and all(
        value is None
        or value == tensor.dtype
        or (isinstance(value, str | torch.device) and torch.device(value) == tensor.device)
        for value in (*args, *kwargs.values())
    )


def _is_basic(index: Any) -> bool:
    """Whether indexing gives a view, whatever the values are."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or type(part) in (int, slice) for part in parts)


def _item(tensor: RemoteTensor, index: Any) -> torch.Tensor:
    return tensor.read()[index]


def _freezes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is `requires_grad_(False)`, as weights of other hosts are anyway."""
    return func in (_OF.requires_grad_, _OF.requires_grad.__set__) and args[1:] == (False,)


def _refuse_changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to change a weight: the block that has it would not see that."""
    name = func.__name__.partition(".")[0]
    in_place = (
        name in ("__set__", "__setitem__")
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    )
    changed = tree_leaves([((*args, *kwargs.values())[:1]) if in_place else (), kwargs.get("out")])
    refuse_weights(item for item in changed if type(item) is RemoteTensor)


def refuse_weights(tensors: Any) -> None:
    """Refuse if one of some tensors is a weight of another host."""
    for tensor in tensors:
        if getattr(tensor, "_weight_is", ""):
            raise RuntimeError(
                f"{tensor._weight_is}, where weights are frozen: they cannot be changed and get no "
                "gradients; change a .clone() of it, give the optimiser only parameters with "
                "requires_grad, or load the model on this host's devices alone"
            )


@register_optimizer_step_pre_hook
def _refuse_to_train(optimizer: Any, args: Any, kwargs: Any) -> None:
    refuse_weights(p for group in optimizer.param_groups for p in group["params"])
