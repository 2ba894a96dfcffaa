"""Let torch functions mix devices, by copying their arguments to one device.

1. torch is tried first.
2. If it refuses, the arguments are copied to one device and the function is called again.
3. Copies that the function changed are written back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from transformer_lens.hook_points import HookFunction, HookPoint, LensHandle

from tl_devicefix.around import Args, Forward, Kwargs, ResumesModes, innermost
from tl_devicefix.dispatch.scheduler import launching, note_hooked, run_ahead
from tl_devicefix.errors import note, shown
from tl_devicefix.fusing.listening import hooks_of, note_hook
from tl_devicefix.monkeypatch.patch import is_of_user, package_of, patches
from tl_devicefix.placement.devices import CPU, printed, version_of
from tl_devicefix.placement.in_use import device_of_result, devices_in_use
from tl_devicefix.types import Model

T = TypeVar("T")
Tensors = list[torch.Tensor]


class OutsideBlocks(TorchFunctionMode):
    """A mode that has no effect within a block, so remote blocks run without it.

    It may pause in a model's forward, and resumes there in users' hooks and modules.
    """

    def pauses_in(self, model: Model) -> bool:
        """Return True if the mode pauses in a model's forward."""
        return False


class _Paused(threading.local):
    modes: tuple[TorchFunctionMode, ...] = ()


_paused = _Paused()
"""The modes that pause in this thread's forward."""


def pausing_modes(model: Model) -> contextlib.AbstractContextManager[None]:
    """Return a context for a model's forward, without the modes that pause there."""
    stack = _get_current_function_mode_stack()
    pausing = tuple(m for m in stack if isinstance(m, OutsideBlocks) and m.pauses_in(model))
    if not pausing:
        return contextlib.nullcontext()
    return _within([mode for mode in stack if mode not in pausing], pausing)


def runs_users_code(model: Model) -> bool:
    """Return True if a model's forward calls torch hooks or methods that are users' own."""
    if _has_any_global_hook():
        return True
    modules: dict[nn.Module, None] = {model: None}
    kinds: set[type[nn.Module]] = set()
    for module in (pending := list(modules)):  # the list grows in the loop
        attributes = vars(module)
        called = [hook for hooks in hooks_of(attributes) if hooks for hook in hooks.values()]
        if not _FUNCTIONS.isdisjoint(map(type, attributes.values())):
            called += (value for value in attributes.values() if type(value) in _FUNCTIONS)
        if "forward" in attributes:
            called.append(innermost(attributes["forward"]) or nn.Module)
        # Users' hooks on hook points are called by our wrapper, which resumes the modes.
        if any(map(is_of_user, called)):
            return True
        if ResumesModes.of(module) is not None:  # also for the modules inside
            continue
        kinds.add(type(module))
        inner = module._modules.values()
        new = [m for m in inner if m is not None and m not in modules]
        modules.update(dict.fromkeys(new))
        pending += new
    return any(is_of_user(kind.forward) for kind in kinds)


_FUNCTIONS = frozenset((FunctionType, MethodType, functools.partial))


def resuming_modes() -> contextlib.AbstractContextManager[None]:
    """Return a context for a user's hook or module, in which the paused modes are on again."""
    if not _paused.modes:  # but forwards in a user's hook are not launched ahead
        return contextlib.nullcontext() if run_ahead() is None else launching(None)
    return _resuming([*_get_current_function_mode_stack(), *_paused.modes])


@contextlib.contextmanager
def _resuming(stack: Sequence[TorchFunctionMode]) -> Iterator[None]:
    with launching(None), _within(stack, ()):
        yield


@contextlib.contextmanager
def _within(
    stack: Sequence[TorchFunctionMode], paused: tuple[TorchFunctionMode, ...]
) -> Iterator[None]:
    """Replace torch's stack of modes (the innermost is last), and the paused modes."""
    before, paused_before = _get_current_function_mode_stack(), _paused.modes
    _replace_stack(stack)
    _paused.modes = paused
    try:
        yield
    finally:
        _replace_stack(before)
        _paused.modes = paused_before


