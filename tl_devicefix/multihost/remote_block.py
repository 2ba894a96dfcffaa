"""A block of another host: its hook points are here, its weights there, and its forward is a call.

`attach` makes one of a block without values. Nothing of the user's code leaves home: at a hook
point on which somebody listens, the worker stops, and the activation is here, a plain tensor.

    block 6, nobody listens    waits: its output is a `RemoteTensor`
    block 7, a hook on hook_z  begin([6, 7])  --->
                               hook(z)        <---  z
                               proceed(...)   --->
    block 8, nobody listens    waits          <---  output of block 7
    ln_final, at home          begin([8])     --->
                                              <---  output of block 8

A hook that only looks, as `run_with_cache` adds them, stops nobody: the activation stays there, and
comes when it is read. KV caches stay there too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attention.implementation import HOOKS, sdpa_in
from tl_devicefix.attention.one_forward import kept_in_forward
from tl_devicefix.dispatch.hooking import only_looks
from tl_devicefix.dispatch.mixing import OutsideBlocks
from tl_devicefix.monkeypatch.applying import original
from tl_devicefix.multihost.worker import settings
from tl_devicefix.placement.hosts import Host
from tl_devicefix.placement.remote_tensor import RemoteTensor, plain

_REMOTE = "_tl_devicefix_remote"
_numbers = itertools.count(1)
_FUNCTIONS = [
    *((torch, name) for name in ("matmul", "bmm", "softmax", "einsum", "baddbmm", "where")),
    *((nn.functional, name) for name in ("linear", "softmax", "layer_norm", "gelu", "silu")),
    (nn.functional, "scaled_dot_product_attention"),
]
_AS_IMPORTED = [getattr(owner, name) for owner, name in _FUNCTIONS]


class Kept:
    """What a host keeps by a number, until this is let go of."""

    def __init__(self, host: Host) -> None:
        self.host, self.number = host, next(_numbers)
        weakref.finalize(self, host.forgotten.append, self.number).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return self


class RemoteModel(Kept):
    """A model, as a host has it that has some of its blocks."""

    def __init__(self, host: Host, home: torch.device) -> None:
        super().__init__(host)
        self.home = home

    def parameter(self, name: str) -> torch.Tensor:
        """A weight, at home."""
        return self.host.connection.call("parameter", self.number, name).to(self.home)  # type: ignore[no-any-return]

    def fetched_later(self, kept: Kept, which: int, shape: Any, dtype: torch.dtype) -> RemoteTensor:
        """A tensor that the host keeps."""

        def fetch() -> torch.Tensor:
            return self.host.connection.call("kept", kept.number, which).to(self.home)  # type: ignore[no-any-return]

        made: RemoteTensor = RemoteTensor(fetch, shape, dtype, self.home)
        made._kept = kept  # type: ignore[attr-defined]
        return made


class _Layer:
    """Facts about a remote block, as it was made."""

    def __init__(self, remote: RemoteModel, layer: int, block: Any) -> None:
        self.remote, self.index = remote, layer
        self.made = _made(block)
        self.cfg = dict(vars(block.cfg))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        return self


class RemoteBlock(nn.Module):
    """A block whose weights are on another host."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run it there; within a forward of the model, together with the blocks that follow."""
        layer: _Layer = vars(self)[_REMOTE]
        step = _Step(self, layer, args, kwargs)
        chain, kept = None, kept_in_forward()
        if type(x) is RemoteTensor and not x.is_fetched:
            chain = getattr(x, "_chain", None)
        if chain is None or not chain.goes_on_by(x, step):
            chain = _Chain(layer.remote, plain(x))
        output = chain.add(step)
        if step.taps or _FORWARD not in kept:
            return output.read()
        kept[_FORWARD] = chain
        return output


_FORWARD = "remote blocks"


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Within it, in a model's forward, remote blocks may wait for those that follow."""
    kept = kept_in_forward()
    kept[_FORWARD] = None
    yield
    if kept[_FORWARD] is not None:
        kept[_FORWARD].run()  # as nobody has read its output


def attach(block: Any, remote: RemoteModel, layer: int, name: str) -> None:
    """Make a block without values a remote one."""
    for path, module in block.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                full = ".".join(filter(None, (name, path, key)))
                module._parameters[key] = RemoteTensor(
                    functools.partial(remote.parameter, full),
                    *(parameter.shape, parameter.dtype, remote.home),
                    f"{full} is on {remote.host.connection.name}",
                )
    block.__class__ = _remote_class(type(block))
    vars(block)[_REMOTE] = _Layer(remote, layer, block)


@functools.cache
def _remote_class(cls: Any) -> type:
    return type(f"Remote{cls.__name__}", (RemoteBlock, cls), {"__module__": __name__})


def is_remote(block: Any) -> bool:
    """Whether a block is on another host."""
    return isinstance(block, RemoteBlock)


# --------------------------------------------------------------------------------------------
# What is in a block, and who listens


