"""A block whose weights are on another host, and whose forward calls the worker there.

`attach` turns blocks without values into remote blocks; `messages.py` shows how they run.
Their hook points, and all user code, stay in this process. At a *tap*, a hook point with a user's
hook or module, the worker pauses, and that gets the activation as a plain tensor. Hooks that only
look, as those of `run_with_cache`, make no tap: the activation stays on its host until it is read.

Consecutive blocks of one host do not run at once: each returns a `RemoteTensor`. One call runs them
all when a block has a tap or a torch hook, or when the last output is read. Code that you replace
here, such as a class's method, is not replaced on the worker.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from jaxtyping import Float
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from transformer_lens.hook_points import HookPoint
from transformers.cache_utils import Cache

from tl_devicefix.dispatch.mixing import OutsideBlocks, only_looks
from tl_devicefix.fusing.fused import is_fused
from tl_devicefix.fusing.listening import RECORDING, hooks_of, records, unsupported_mode
from tl_devicefix.fusing.one_forward import FACTS, forward_cache, is_in_forward
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.patch import package_of
from tl_devicefix.multihost.hosts import Host
from tl_devicefix.multihost.messages import (
    PLAIN,
    EntryState,
    KeptTensor,
    Output,
    Reply,
    RunRequest,
    StepRequest,
    attributes_of,
    layer_of_cache,
    set_attributes,
)
from tl_devicefix.multihost.remote_tensor import RemoteTensor, refuse_in_steps
from tl_devicefix.multihost.worker import HAS_MLP_IN, config_at, settings
from tl_devicefix.placement.devices import version_of
from tl_devicefix.placement.elsewhere import plain

_REMOTE = "_tl_devicefix_remote"
_numbers = count(1)


class RemoteHandle:
    """The number of a value on a worker, which frees the value after this object is freed."""

    def __init__(self, host: Host) -> None:
        self.host, self.number, self.has_graph = host, next(_numbers), False
        # A finalizer may run in the middle of a call, so it only notes the number for a later one.
        # At exit, workers end with this process.
        weakref.finalize(self, host.forgotten.append, self.number).atexit = False


class RemoteModel(RemoteHandle):
    """The part of a model that another host has.

    Attributes:
        home: the device to which tensors are fetched.
        changed: names of settings that have been changed since the model was loaded. These are sent
            with each run: if one is back at its first value, the worker may have the other one.
    """

    def __init__(self, host: Host, home: torch.device) -> None:
        super().__init__(host)
        self.home = home
        self.changed: set[str] = set()

    def weight(self, kept: KeptTensor) -> RemoteTensor:
        """Return a weight or buffer that is fetched whenever it is used."""
        return self.kept(self, kept, f"{kept.name} is on {self.host.name}")

    def kept(self, handle: RemoteHandle, kept: KeptTensor, weight_is: str = "") -> RemoteTensor:
        """Return a tensor that the worker keeps as long as the handle lives."""

        def fetch() -> torch.Tensor:
            value: torch.Tensor = handle.host.call("fetch", kept.number, kept.name)
            return value.to(self.home)

        like = kept.shape, kept.dtype, self.home
        return RemoteTensor(fetch, *like, weight_is, handle=handle, kept=kept)


class _Record:
    """This process's knowledge of a remote block; copies and views of the block share it.

    Attributes:
        forms: the type of the output (a tensor, or a tuple of one) for each form of a call: the
            number of positional arguments after x, and the names of the others. The first call of
            a form adds it, unless its output is a longer tuple.
    """

    def __init__(self, remote: RemoteModel, index: int, block: nn.Module) -> None:
        self.remote, self.index = remote, index
        self.forms: dict[tuple[object, ...], type] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self.look_at(block)

    def look_at(self, block: nn.Module) -> None:
        """Record the block's hook points, and the settings of configs that are new."""
        named = list(block.named_modules())
        self.points = [path for path, module in named if isinstance(module, HookPoint)]
        # Keep each config's first path: most modules of a block share one.
        configs = {path: config_at(block, path) for path, _ in named}
        known = ("transformer_lens", "transformers")
        first = {
            id(config): path
            for path, config in reversed(configs.items())
            if package_of(type(config)) in known
        }
        # Keep earlier records: the worker may lack changes that were made here since.
        now = {path: dict(vars(configs[path])) for path in first.values()}
        self._configs = {path: self._configs.get(path, its) for path, its in now.items()}

    def listened(self, block: nn.Module) -> dict[str, bool]:
        """Map each tap to False, and each other hook point with hooks, which only look, to True."""
        listened = {}
        for path in self.points:
            module = block.get_submodule(path)
            hooks = [hook for hook_dict in hooks_of(vars(module)) for hook in hook_dict.values()]
            hooks = [hook for hook in hooks if not records(hook)]
            # An SAE may replace the hook point, or its forward, and so change the activation.
            if type(module) is not HookPoint or "forward" in vars(module):
                listened[path] = False
            elif hooks:
                listened[path] = all(map(only_looks, hooks))
        return listened

    def changed_settings(self, block: nn.Module) -> dict[str, dict[str, Any]]:
        """Return the changed settings that the worker needs, by the paths of the configs."""
        changed, now = self.remote.changed, {}
        for path, loaded in self._configs.items():
            settings = vars(config_at(block, path)).items()
            now[path] = {name: value for name, value in settings if isinstance(value, PLAIN)}
            changed |= {k for k, value in now[path].items() if loaded.get(k) != value}
        return {path: {k: its[k] for k in changed & its.keys()} for path, its in now.items()}

    def refusal(self, why: str, remedy: str = "undo it") -> RuntimeError:
        """Return the error for a change in this process that the worker cannot see."""
        return RuntimeError(
            f"blocks.{self.index} runs on {self.remote.host.name}, where this has no "
            f"effect: {why}; {remedy}, or load the model on this host's devices alone"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        return self


class RemoteModule(nn.Module):
    """A module of a remote block. It refuses edits: the worker's own module computes."""

    is_remote = True

    def _refuse(self, what: str) -> None:
        record: _Record = vars(self)[_REMOTE]
        raise record.refusal(f"{what} assigned to it here", "use a hook on a hook point")

    def __setattr__(self, name: str, value: Any) -> None:
        is_note = name.startswith("_") and not isinstance(value, nn.Module)
        is_note &= name != "_attention_dir_override"  # attention reads it
        # TransformerLens takes a Bridge's config off a module while it copies the module.
        is_note |= name == "config" and (value is None or vars(self).get(name, value) is None)
        if not (is_note or name in _SET_BY_LIBRARIES):
            self._check_name(name)
        super().__setattr__(name, value)

    def _check_name(self, name: str) -> None:
        if not name.startswith("hook_"):  # a module may replace a hook point
            self._refuse(f"{name} was")

    def _check_hook(self, hook: object) -> None:
        # A Bridge registers its own hooks, here and on the worker.
        module = str(getattr(hook, "__module__", ""))
        is_known = module.startswith("transformer_lens.model_bridge") or records(hook)
        if not (is_known or isinstance(self, RemoteBlock)):
            self._refuse("torch hooks were")

    def _refuse_hook(self, hook: object) -> None:
        self._refuse("torch's backward hooks were")

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> RemoteModule:
        """Convert only modules that replace hook points: other weights are on the worker."""
        refuse_to_convert(self, fn)
        for child in self.children():
            child._apply(fn)
        return self


_SET_BY_LIBRARIES = {
    *("training", "name", "alibi"),
    *("compatibility_mode", "disable_warnings", "split_qkv_matrix"),
}
"""torch and TransformerLens set these; those that change results, `call_everywhere` sets there."""


def _checking_method(
    method: str, check: Callable[[RemoteModule, Any], None]
) -> Callable[..., object]:
    """Return `nn.Module`'s `method`, preceded by a `check` of its first argument."""

    def register(self: RemoteModule, given: Any, *args: object, **kwargs: object) -> object:
        check(self, given)
        return getattr(nn.Module, method)(self, given, *args, **kwargs)

    return register


for _method in ("add_module", "register_parameter", "register_buffer"):
    setattr(RemoteModule, _method, _checking_method(_method, RemoteModule._check_name))
for _method in ("register_forward_hook", "register_forward_pre_hook"):
    setattr(RemoteModule, _method, _checking_method(_method, RemoteModule._check_hook))
for _kind in ("full_backward", "full_backward_pre", "backward"):
    _method = f"register_{_kind}_hook"
    setattr(RemoteModule, _method, _checking_method(_method, RemoteModule._refuse_hook))


class RemoteBlock(RemoteModule):
    """A block whose weights are on another host. Forward hooks on the block itself run here."""


_WAITING = "remote blocks"
"""The key in `forward_cache` for the blocks that wait in this forward."""


def _run_there(self: RemoteBlock, *args: Any, **kwargs: Any) -> Output:
    """Run the block on its host; in a model's forward, one call runs it and those that follow."""
    record: _Record = vars(self)[_REMOTE]
    block: Any = self
    if hasattr(block, "_maybe_inject_start_residual"):  # a Bridge's block begins with these calls
        args, kwargs = block._maybe_inject_start_residual(args, kwargs)
    if hasattr(block, "_check_stop_at_layer"):
        block._check_stop_at_layer(*args, **kwargs)
    if not args:  # the residual stream may be passed by name
        name = next(name for name in ("hidden_states", "resid_pre") if name in kwargs)
        args = (kwargs.pop(name),)
    x, *others = args
    step = _Step(self, record, others, kwargs)
    kept = forward_cache()
    waiting: _WaitingBlocks | None = kept.get(_WAITING)
    if waiting is None or not waiting.continue_with(x, record.remote):
        waiting = _WaitingBlocks(record.remote, plain(x))
    output = waiting.add(step)
    form = record.forms.get(step.form)
    # A block runs at once if it has taps or torch hooks, which must run before those of later
    # blocks, or if its type of output (a tensor or a tuple) is not known yet.
    is_watched = step.request.taps or self._forward_hooks
    if is_watched or form is None or not is_in_forward():
        output.read()
        return waiting.returned
    kept[_WAITING] = waiting
    return (output,) if form is tuple else output


def attach(model: nn.Module, remotes: dict[str, RemoteModel]) -> None:
    """Turn a model's blocks without values into remote blocks of their hosts."""
    if remotes:
        refuse_in_steps()
    for name, remote in remotes.items():
        block = model.get_submodule(name)
        record = _Record(remote, int(name.rpartition(".")[2]), block)
        for path, module in list(block.named_modules()):
            for tensors in (module._parameters, module._buffers, vars(module)):
                for key, tensor in tensors.items():
                    if isinstance(tensor, torch.Tensor):
                        full = ".".join(filter(None, (name, path, key)))
                        kept = KeptTensor.of(tensor, remote.number, full)
                        tensors[key] = remote.weight(kept)
            if not isinstance(module, HookPoint):
                vars(module)[_REMOTE] = record
                mixin = RemoteModule if path else RemoteBlock
                module.__class__ = _remote_class(module.__class__, mixin)


@cache
def _remote_class(cls: type[nn.Module], mixin: type[RemoteModule]) -> type[nn.Module]:
    # The mixin comes last: Python lets a module whose class derives from ABC change only to a class
    # that has the old one as its first base. A Bridge's `__call__` looks up the layer's weights.
    block_methods = {"forward": _run_there, "__call__": nn.Module.__call__}
    has = {"__module__": __name__, **(block_methods if mixin is RemoteBlock else {})}
    return type(f"Remote{cls.__name__}", (cls, mixin), has)


def call_everywhere(model: nn.Module, method: str, arguments: dict[str, object]) -> None:
    """Call a method that changes a model's weights, on all hosts that have blocks of it."""
    blocks = [module for module in model.modules() if isinstance(module, RemoteBlock)]
    for remote in dict.fromkeys(vars(block)[_REMOTE].remote for block in blocks):
        # The worker's `apply` returns the weights: their shapes may have changed.
        weights: list[KeptTensor] = remote.host.call("apply", remote.number, method, arguments)
        for weight in weights:
            path, _, key = weight.name.rpartition(".")
            # A remote block refuses setattr.
            parameters: dict[str, Any] = model.get_submodule(path)._parameters
            parameters[key] = remote.weight(weight)
    for block in blocks:
        vars(block)[_REMOTE].look_at(block)


def refuse_to_convert(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse to move weights of other hosts, or to change their dtype.

    Raises:
        RuntimeError: if `convert` would change a remote weight; nothing is converted then.
    """
    for weight in model.parameters():
        if type(weight) is RemoteTensor:
            like = torch.empty(0, dtype=weight.dtype, device=weight.device)
            if convert(like) is not like:
                raise RuntimeError(
                    f"{weight._weight_is}, where weights keep their device and dtype: load the "
                    "model again with another device_map or dtype"
                )


def _why_not_now(block: nn.Module) -> str | None:
    """Return the mode that the worker lacks, such as autocast; None if there is none."""
    if (why := unsupported_mode()) is not None:
        return why
    is_of_bridge = FACTS in forward_cache()  # which asks for attentions itself
    recording = sys.modules.get(RECORDING)
    if recording and recording._active_collector.get() and not is_of_bridge:
        return "transformers was asked for hidden states or attentions"
    if torch._C._is_any_autocast_enabled():
        return "torch.autocast is on"
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not isinstance(mode, OutsideBlocks | DeviceContext):
            return f"a {type(mode).__name__} is active"
    # A HookedTransformer's block has `cfg`, and no dropout.
    if block.training and not hasattr(block, "cfg"):
        return "the model is in training mode"
    return None


class _Step:
    """A block in a run: its arguments, and its hook points that have hooks."""

    def __init__(
        self, block: nn.Module, record: _Record, args: list[object], kwargs: dict[str, object]
    ) -> None:
        self.block, self.record = block, record
        self.form = len(args), *kwargs
        if (why := _why_not_now(block)) is not None:
            raise record.refusal(why)
        self._used: list[RemoteHandle] = []  # kept until the block has run
        listened = record.listened(block)
        taps = {name: block.get_submodule(name) for name, looks in listened.items() if not looks}
        self.cached = {
            name: RemoteHandle(record.remote.host) for name, looks in listened.items() if looks
        }
        self.request = StepRequest(
            layer=record.index,
            # Each KV cache is replaced by the state of its entry.
            arguments=(
                [self._sent(argument) for argument in args],
                {name: self._sent(argument) for name, argument in kwargs.items()},
            ),
            # A module in a hook point's place counts as a forward hook.
            taps={
                name: [k for k in ("fwd", "bwd") if getattr(point, f"{k}_hooks", k == "fwd")]
                for name, point in taps.items()
            },
            cached={name: handle.number for name, handle in self.cached.items()},
            is_fused=is_fused(block) and is_enabled(),
            has_mlp_in=vars(block).get(HAS_MLP_IN),
            config=record.changed_settings(block),
        )

    def check_after_hook(self, name: str, changes_others: bool) -> None:
        """Check that hooks on a tap have done nothing that the worker would not know of."""
        for point, looks in self.record.listened(self.block).items():
            if point not in self.request.taps and not (looks and point in self.cached):
                raise self.record.refusal(
                    f"a hook on {name} has put one on {point} of the same block"
                )
        if changes_others:
            raise self.record.refusal(
                f"a hook on {name} changes an activation of an earlier hook point",
                "return a new tensor there instead",
            )

    def _sent(self, argument: Any) -> object:
        """Return an argument as it is sent: a KV cache as the state of its entry."""
        is_in_cache = isinstance(argument, Cache)
        if not (is_in_cache or hasattr(argument, "past_keys")):
            return argument
        entry = layer_of_cache(argument, self.record.index) if is_in_cache else argument
        if entry is None:
            raise self.record.refusal(
                f"a {type(argument).__name__} is used: only a DynamicCache can be sent, and only "
                "layers of it that grow by appending"
            )
        self._entry, self._grown = entry, RemoteHandle(self.record.remote.host)
        attributes = {name: self._part(value) for name, value in attributes_of(entry).items()}
        return EntryState(type(entry), attributes, is_in_cache, self._grown.number)

    def _part(self, value: object) -> object:
        """Return an entry's attribute as it is sent; a `KeptTensor` if only the worker has it."""
        if not (isinstance(value, RemoteTensor) and value.handle):
            return value
        if torch.is_grad_enabled() and value.handle.has_graph:
            raise RuntimeError(
                "gradients do not pass through a KV cache of blocks on another host: run what "
                "fills the cache, or what uses it, within torch.no_grad()"
            )
        if not value.kept:  # a view, which is sent by its values
            return value
        self._used.append(value.handle)
        is_there = value.handle.host is self.record.remote.host and not value.is_fetched
        return value.kept if is_there else value.read()

    def grow(self, attributes: dict[str, object]) -> None:
        """Set the entry's attributes; its keys and values stay on the worker until read."""
        self._grown.has_graph = torch.is_grad_enabled()
        remote, grown = self.record.remote, self._grown
        tensors = tree_map_only(KeptTensor, lambda one: remote.kept(grown, one), attributes)
        set_attributes(self._entry, tensors, remote.home)


class _WaitingBlocks:
    """Consecutive blocks of one host in a forward: reading the last one's output runs all."""

    def __init__(self, remote: RemoteModel, x: Float[torch.Tensor, "batch pos d_model"]) -> None:
        self._remote, self._x, self._has_graph = remote, x, torch.is_grad_enabled()
        self._steps: list[_Step] = []
        self.output: RemoteTensor | None = None
        self.returned: Output

    def continue_with(self, x: object, remote: RemoteModel) -> bool:
        """Return True if a block of `remote` with the input `x` can be added."""
        is_next = isinstance(x, RemoteTensor) and x is self.output and not x.is_fetched
        # The blocks run in one graph, or in none.
        return is_next and remote is self._remote and self._has_graph == torch.is_grad_enabled()

    def add(self, step: _Step) -> RemoteTensor:
        """Add a block; return its output."""
        self._steps.append(step)
        like = self._x.shape, self._x.dtype, self._x.device  # [batch, pos, d_model]
        self.output = RemoteTensor(partial(self._run, len(self._steps)), *like, waits=True)
        return self.output

    def _run(self, n_steps: int) -> torch.Tensor:
        if n_steps != len(self._steps):
            raise RuntimeError(
                f"the output of blocks.{self._steps[n_steps - 1].record.index} stayed on "
                f"{self._remote.host.name}, where the next block has used it: to read "
                "it here, put a hook on a hook point of its block"
            )
        with torch.set_grad_enabled(self._has_graph):
            self.returned = _RemoteRun(self._remote, self._steps).run(self._x)
        returned = self.returned  # [batch, pos, d_model], or a tuple that begins with that
        output: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
        return output


class _RemoteRun(RemoteHandle):
    """A run of blocks by their worker; see `messages.py` for the protocol."""

    def __init__(self, remote: RemoteModel, steps: list[_Step]) -> None:
        super().__init__(remote.host)
        self._remote, self._steps = remote, steps
        self._reply: Reply
        self.n_parts = 0

    def run(self, x: Float[torch.Tensor, "batch pos d_model"]) -> Output:
        """Run the blocks and the hooks; return what the last block returns."""
        steps = [step.request for step in self._steps]
        # Any argument may have a graph, not only x.
        given = tree_leaves([x, [step.arguments for step in steps]])
        leaves = [
            index
            for index, item in enumerate(given)
            if torch.is_grad_enabled() and isinstance(item, torch.Tensor) and item.requires_grad
        ]
        request = RunRequest(
            run=self.number,
            model=self._remote.number,
            x=x,
            steps=steps,
            leaves=leaves,
            has_graph=torch.is_grad_enabled(),
            settings=settings(),
            facts=forward_cache().get(FACTS),
        )
        ask = partial(self._replied, "begin", request)
        # Tensors that both sides hold, in the worker's order. If the activation at a tap is one of
        # them, the worker sends its index (`same_as`) instead.
        shared, inputs = [x], [given[index] for index in leaves]
        token: torch.Tensor | None = None
        while True:
            if torch.is_grad_enabled():
                value, token = _RemoteBackward.apply(self, ask, token, *inputs)
            else:
                value = ask()
            reply = self._reply
            for number, point, kept in reply.cached:
                step = self._steps[number]
                step.block.get_submodule(point)(self._remote.kept(step.cached[point], kept))
            for number, attributes in reply.grown:
                self._steps[number].grow(attributes)
            if not reply.tap:
                return self._returned(value)
            same_as = reply.same_as
            activation = value if same_as is None else shared[same_as]
            hooked, in_place = self._hooked(activation, shared)
            # Most hooks only look: an activation that they leave unchanged is not sent back.
            is_changed = in_place or hooked is not activation
            if same_as is None or hooked is not activation:
                shared.append(hooked)
            is_leaf = hooked.requires_grad and (is_changed or same_as is None)
            inputs = [hooked] if is_leaf else []
            new = hooked if is_changed else None
            arguments = self.number, new, hooked.requires_grad, in_place
            ask = partial(self._replied, "proceed", *arguments)

    def _hooked(
        self, activation: torch.Tensor, shared: list[torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Run a tap's hooks; return the activation after them, and True if they wrote to it."""
        step, name = self._steps[self._reply.step], self._reply.tap
        others = [(tensor, version_of(tensor)) for tensor in shared if tensor is not activation]
        version = version_of(activation)
        before = activation.detach().clone()  # versions miss writes by `.data` and numpy
        hooked = step.block.get_submodule(name)(activation)
        step.check_after_hook(name, any(version_of(tensor) != was for tensor, was in others))
        is_written = version_of(activation) != version or not torch.equal(activation, before)
        return hooked, hooked is activation and is_written

    def _returned(self, output: torch.Tensor) -> Output:
        """Return the output in the last block's form: a tensor, or a tuple that begins with it."""
        last, value = self._steps[-1], self._reply.value
        if not isinstance(value, tuple):
            last.record.forms[last.form] = torch.Tensor
            return output
        if len(value) == 1:
            last.record.forms[last.form] = tuple
        home = self._remote.home
        return (output, *tree_map_only(torch.Tensor, lambda part: part.to(home), value[1:]))

    def _replied(self, method: str, *arguments: object) -> torch.Tensor:
        """Ask the worker; return the activation, at home."""
        with torch.inference_mode(False):  # so that writes to the activation are counted
            self._reply = self.host.call(method, *arguments)
            self.has_graph = self._reply.has_graph
            self.n_parts += 1
            value = self._reply.value
            first = value[0] if isinstance(value, tuple) else value
            return torch.empty(0) if first is None else first.to(self._remote.home)


class _RemoteBackward(torch.autograd.Function):
    """One part of a run, in home's graph.

    Each part takes a token from the one before, so that autograd runs them in reverse order:

        x ---------> part 0 -- z ---> hook(z) ---> part 1 ---> output
                        `---- token ----------------^
    """

    @staticmethod
    def forward(  # type: ignore[override]  # torch declares any number of arguments
        ctx: Any,
        run: _RemoteRun,
        ask: Callable[[], torch.Tensor],
        token: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.run, ctx.number, ctx.devices = run, run.n_parts, [item.device for item in inputs]
        ctx.set_materialize_grads(False)  # zeros would be sent
        output = ask()
        if not run.has_graph:
            ctx.mark_non_differentiable(output)
        return output, torch.zeros(())

    @staticmethod
    def backward(  # type: ignore[override]  # torch declares any number of gradients
        ctx: Any, gradient: torch.Tensor | None, token_gradient: object
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients do not pass through blocks of other hosts: leave out "
                "create_graph=True, or load the model on this host's devices alone"
            )
        task = torch._C._current_graph_task_id()
        run: _RemoteRun = ctx.run
        gradients = run.host.call("backward", run.number, ctx.number, gradient, task)
        at_home = [None if g is None else g.to(d) for g, d in zip(gradients, ctx.devices)]
        return None, None, torch.zeros(()) if ctx.needs_input_grad[2] else None, *at_home
