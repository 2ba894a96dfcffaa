"""A block of another host: its hook points are here, its weights there, and its forward is a call.

`attach` makes one of a block without values. Nothing of the user's code leaves home: at a hook
point on which somebody listens, the worker stops, and the activation is here, a plain tensor.

    block 5, nobody listens    waits: its output is a `RemoteTensor`
    block 6, nobody listens    waits
    block 7, a hook on hook_z  begin([5, 6])  --->
                               begin([7])     <---  output of block 6
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
import weakref
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache

from tl_devicefix.fusing.fused import is_fused
from tl_devicefix.fusing.one_forward import FACTS, kept_in_forward
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.multihost.refusals import AsLoaded, Unseen, refuse_what_is_on
from tl_devicefix.multihost.worker import (
    CACHE,
    ENTRY,
    HAS_MLP_IN,
    config_at,
    configs_of,
    layer_of_cache,
    settings,
    state_of,
)
from tl_devicefix.placement.devices import Host
from tl_devicefix.placement.remote_tensor import RemoteTensor, plain

_REMOTE = "_tl_devicefix_remote"
_numbers = count(1)
_SENT = (type(None), bool, int, float, str, torch.dtype, torch.Tensor)


class Kept:
    """What a host keeps by a number, until this is let go of."""

    def __init__(self, host: Host) -> None:
        self.host, self.number, self.has_graph = host, next(_numbers), False
        weakref.finalize(self, host.forgotten.append, self.number).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return self


class RemoteModel(Kept):
    """A model, as a host has it that has some of its blocks."""

    def __init__(self, host: Host, home: torch.device) -> None:
        super().__init__(host)
        self.home = home

    def weight(self, name: str) -> torch.Tensor:
        """A weight or buffer, at home."""
        return self.host.connection.call("weight", self.number, name).to(self.home)  # type: ignore[no-any-return]

    def weight_called(self, name: str, shape: Any, dtype: torch.dtype) -> RemoteTensor:
        """A weight, which is fetched when it is used."""
        fetch = partial(self.weight, name)
        is_there = f"{name} is on {self.host.connection.name}"
        made: RemoteTensor = RemoteTensor(fetch, shape, dtype, self.home, is_there)
        return made

    def fetched_later(self, kept: Kept, which: str, shape: Any, dtype: torch.dtype) -> RemoteTensor:
        """A tensor that the host keeps."""

        def fetch() -> torch.Tensor:
            return self.host.connection.call("kept", kept.number, which).to(self.home)  # type: ignore[no-any-return]

        made: RemoteTensor = RemoteTensor(fetch, shape, dtype, self.home)
        made._kept = kept  # type: ignore[attr-defined]
        return made


class _Layer:
    """Facts about a remote block, as it was made.

    Attributes:
        forms: of what it returns, by the names of its arguments: a tensor, or a tuple of one. If it
            returns anything else, or has not run yet, it does not wait.
    """

    def __init__(self, remote: RemoteModel, index: int, block: Any) -> None:
        self.remote, self.index = remote, index
        self.forms: dict[Any, type] = {}
        self.look_at(block)

    def look_at(self, block: Any) -> None:
        """Take the block as it is for what its host has."""
        self.as_loaded = AsLoaded(block)
        self._configs = {path: dict(vars(cfg)) for path, cfg in configs_of(block).items()}

    def changed_settings(self, block: Any) -> dict[str, dict[str, Any]]:
        """What is set otherwise since then, of each config in the block."""
        changed = {}
        for path, before in self._configs.items():
            now = vars(config_at(block, path))
            changed[path] = {
                name: value
                for name, value in now.items()
                if before.get(name) is not value and isinstance(value, _SENT)
            }
        return {path: changes for path, changes in changed.items() if changes}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        return self


class RemoteBlock(nn.Module):
    """A block whose weights are on another host."""

    is_remote = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it as a module, past the Bridge's own way to call a block."""
        return nn.Module.__call__(self, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert what is at home, as an SAE in a hook point's place."""
        refuse_to_convert(self, fn)
        for module in self.modules():
            tensors = *module._parameters.values(), *module._buffers.values()
            if not any(type(tensor) is RemoteTensor for tensor in tensors):
                nn.Module._apply(module, fn, recurse=False)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it there; within a forward of the model, together with the blocks that follow."""
        layer: _Layer = vars(self)[_REMOTE]
        for name in ("_maybe_inject_start_residual", "_check_stop_at_layer"):  # of a Bridge's
            if hasattr(self, name):
                changed = getattr(self, name)(*((args, kwargs) if "start" in name else args))
                args, kwargs = changed or (args, kwargs)
        x, *others = args
        step = _Step(self, layer, tuple(others), kwargs)
        kept, chain = kept_in_forward(), None
        if type(x) is RemoteTensor and not x.is_fetched:
            chain = getattr(x, "_chain", None)
        if chain is None or not chain.goes_on_by(x, step):
            chain = _Chain(layer.remote, plain(x))
        form = layer.forms.get(step.form)
        output = chain.add(step)
        if step.taps or _FORWARD not in kept or form is None:
            output.read()
            return chain.returned
        kept[_FORWARD] = chain
        return (output,) if form is tuple else output


_FORWARD = "remote blocks"


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Within it, in a model's forward, remote blocks may wait for those that follow."""
    kept = kept_in_forward()
    kept[_FORWARD] = None
    yield
    if kept[_FORWARD] is not None and not kept[_FORWARD].has_begun:
        kept[_FORWARD].run()  # as nobody has read its output


def attach(block: Any, remote: RemoteModel, layer: int, name: str) -> None:
    """Make a block a remote one."""
    for path, module in block.named_modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor):
                    full = ".".join(filter(None, (name, path, key)))
                    tensors[key] = remote.weight_called(full, tensor.shape, tensor.dtype)
    cls: Any = type(block)
    block.__class__ = _remote_class(cls)
    vars(block)[_REMOTE] = _Layer(remote, layer, block)