def _made(module: Any) -> Any:
    """A module that computes: its class, weights and children. None for a hook point."""
    if isinstance(module, HookPoint):
        return None
    children = {name: _made(child) for name, child in module._modules.items() if child is not None}
    return type(module), _forward_of(type(module)), dict(module._parameters), children


def _forward_of(cls: Any) -> Any:
    return original(cls, "forward")


def _listened(module: Any, made: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Hook points on which somebody listens, and whether that is only to look.

    Raises:
        RuntimeError: if there is something else in the block that its host does not know of.
    """
    cls, forward, parameters, children = made
    if type(module) is not cls or (path and "forward" in vars(module)):
        raise _Unseen(f"{path or 'the block'} has another class or forward")
    if _forward_of(cls) is not forward:
        raise _Unseen(f"{cls.__name__}.forward was replaced")
    if module._parameters != parameters and (
        module._parameters.keys() != parameters.keys()
        or any(module._parameters[name] is not value for name, value in parameters.items())
    ):
        raise _Unseen(f"{path or 'the block'} has other weights")
    if path and any(vars(module)[name] for name in HOOKS):
        raise _Unseen(f"{path} has hooks: put them on its hook points")
    if module._modules.keys() - children.keys():
        raise _Unseen(f"{path or 'the block'} has other submodules")
    for name, child_made in children.items():
        child, child_path = module._modules.get(name), f"{path}.{name}" if path else name
        if child_made is not None:
            yield from _listened(child, child_made, child_path)
        elif type(child) is not HookPoint or "forward" in vars(child):
            yield child_path, False
        else:
            hooks = [hook for of in HOOKS for hook in vars(child)[of].values()]
            if hooks:
                yield child_path, all(map(only_looks, hooks))


class _Unseen(Exception):
    """Something that the host of a block would not see."""


def _refuse_functions() -> None:
    for (owner, name), function in zip(_FUNCTIONS, _AS_IMPORTED):
        if getattr(owner, name) is not function:
            raise _Unseen(f"{owner.__name__}.{name} was replaced")
    if _has_any_global_hook():
        raise _Unseen("torch has hooks for every module")
    if torch._C._is_any_autocast_enabled():
        raise _Unseen("torch.autocast is on")
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    for mode in modes:
        if not isinstance(mode, OutsideBlocks | DeviceContext):
            raise _Unseen(f"a {type(mode).__name__} is active")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise _Unseen("torch.func transforms it")


class _Step:
    """A block in a run: its arguments, and the hook points on which somebody listens."""

    def __init__(self, block: Any, layer: _Layer, args: Any, kwargs: dict[str, Any]) -> None:
        self.block, self.layer = block, layer
        try:
            _refuse_functions()
            listened = dict(_listened(block, layer.made))
        except _Unseen as reason:
            raise RuntimeError(
                f"blocks.{layer.index} runs on {layer.remote.host.connection.name}, where this has "
                f"no effect: {reason}; undo it, or load the model on this host's devices alone"
            ) from None
        self.taps = [name for name, looks in listened.items() if not looks]
        self.looks = {name: Kept(layer.remote.host) for name, looks in listened.items() if looks}
        self.arguments = args, kwargs
        self.entry, self.entry_name = None, ""
        for name, value in kwargs.items():
            if hasattr(value, "past_keys"):
                self.entry, self.entry_name = value, name
                self.arguments = args, {key: v for key, v in kwargs.items() if key != name}

    def message(self) -> dict[str, Any]:
        """It, as the worker is told of it."""
        return {
            "layer": self.layer.index,
            "arguments": self.arguments,
            "taps": self.taps,
            "looks": {name: kept.number for name, kept in self.looks.items()},
            "sdpa": sdpa_in(self.block),
            "cache": None if self.entry is None else self._cache(),
        }

    def _cache(self) -> dict[str, Any]:
        self.grown = Kept(self.layer.remote.host)
        tensors = self.entry.past_keys, self.entry.past_values
        kept = {getattr(tensor, "_kept", None) for tensor in tensors}
        past: Any = list(tensors)
        of = kept.pop() if len(kept) == 1 else None
        if of and of.host is self.grown.host and not any(t.is_fetched for t in tensors):
            past = of.number
        return {
            "argument": self.entry_name,
            "class": type(self.entry).__name__,
            "past": past,
            "frozen": self.entry.frozen,
            "new": self.grown.number,
        }

    def has_grown(self, geometry: Any) -> None:
        """Have keys and values that the worker keeps."""
        for which, (name, like) in enumerate(zip(("past_keys", "past_values"), geometry)):
            setattr(self.entry, name, self.layer.remote.fetched_later(self.grown, which, *like))


# --------------------------------------------------------------------------------------------
# Runs


class _Chain:
    """Blocks of one host that run one after the other, once somebody reads what they give."""

    def __init__(self, remote: RemoteModel, x: torch.Tensor) -> None:
        self._remote, self._x = remote, x
        self._steps: list[_Step] = []
        self._outputs: list[weakref.ref[RemoteTensor]] = []
        self._has_graph = torch.is_grad_enabled()

    def goes_on_by(self, x: Any, step: _Step) -> bool:
        """Whether a block that is given `x` follows."""
        return (
            self._outputs[-1]() is x
            and step.layer.remote is self._remote
            and self._has_graph == torch.is_grad_enabled()
        )

    def add(self, step: _Step) -> RemoteTensor:
        """Let a block follow; returns its output."""
        self._steps.append(step)
        like = self._x.shape, self._x.dtype, self._x.device
        output: RemoteTensor = RemoteTensor(self.run, *like, has_graph=self._has_graph)
        output._chain = self  # type: ignore[attr-defined]
        self._outputs.append(weakref.ref(output))
        return output

    def run(self) -> torch.Tensor:
        """Run what has not run yet; returns the output of the last block."""
        x, first = self._x, 0
        with torch.set_grad_enabled(self._has_graph):
            for number in range(len(self._steps)):
                output = self._outputs[number]()
                if output is not None or number + 1 == len(self._steps):  # somebody may read it
                    x = _Run(self._remote, self._steps[first : number + 1]).run(x)
                    if output is not None:
                        output._value = x
                    first = number + 1
        self._x, self._steps, self._outputs = x, [], []
        return x


class _Run(Kept):
    """A run of some blocks by their worker."""

    def __init__(self, remote: RemoteModel, steps: list[_Step]) -> None:
        super().__init__(remote.host)
        self._remote, self._steps, self._reply = remote, steps, (0, "", None, [], [])
        self.n_parts = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Run them, and the hooks."""
        messages = [step.message() for step in self._steps]
        given = tree_leaves([x, [message["arguments"] for message in messages]])
        leaves = [
            index
            for index, item in enumerate(given)
            if torch.is_grad_enabled() and isinstance(item, torch.Tensor) and item.requires_grad
        ]
        block = self._steps[0].block
        before = self._steps[0].layer.cfg
        request = {
            "x": x,
            "steps": messages,
            "leaves": leaves,
            "graph": torch.is_grad_enabled(),
            "settings": settings(),
            "config": {n: v for n, v in vars(block.cfg).items() if before.get(n) is not v},
        }
        token = None
        activation, token = self._part(token, [given[index] for index in leaves], "begin", request)
        while True:
            number, name, _, looked, grown = self._reply
            for of_step, point, shape, dtype in looked:
                step = self._steps[of_step]
                kept = step.looks[point]
                step.block.get_submodule(point)(self._remote.fetched_later(kept, 0, shape, dtype))
            for of_step, geometry in grown:
                self._steps[of_step].has_grown(geometry)
            if not name:
                return activation
            counts = not (torch.is_grad_enabled() or activation.is_inference())
            version = activation._version if counts else -1
            hooked = self._steps[number].block.get_submodule(name)(activation)
            is_unchanged = counts and hooked is activation and hooked._version == version
            sent = None if is_unchanged else hooked
            activation, token = self._part(token, [sent], "proceed", sent)

    def _part(self, token: Any, inputs: list[Any], method: str, message: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.ask(method, message), None
        return _Part.apply(self, method, message, token, *inputs)

    def ask(self, method: str, message: Any) -> torch.Tensor:
        """Ask the worker; returns the activation, at home."""
        connection = self.host.connection
        if method == "begin":
            forget, self.host.forgotten[:] = list(self.host.forgotten), []
            arguments = [self._remote.number, {**message, "forget": forget}]
        else:
            arguments = [message, isinstance(message, torch.Tensor) and message.requires_grad]
        self._reply = connection.call(method, self.number, *_sent(arguments))
        self.n_parts += 1
        return self._reply[2].to(self._remote.home)  # type: ignore[no-any-return]


class _Part(torch.autograd.Function):
    """What a worker computes between two hook points. A token keeps the parts in order."""

    @staticmethod
    def forward(ctx: Any, run: _Run, method: str, message: Any, token: Any, *inputs: Any) -> Any:  # type: ignore[override]
        ctx.run, ctx.part, ctx.devices = run, run.n_parts, [item.device for item in inputs]
        ctx.set_materialize_grads(False)
        return run.ask(method, message), torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any, of_token: Any) -> Any:  # type: ignore[override]
        task = torch._C._current_graph_task_id()
        arguments = ctx.run.number, ctx.part, _sent(gradient), task
        gradients = ctx.run.host.connection.call("backward", *arguments)
        at_home = (None if g is None else g.to(d) for g, d in zip(gradients, ctx.devices))
        gradients = list(at_home)
        gradients += [None] * (len(ctx.devices) - len(gradients))
        of_token = torch.zeros(()) if ctx.needs_input_grad[3] else None
        return None, None, None, of_token, *gradients


def _sent(value: Any) -> Any:
    """What is sent: tensors on the CPU, without gradients; one that is there twice, once."""
    memo: dict[int, torch.Tensor] = {}

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = plain(tensor).detach().to("cpu")
        return memo[id(tensor)]

    return tree_map_only(torch.Tensor, on_cpu, value)