def _replace_stack(stack: Sequence[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in stack:
        _push_mode(mode)


class JoinedAt(OutsideBlocks):
    """A mode in which torch functions that mix these devices get all arguments on one of them.

    A tensor that is indexed, or changed in place or by `out=`, stays on its device, and the others
    are copied there. Of nested modes, the outermost one copies.
    """

    def __init__(self, device: torch.device, devices: frozenset[torch.device]) -> None:
        super().__init__()
        self._device = device
        self._devices = devices

    def devices(self) -> frozenset[torch.device]:
        """Return the devices that may be mixed; torch refuses tensors on any other."""
        return self._devices

    def target(self, tensors: Tensors, devices: frozenset[torch.device]) -> torch.device:
        """Return the device to copy to, if no tensor is changed in place or indexed."""
        return self._device

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _OF_AUTOGRAD or not on_several_devices(args, kwargs):
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        devices = self.devices() & {tensor.device for tensor in tensors}
        if len(devices) < 2:
            return func(*args, **kwargs)
        # Try torch first: some functions take several devices (`copy_`, `view_as`), and a mode
        # further out may copy.
        versions = [version_of(tensor) for tensor in tensors]
        changed = list(_changed_in_place(func, args, kwargs))
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise  # a RuntimeError, too, but not one about devices
        except RuntimeError:
            # Inference tensors have no version counter. A function that writes to one tensor checks
            # devices first; one that writes to several may have written to some.
            uncounted = len(changed) > 1 and None in versions
            if uncounted or versions != [version_of(tensor) for tensor in tensors]:
                raise  # a second call might change something twice
            # Updates of running statistics bump no version: on copies, they would be lost.
            if getattr(func, "__name__", "") in ("batch_norm", "instance_norm"):
                raise
        stays = changed or list(_indexed(func, args, kwargs))
        target = stays[0].device if stays else self.target(tensors, devices)
        return self._join(func, args, kwargs, target, changed)

    def _join(
        self, func: Forward, args: Args, kwargs: Kwargs, target: torch.device, changed: Tensors
    ) -> object:
        """Call a function with its arguments on a device, and write back the changed copies."""
        others = self.devices() - {target}
        # id of a tensor -> the tensor, its copy, and the copy's version before the call
        copies: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}

        def joined(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device not in others:
                return map_entries(value, joined)
            # Copy each tensor once: a function may take it twice, and change it.
            if id(value) not in copies:
                copy = value.to(target)
                copies[id(value)] = value, copy, version_of(copy)
            return copies[id(value)][1]

        result = func(*joined(args), **joined(kwargs))
        del joined  # it refers to itself, and so would keep the copies
        # Copies are changed by `out=` on several devices, and by `torch._foreach_*_`.
        originals = {}
        for original, copy, version in copies.values():
            if version_of(copy) != version or any(original is tensor for tensor in changed):
                original.copy_(copy)
            originals[id(copy)] = original
        # In-place functions return their argument: give the caller the original, not its copy.
        return originals.get(id(result), result)


# These get the tensors themselves: copies would not be in the graph.
_OF_AUTOGRAD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


def map_entries(value: T, change: Callable[[Any], object]) -> T:
    """Apply `change` to the entries of a tuple, list, dict or named tuple; return others as is."""
    whole: Any = value
    # Require exact types: a subclass's constructor may take other arguments.
    if type(whole) in (tuple, list):
        whole = type(whole)(change(entry) for entry in whole)
    elif type(whole) is dict:
        whole = {key: change(entry) for key, entry in whole.items()}
    elif issubclass(type(whole), tuple) and hasattr(whole, "_make"):
        whole = whole._make(map(change, whole))
    return whole


def on_several_devices(args: Args, kwargs: Kwargs) -> bool:
    """Return True for arguments on several devices."""
    first = None
    for value in (*args, *kwargs.values()):
        is_nested = isinstance(value, (tuple, list, dict))
        # Every torch function within a mode comes here, and a generator takes time.
        for tensor in tensors_in(value) if is_nested else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            first = first or tensor.device
            if tensor.device != first:
                return True
    return False


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes; a sparse one counts as if it were dense."""
    return tensor.numel() * tensor.element_size()


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def _changed_in_place(func: Forward, args: Args, kwargs: Kwargs) -> Iterator[torch.Tensor]:
    """Return the tensors that a torch function changes, judged by its name and arguments."""
    name = getattr(func, "__name__", "")
    if "out" in kwargs:
        return tensors_in(kwargs["out"])
    if name.startswith("__"):  # __set__ sets an attribute such as `grad`
        in_place = name in ("__setitem__", "__set__") or name.startswith("__i")
    else:
        in_place = name.endswith("_")
    first = args[0] if args else kwargs.get("input", kwargs.get("self"))
    return tensors_in(first if in_place else [])


def _indexed(func: Forward, args: Args, kwargs: Kwargs) -> Iterator[torch.Tensor]:
    """Return the tensor that a function indexes."""
    # This may be a whole W_E, of which a few rows are read.
    table = _TABLES.get(getattr(func, "__name__", ""))
    if table is None:
        return iter(())
    position, name = table
    return tensors_in(args[position] if len(args) > position else kwargs.get(name))


_TABLES = {
    **dict.fromkeys(
        ("__getitem__", "index_select", "gather", "take", "take_along_dim"), (0, "input")
    ),
    "embedding": (1, "weight"),
}


class _Mixing(JoinedAt):
    """The mode of `mix_devices`."""

    def pauses_in(self, model: Model) -> bool:
        """Return True unless the forward calls users' code that cannot resume the mode."""
        return not runs_users_code(model)

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if getattr(func, "__name__", "") in _REGISTERING:
            tensor, hook = args
            return func(tensor, _in_any_thread(hook))
        return super().__torch_function__(func, types, args, kwargs)

    def devices(self) -> frozenset[torch.device]:
        """Return the devices in use, and the CPU; none in code that torch compiles."""
        return frozenset() if torch.compiler.is_compiling() else devices_in_use() | {CPU}

    def target(self, tensors: Tensors, devices: frozenset[torch.device]) -> torch.device:
        """Return home, or the non-CPU device of an operand larger than all others together."""
        home = device_of_result(devices)
        sizes = {id(tensor): tensor_bytes(tensor) for tensor in tensors if tensor.device in devices}
        largest = max(tensors, key=lambda tensor: sizes.get(id(tensor), -1))
        if largest.device not in (home, CPU) and 2 * sizes[id(largest)] > sum(sizes.values()):
            return largest.device
        return home


# `devices()` ignores both arguments: models come and go while the mode is on.
_MIXING = _Mixing(CPU, frozenset())


class mix_devices:
    """Let your code mix tensors of a model's devices, from this line on or within a `with` block.

    Where torch would raise an error about tensors on several devices, they are copied to one
    device, and the function runs there. The first of these rules that applies decides:

    1. A tensor that the function changes in place (or by ``out=``), or indexes, stays where it is.
    2. Unless on the CPU, an operand that is larger than all others together stays where it is.
    3. All operands are copied to home, the first device.

    Gradients return to each operand's device.

    It covers the devices of loaded models, the CPU, and the device of `gather_on`, which is then
    home. Tensors on other devices are not copied, so torch raises as usual.

    As a statement, such as in a notebook's first cell, it stays on until ``mix_devices(False)``.
    Like `torch.set_grad_enabled`, it applies to this thread only: call it in each thread that
    mixes. On CUDA, autograd runs hooks in other threads. Hooks added by `Tensor.register_hook`
    while it is on can mix there too; those of modules (`register_full_backward_hook`) cannot.
    Code that torch compiles cannot mix.

    While it is on, each torch function calls Python code, which takes time. In a model's forward it
    is on in your hooks and modules only, and costs nothing elsewhere.

    Args:
        mode: False turns it off.

    >>> mix_devices()  # doctest: +SKIP
    >>> stream = torch.stack(kept)  # kept by hooks of several blocks  # doctest: +SKIP
    """

    def __init__(self, mode: bool = True) -> None:
        self._mode = mode
        self._before = _switch(mode)

    def __enter__(self) -> mix_devices:
        _switch(self._mode)  # again: another thread may have made this object
        return self

    def __exit__(self, *_: object) -> None:
        _switch(self._before)


def _switch(mode: bool) -> bool:
    """Turn mixing on or off in this thread; return what it was."""
    stack = _get_current_function_mode_stack()
    was = _MIXING in stack
    if mode != was:
        stack = [other for other in stack if other is not _MIXING]
        # Put it outermost: a `with` of another mode pops the innermost when it ends. Only the
        # mode of `torch.set_default_device` is further out, where torch looks for it.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        at = int(default is not None and default in stack)
        _replace_stack([*stack[:at], *[_MIXING] * mode, *stack[at:]])
    return was


_REGISTERING = ("register_hook", "register_post_accumulate_grad_hook")


def _in_any_thread(hook: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """Let a gradient hook, such as circuit-tracer's, mix devices in whichever thread it runs."""

    # `updated` would copy the attributes of a callable object, such as a module.
    @functools.wraps(hook, updated=())
    def mixing(gradient: torch.Tensor) -> object:
        # A mode applies to one thread, and on CUDA autograd calls hooks in other threads.
        with JoinedAt(gradient.device, devices_in_use() | {CPU}):
            return _to_device(hook(gradient), gradient.device)

    return mixing


# A user's hook gets the activation on its block's device, but steering vectors and cached
# activations are on the first device. While the hook runs, these are copied to the activation's
# device, and so is the hook's result.


@patches(
    "HookPoint",
    takes="self hook dir is_permanent",
    why="a hook may use tensors of all the model's devices",
)
def add_hook(
    original: Callable[..., object],
    self: HookPoint,
    hook: HookFunction,
    dir: Literal["fwd", "bwd"] = "fwd",
    is_permanent: bool = False,
    level: int | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Wrap `HookPoint.add_hook`, so that hooks may mix the devices of a model.

    Raises:
        RuntimeError: if a run that was given a view hooks the model itself.
    """
    note_hooked(self)
    # Take a fast path: there are hundreds of caching hooks, and each uses only its activation.
    if _is_caching(hook):
        if dir != "fwd" or args or kwargs:  # `prepend` or `alias_names`
            return original(self, hook, dir, is_permanent, level, *args, **kwargs)
        torch_handle = self.register_forward_hook(functools.partial(_call_caching_hook, hook))
        note_hook(self)
        handle = LensHandle(torch_handle, is_permanent, level)
        handle.user_hook = hook
        self.fwd_hooks.append(handle)
        return handle
    across = _HookAcrossDevices(hook)
    added = original(self, across, dir, is_permanent, level, *args, **kwargs)
    note_hook(self)
    # `list_hooks()` shows `user_hook` to users.
    for handle in (*self.fwd_hooks, *self.bwd_hooks):
        if getattr(handle, "user_hook", None) is across:
            handle.user_hook = hook
    return added


def _is_caching(hook: HookFunction) -> bool:
    """Return True for the hooks that `run_with_cache` adds."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    name = getattr(function, "__name__", "")
    return name in ("save_hook", "cache_hook") and package_of(function) == "transformer_lens"


def _call_caching_hook(
    hook: HookFunction, point: HookPoint, inputs: object, activation: Any
) -> object:
    """Call a caching hook of TransformerLens with the arguments that torch gives."""
    conversion = vars(point).get("hook_conversion")
    if conversion is None:
        return hook(activation, hook=point)
    returned = hook(conversion.convert(activation), hook=point)
    return None if returned is None else conversion.revert(returned)


def only_looks(hook: object) -> bool:
    """Return True for TransformerLens's caching hooks, which leave the activation unchanged."""
    return getattr(hook, "func", None) is _call_caching_hook


class _HookAcrossDevices:
    """A user's hook, which may use tensors of all the model's devices."""

    holds_users_hook = True  # a view of the model gets a copy that refers to its own modules

    def __init__(self, user_hook: HookFunction) -> None:
        self._user_hook = user_hook

    def __repr__(self) -> str:
        # TransformerLens names its own wrapper by this repr.
        if isinstance(self._user_hook, functools.partial):
            return f"partial({self._user_hook.func!r},...)"
        return repr(self._user_hook)

    def __call__(self, activation: Any, *, hook: HookPoint) -> object:
        """Call the hook."""
        # A Bridge's hook points may hand out tuples, or None.
        is_tensor = isinstance(activation, torch.Tensor)
        devices = devices_in_use(beside=activation.device) if is_tensor else frozenset()
        mixes = len(devices) > 1 and activation.device in devices
        joined = JoinedAt(activation.device, devices) if mixes else contextlib.nullcontext()
        try:
            with resuming_modes(), joined:
                result = self._user_hook(activation, hook=hook)
        except Exception as error:
            got = shown(activation)
            if is_tensor:
                got = f"{list(activation.shape)} on {printed(activation.device)}"
            note(error, f"this error is from the hook on {hook.name}, whose activation is {got}")
            raise
        return _to_device(result, activation.device) if mixes else result


def _to_device(result: object, device: torch.device) -> object:
    """Bring what a hook returned to a device: a tensor, or (gradient,)."""
    if isinstance(result, torch.Tensor):
        return result.to(device)
    return map_entries(result, lambda part: _to_device(part, device))
