"""What a model's tensors hold: no values, NaN, infinity, or the memory of another parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tl_devicefix.checking.by_class import of_class
from tl_devicefix.checking.report import Finding
from tl_devicefix.dispatch.naming import expression, joined, named_modules
from tl_devicefix.dispatch.user_modules import runs_where_it_is
from tl_devicefix.multihost.peers import HostLost
from tl_devicefix.placement.devices import printed, site_of

_INFINITE_BY_DESIGN = "IGNORE"
"""The buffer that attention scores are masked with."""


def value_findings(model: Any) -> list[Finding]:
    """Tensors without values, with NaN or infinite ones, and parameters that share memory."""
    return [*_meta_findings(model), *_bad_values(model), *_tied_parameters(model)]


def _named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Each parameter and then each buffer, once."""
    found: dict[str, dict[int, tuple[str, torch.Tensor]]] = {"_parameters": {}, "_buffers": {}}
    for path, module in named_modules(model):
        for kind, named in found.items():
            for leaf, tensor in getattr(module, kind).items():
                if tensor is not None:
                    named.setdefault(id(tensor), (joined(path, leaf), tensor))
    return {name: tensor for named in found.values() for name, tensor in named.values()}


def _meta_findings(model: Any) -> Iterator[Finding]:
    for name, tensor in _named_tensors(model).items():
        if tensor.is_meta:
            message = f"{name} {_shape(tensor)} is on the meta device, so it has no values"
            yield Finding("meta", name, message, _load(name, assign=True))


def _bad_values(model: Any) -> Iterator[Finding]:
    tensors = {
        name: tensor.detach()
        for name, tensor in _named_tensors(model).items()
        if tensor.is_floating_point() and tensor.itemsize > 1  # float8 has no extremes in torch
        if tensor.numel() and not tensor.is_meta
        if name.rpartition(".")[2] != _INFINITE_BY_DESIGN
    }
    if model.cfg.positional_embedding_type == "alibi":
        tensors.pop("pos_embed.W_pos", None)  # TransformerLens neither sets nor reads it
    finite = _are_finite(tensors)
    for name, tensor in tensors.items():
        if finite[name] is None:
            why = f"was never computed on {printed(tensor.device)}, where something failed"
            yield Finding("values", name, f"{name} {why}", _load(name, assign=True))
        elif not finite[name]:
            n_nan, n_inf = _count(tensor)
            counts = [(n_nan, "NaN"), (n_inf, "infinite")]
            found = " and ".join(f"{count} {what}" for count, what in counts if count)
            message = f"{name} {_shape(tensor)} has {found} of {tensor.numel()} values"
            yield Finding("values", name, message, _load(name))


def _are_finite(tensors: dict[str, torch.Tensor]) -> dict[str, bool | None]:
    """Whether each is finite; None for what another host never computed.

    Each device looks at its own, without a copy, and answers once.
    """
    answers: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        # The extremes of a tensor with NaN are NaN.
        answers[tensor.device][name] = torch.stack(tensor.aminmax()).isfinite().all()
    found: dict[str, bool | None] = {}
    for device, on_device in answers.items():
        try:
            found |= zip(on_device, torch.stack(list(on_device.values())).tolist())
        except HostLost:
            raise
        except Exception:  # whatever failed on another host is raised here
            if site_of(device) is None:
                raise
            found |= {name: _read(answer) for name, answer in on_device.items()}
    return found


def _read(answer: torch.Tensor) -> bool | None:
    try:
        return bool(answer)
    except HostLost:
        raise
    except RuntimeError:  # as something failed that it depends on
        return None


def _count(tensor: torch.Tensor) -> tuple[int, int]:
    """How many values are NaN, and how many infinite; slice by slice."""
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    per_slice = max(_ELEMENTS // math.prod(rows.shape[1:]), 1)
    n_nan = n_inf = 0
    for part in rows.split(per_slice):
        n_nan += int(part.isnan().sum())
        n_inf += int(part.isinf().sum())
    return n_nan, n_inf


_ELEMENTS = 2**22


def _tied_parameters(model: Any) -> Iterator[Finding]:
    """Parameters that overlap in memory, and are not meant to."""
    are_tied = of_class(model).are_tied
    aside = {each for m in model.modules() if runs_where_it_is(m) for each in m.modules()}
    seen: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = defaultdict(list)
    for path, module in named_modules(model):
        for leaf, tensor in module._parameters.items():
            if tensor is None or tensor.is_meta or not tensor.numel() or module in aside:
                continue
            name = f"{path}.{leaf}" if path else leaf
            start, end = _span(tensor)
            others = seen[tensor.device, tensor.untyped_storage().data_ptr()]
            overlapping = (each for a, b, each in others if start < b and a < end)
            first = next((each for each in overlapping if not are_tied(model, each, name)), None)
            others.append((start, end, name))
            if first is not None:
                it = expression(name)
                message = f"{name} shares its memory with {first}: what changes one, changes both"
                fix = f"{it} = torch.nn.Parameter({it}.detach().clone())"
                yield Finding("storage", name, message, fix)


def _span(tensor: nn.Parameter) -> tuple[int, int]:
    """The first byte of a tensor, and the one after its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()


def _shape(tensor: torch.Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def _load(name: str, assign: bool = False) -> str:
    assigned = ", assign=True" if assign else ""
    return f'model.load_state_dict({{"{name}": values}}, strict=False{assigned})'