def call_everywhere(model: Any, method: str, arguments: dict[str, Any]) -> None:
    """Call a method that changes weights on all hosts that have blocks of a model."""
    blocks = list(filter(is_remote, model.modules()))
    for remote in dict.fromkeys(vars(block)[_REMOTE].remote for block in blocks):
        weights = remote.host.connection.call("apply", remote.number, method, arguments)
        for name, (shape, dtype) in weights.items():
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            module._parameters[key] = remote.weight_called(name, shape, dtype)
    for block in blocks:
        vars(block)[_REMOTE].look_at(block)


def refuse_to_convert(model: nn.Module, convert: Any) -> None:
    """Refuse to move weights of other hosts, or change their dtype, before any is converted."""
    blocks = filter(is_remote, model.modules())
    for weight in (weight for block in blocks for weight in block.parameters()):
        if type(weight) is RemoteTensor:
            like = torch.empty(0, dtype=weight.dtype, device=weight.device)
            if convert(like) is not like:
                raise RuntimeError(
                    f"{weight._weight_is}, where weights keep their device and dtype: load the "
                    "model again with another device_map or dtype"
                )


@cache
def _remote_class(cls: Any) -> type:
    return type(f"Remote{cls.__name__}", (RemoteBlock, cls), {"__module__": __name__})


def is_remote(block: Any) -> bool:
    """Whether a block is on another host."""
    return isinstance(block, RemoteBlock)


# --------------------------------------------------------------------------------------------
# Runs


def _kinds(point: Any) -> list[str]:
    """Of which kinds the hooks of a hook point are; a module in its place is a forward one."""
    return [kind for kind in ("fwd", "bwd") if getattr(point, f"{kind}_hooks", kind == "fwd")]


