"""Register the device type with torch: kernels, a device module and autocast."""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from tl_devicefix.placement.devices import DEVICE_TYPE, DeviceLike
from tl_devicefix.simulation.executor import Operation
from tl_devicefix.simulation.machine import Machine, active_machine, entered_machine
from tl_devicefix.simulation.tensor import copy_into, run, wrap

aten = torch.ops.aten

_libraries: list[torch.library.Library] = []


class DeviceModule:
    """The module ``torch.get_device_module("sim")``, with ``torch.cuda``'s names."""

    def is_available(self) -> bool:
        """Return True within `simulate`."""
        return entered_machine() is not None

    is_initialized = is_available

    def device_count(self) -> int:
        """Return the number of devices: 0 outside of `simulate`."""
        machine = entered_machine()
        return 0 if machine is None else len(machine.devices)

    def current_device(self) -> int:
        """Return the index of the current device of this thread."""
        return active_machine().current.index

    def set_device(self, device: DeviceLike) -> None:
        """Set the device that ``sim`` without an index stands for, in this thread."""
        machine = active_machine()
        machine.current.index = machine.index_of(device)

    def synchronize(self, device: DeviceLike | None = None) -> None:
        """Check only that the device exists: operations are synchronous."""
        active_machine().index_of(device)

    def __getattr__(self, name: str) -> Any:
        """Return the machine's method of this name that measures memory."""
        if "mem" in name and hasattr(Machine, name):
            return getattr(active_machine(), name)
        raise AttributeError(f"simulated devices have no {name!r}")

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast can use."""
        # torch calls this even if autocast is disabled, as transformers does around RoPE.
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the CPU makes the random numbers."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return the state of the CPU's generator, for `torch.random.fork_rng`."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Set the state of the CPU's generator."""
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False  # torch asks this before it seeds devices; a CPU works after a fork


_acc = getattr(torch._C, "_acc", None)  # `simulate` refuses a torch without it


# An older torch lacks these base classes.
class _Hooks(getattr(_acc, "PrivateUse1Hooks", object)):  # type: ignore[misc]
    def is_available(self) -> bool:
        return entered_machine() is not None

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(getattr(_acc, "DeviceGuard", object)):  # type: ignore[misc]
    # torch's C++ calls `type_`. Use a C function: Ctrl-C in a Python one would end the process.
    type_ = staticmethod(functools.partial(getattr, torch._C._autograd.DeviceType, "PrivateUse1"))


def register() -> None:
    """Register the device type with torch."""
    if _libraries:  # once per process: torch cannot unregister it
        return
    backend_registration._setup_privateuseone_for_python_backend(
        rename=DEVICE_TYPE, backend_module=DeviceModule(), hook=_Hooks(), device_guard=_Guard()
    )
    library = torch.library.Library("aten", "IMPL")
    for make in (_EMPTY, aten.empty_strided.default):
        library.impl(make, functools.partial(_allocate, make), "PrivateUse1")
    library.impl(
        "_copy_from", lambda source, target, *wait: copy_into(target, source, *wait), "PrivateUse1"
    )
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for operation in _WITH_KERNELS:
        library.impl(operation, functools.partial(_make, operation), "PrivateUse1")
    # Its fallbacks run operations without a kernel above and, in autocast, without a cast below.
    everything_else = torch.library.Library("_", "IMPL")
    everything_else.fallback(_make, "PrivateUse1")
    for name in (*_IN_LOWER_PRECISION, *_IN_FLOAT32, *_IN_THE_WIDEST):
        library.impl(name, functools.partial(_cast_first, name), _AUTOCAST.name)
    everything_else.fallback(torch.library.fallthrough_kernel, _AUTOCAST.name)
    # Keep the Libraries: when one is garbage-collected, torch removes its kernels.
    _libraries.extend((library, everything_else))


_EMPTY = aten.empty.memory_format
_WITH_KERNELS = (
    # Without a kernel, torch builds these two from other operations, which round differently.
    aten.silu_backward.default,
    aten.mish_backward.default,
    # `torch.tensor([...])` reads scalar tensors in C++, where torch finds no fallback.
    aten._local_scalar_dense.default,
)


def _allocate(
    make: Operation, *geometry: object, device: torch.device | None = None, **options: object
) -> object:
    options.pop("pin_memory", None)  # only CPU memory is pinned
    machine = active_machine()
    device = machine.devices[machine.index_of(device)]
    # Check before the CPU allocates: the simulated device may have no room.
    without = make(*geometry, **options, device="meta")
    machine.check_room(device, without.untyped_storage().nbytes())
    return _make(make, *geometry, **options, device=device)


def _make(func: Operation, *args: object, **kwargs: Any) -> object:
    """Run an operation that C++ code calls, or a factory without a kernel (`tril_indices`)."""
    device = kwargs.get("device")
    if device is None or device.type != DEVICE_TYPE:
        return run(func, args, kwargs)
    machine = active_machine()
    kwargs["device"] = machine.executor.data_device
    device = machine.devices[machine.index_of(device)]
    return wrap(machine.executor.run(func, args, kwargs, device.index), machine, device)


def _attention(
    query: Float[torch.Tensor, "*batch head query_pos d_head"],
    key: Float[torch.Tensor, "*batch kv_head key_pos d_head"],
    value: Float[torch.Tensor, "*batch kv_head key_pos d_value"],
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[torch.Tensor, "*batch head query_pos d_value"]:
    """Run scaled_dot_product_attention with the kernel that the CPU would choose."""
    # For a new device type, torch would take the math kernel, which rounds differently.
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), float("-inf")
        )
    options = {"scale": scale, "enable_gqa": enable_gqa}
    choice = aten._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )[0]


# Operations that models use, from autocast's lists for the CPU. Others are not cast.

_IN_LOWER_PRECISION = (
    *("addbmm", "addmm", "baddbmm", "bmm", "linear", "matmul", "mm"),
    *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
)
_IN_FLOAT32 = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy_loss", "nll_loss"),
    *("kl_div", "huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss", "cdist"),
)
_IN_THE_WIDEST = ("cat", "stack")
_AUTOCAST = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]


def _cast_first(name: str, *args: object, **kwargs: object) -> torch.Tensor:
    """Cast floating-point operands as autocast does, then call the operation."""
    dtype = torch.float32 if name in _IN_FLOAT32 else torch.get_autocast_dtype(DEVICE_TYPE)
    if name in _IN_THE_WIDEST:
        dtypes = (leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_cast(leaf))
        dtype = functools.reduce(torch.promote_types, dtypes, dtype)
    # Exclude autocast, which would call this kernel again.
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        args, kwargs = tree_map(
            lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, kwargs)
        )
        return getattr(aten, name).default(*args, **kwargs)


def _is_cast(leaf: object) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.device.type == DEVICE_TYPE
        and leaf.is_floating_point()
        and leaf.dtype != torch.float64
    )