class _Step:
    """A block in a run: its arguments, and the hook points on which somebody listens."""

    def __init__(self, block: Any, layer: _Layer, args: Any, kwargs: dict[str, Any]) -> None:
        self.block, self.layer, self.form = block, layer, (len(args), *kwargs)
        self.entry: Any = None
        with self._refusing():
            refuse_what_is_on()
            if block.training and not hasattr(block, "cfg"):  # of transformers', which drop out
                raise Unseen("the model is in training mode")
            listened = layer.as_loaded.listened(block)
            self.arguments = self._without_cache(list(args)), self._without_cache(kwargs)
        self.taps = [name for name, looks in listened.items() if not looks]
        self.looks = {name: Kept(layer.remote.host) for name, looks in listened.items() if looks}

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except Unseen as reason:
            host = self.layer.remote.host.connection.name
            raise RuntimeError(
                f"blocks.{self.layer.index} runs on {host}, where this has no effect: {reason}; "
                "undo it, or load the model on this host's devices alone"
            ) from None

    def check_after_hook(self, name: str, changes_others: bool) -> None:
        """Check that the hooks on a tap have done nothing that the worker would not see."""
        with self._refusing():
            for point, looks in self.layer.as_loaded.listened(self.block).items():
                if point not in self.taps and not (looks and point in self.looks):
                    raise Unseen(f"a hook on {name} has put one on {point} of the same block")
            if changes_others:
                raise Unseen(f"a hook on {name} changes an activation of an earlier hook point")

    def _without_cache(self, arguments: Any) -> Any:
        """Arguments as they are sent, with a mark in the place of a KV cache."""
        names = range(len(arguments)) if isinstance(arguments, list) else list(arguments)
        sent = type(arguments)(arguments)
        for name in names:
            value = arguments[name]
            if hasattr(value, "past_keys"):
                self.entry, sent[name] = value, ENTRY
            elif isinstance(value, Cache):
                self.entry, sent[name] = layer_of_cache(value, self.layer.index), CACHE
                if self.entry is None:
                    raise Unseen(
                        f"a {type(value).__name__} is used: only a DynamicCache goes there"
                    )
        return sent

    def message(self) -> dict[str, Any]:
        """It, as the worker is told of it."""
        return {
            "layer": self.layer.index,
            "arguments": self.arguments,
            "taps": {name: _kinds(self.block.get_submodule(name)) for name in self.taps},
            "looks": {name: kept.number for name, kept in self.looks.items()},
            "fused": is_fused(self.block) and is_enabled(),
            "has_mlp_in": vars(self.block).get(HAS_MLP_IN),
            "config": self.layer.changed_settings(self.block),
            "entry": None if self.entry is None else self._entry(),
        }

    def _entry(self) -> dict[str, Any]:
        self.grown = Kept(self.layer.remote.host)
        kind, plain_ones, tensors = state_of(self.entry)
        remote: dict[str, Any] = tensors
        kept = {getattr(tensor, "_kept", None) for tensor in tensors.values()}
        of: Any = kept.pop() if len(kept) == 1 else None
        is_there = of and of.host is self.grown.host
        if is_there and not any(tensor.is_fetched for tensor in remote.values()):
            if torch.is_grad_enabled() and of.has_graph:
                raise RuntimeError(
                    "gradients do not pass through a KV cache of blocks on another host: run what "
                    "fills the cache, or what uses it, within torch.no_grad()"
                )
            tensors = of.number
        state = {"class": kind, "plain": plain_ones, "tensors": tensors}
        return {**state, "new": self.grown.number}

    def has_grown(self, plain_ones: dict[str, Any], geometry: dict[str, Any]) -> None:
        """Have keys and values that the worker keeps."""
        remote, self.grown.has_graph = self.layer.remote, torch.is_grad_enabled()
        vars(self.entry).update(plain_ones)
        for name, like in geometry.items():
            setattr(self.entry, name, remote.fetched_later(self.grown, name, *like))
            if "device" not in plain_ones and type(self.entry).__module__.startswith(
                "transformers"
            ):
                self.entry.dtype, self.entry.device = like[1], remote.home


class _Chain:
    """Blocks of one host that run one after the other, once somebody reads what they give."""

    def __init__(self, remote: RemoteModel, x: torch.Tensor) -> None:
        self._remote, self._x = remote, x
        self._steps: list[_Step] = []
        self._outputs: list[weakref.ref[RemoteTensor]] = []
        self._has_graph = torch.is_grad_enabled()
        self.returned: Any = None
        self.has_begun = False  # it may have ended by a hook that stops the forward

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
        x, first, self.has_begun = self._x, 0, True
        with torch.set_grad_enabled(self._has_graph):
            for number in range(len(self._steps)):
                output = self._outputs[number]()
                if output is not None or number + 1 == len(self._steps):  # somebody may read it
                    run = _Run(self._remote, self._steps[first : number + 1])
                    self.returned = run.run(x)
                    is_tensor = isinstance(self.returned, torch.Tensor)
                    x = self.returned if is_tensor else self.returned[0]
                    if output is not None:
                        output._value = x
                    first = number + 1
        self._x, self._steps, self._outputs = x, [], []
        return x


class _Run(Kept):
    """A run of some blocks by their worker."""

    def __init__(self, remote: RemoteModel, steps: list[_Step]) -> None:
        super().__init__(remote.host)
        self._remote, self._steps = remote, steps
        self._reply: dict[str, Any] = {}
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
        request = {
            "x": x,
            "steps": messages,
            "leaves": leaves,
            "graph": torch.is_grad_enabled(),
            "settings": settings(),
            "facts": kept_in_forward().get(FACTS),
        }
        # The tensors that both sides have, by their numbers: a hook may be given one of them again.
        both = [x]
        given_back, method = [given[index] for index in leaves], "begin"
        message: Any = request
        token = None
        while True:
            output, token = self._part(token, given_back, method, message)
            number, name, same_as = self._reply["step"], self._reply["tap"], self._reply["same_as"]
            self._show_looked()
            for of_step, *state in self._reply["grown"]:
                self._steps[of_step].has_grown(*state)
            if not name:
                return self._returned(output)
            activation = output if same_as is None else both[same_as]
            versions = [_version(tensor) for tensor in (*both, activation)]
            values = activation.detach().clone()  # edits of `.data` or by numpy are not counted
            step = self._steps[number]
            hooked = step.block.get_submodule(name)(activation)
            others = ((x, was) for x, was in zip(both, versions) if x is not activation)
            step.check_after_hook(name, any(_version(x) != was for x, was in others))
            was = versions[-1]
            in_place = hooked is activation and (
                was is None or _version(activation) != was or not torch.equal(activation, values)
            )
            is_changed = in_place or hooked is not activation
            if same_as is None or hooked is not activation:
                both.append(hooked)
            given_back = (
                [hooked] if is_changed or (same_as is None and hooked.requires_grad) else []
            )
            method, message = "proceed", (hooked if is_changed else None, in_place)

    def _show_looked(self) -> None:
        """Give hooks that only look what is kept for them."""
        for number, point, shape, dtype in self._reply["looked"]:
            step = self._steps[number]
            kept = self._remote.fetched_later(step.looks[point], "", shape, dtype)
            step.block.get_submodule(point)(kept)

    def _returned(self, output: torch.Tensor) -> Any:
        """What the last block returns, in the form that it does."""
        last = self._steps[-1]
        form = self._reply["value"]
        if isinstance(form, torch.Tensor):
            last.layer.forms[last.form] = torch.Tensor
            return output
        if len(form) == 1:
            last.layer.forms[last.form] = tuple
        return (output, *_at(form[1:], self._remote.home))

    def _part(self, token: Any, inputs: list[Any], method: str, message: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.ask(method, message), None
        return _Part.apply(self, method, message, token, *inputs)

    def ask(self, method: str, message: Any) -> torch.Tensor:
        """Ask the worker; returns the activation, at home."""
        connection = self.host.connection
        if method == "begin":
            message = {**message, "forget": self.host.take_forgotten()}
            arguments = [self._remote.number, message]
        else:
            sent, in_place = message
            arguments = [sent, sent is not None and sent.requires_grad, in_place]
        with torch.inference_mode(False):  # so that changes of tensors are counted
            self._reply = connection.call(method, self.number, *_sent(arguments))
            self.has_graph = self._reply["has_graph"]
            self.n_parts += 1
            value = self._reply["value"]
            first = value[0] if isinstance(value, tuple) else value
            return torch.empty(0) if first is None else first.to(self._remote.home)


class _Part(torch.autograd.Function):
    """What a worker computes between two hook points. A token keeps the parts in order."""

    @staticmethod
    def forward(ctx: Any, run: _Run, method: str, message: Any, token: Any, *inputs: Any) -> Any:  # type: ignore[override]
        ctx.run, ctx.part, ctx.devices = run, run.n_parts, [item.device for item in inputs]
        ctx.set_materialize_grads(False)
        output = run.ask(method, message)
        if not run.has_graph:
            ctx.mark_non_differentiable(output)
        return output, torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_token: Any) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients do not pass through blocks of other hosts: leave out "
                "create_graph=True, or load the model on this host's devices alone"
            )
        task = torch._C._current_graph_task_id()
        arguments = ctx.run.number, ctx.part, _sent(gradient), task
        gradients = ctx.run.host.connection.call("backward", *arguments)
        at_home = (None if g is None else g.to(d) for g, d in zip(gradients, ctx.devices))
        gradients = list(at_home)
        gradients += [None] * (len(ctx.devices) - len(gradients))
        of_token = torch.zeros(()) if ctx.needs_input_grad[3] else None
        return None, None, None, of_token, *gradients


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed; None if that is not counted."""
    return None if tensor.is_inference() else tensor._version


def _at(value: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _sent(value: Any) -> Any:
    """What is sent: tensors on the CPU, without gradients."""
    return tree_map_only(torch.Tensor, lambda tensor: plain(tensor).detach().to("cpu"), value)
