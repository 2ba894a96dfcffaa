"""The worker of a host: it holds some blocks of a model, and runs them when home asks.

`messages.py` shows who sends what, and where runs pause. A worker is a plain class: `init_hosts`
turns it into an actor, and tests call it in a thread.
"""

from __future__ import annotations

import gc
import pkgutil
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import psutil
import torch
from jaxtyping import Float
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only
from transformer_lens.hook_points import LensHandle

from tl_devicefix.dispatch.views import View
from tl_devicefix.fusing.fused import is_fused, set_fused
from tl_devicefix.fusing.one_forward import one_forward
from tl_devicefix.multihost import checkpoint_files
from tl_devicefix.multihost.messages import (
    CacheEntry,
    EntryState,
    KeptTensor,
    Output,
    Reply,
    RunRequest,
    StepRequest,
    as_cache,
    attributes_of,
    set_attributes,
)
from tl_devicefix.placement.devices import free_memory
from tl_devicefix.placement.elsewhere import elsewhere

HAS_MLP_IN = "_use_hook_mlp_in"
"""A setting that a Bridge keeps in its block, and not in a config."""

_MATMULS = tuple(map(attrgetter("matmul"), (torch.backends.cuda, torch.backends.mkldnn)))
"""`torch.set_float32_matmul_precision` sets these two; its getter refuses some of their values."""


def settings() -> list[Any]:
    """Return torch's settings that change a block's results."""
    return [torch.get_default_dtype(), *(matmul.fp32_precision for matmul in _MATMULS)]


def config_at(block: nn.Module, path: str) -> Any:
    """Return the config of a module in a block; None if it has none."""
    # Read `vars`: a Bridge's components pass unknown names on to the layer.
    attributes = vars(block.get_submodule(path))
    return attributes.get("cfg") or attributes.get("config")


class Worker:
    """Holds and runs blocks, on devices that have these names here."""

    differences = staticmethod(checkpoint_files.differences)

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        # Models, runs, and dicts of tensors: activations (""), or a KV cache's, by name.
        self._kept: dict[int, Any] = {}

    def call(self, method: str, arguments: Sequence[object], forget: Sequence[int]) -> Any:
        """Call a method, after the values with the numbers `forget` were freed."""
        for number in forget:
            item = self._kept.pop(number, None)
            if isinstance(item, _PausableRun):
                item.end()
            elif isinstance(item, _Model):
                del item
                gc.collect()  # the modules of a model refer to each other
        return getattr(self, method)(*arguments)

    def free_memory(self, device: int) -> int:
        """Return the free bytes of the device with this index in `devices`."""
        free = free_memory(torch.device(self.devices[device]))
        return int(psutil.virtual_memory().available) if free is None else free

    def load(
        self,
        model: int,
        load: str,
        name: str,
        arguments: dict[str, object],
        device_map: dict[str, int | None],
    ) -> None:
        """Load this host's blocks of a model from this host's files.

        Args:
            model: the number to keep the model under.
            load, name, arguments: see `loading_elsewhere`.
            device_map: component -> its device's index in `devices`; None if it is elsewhere.
        """
        places = {
            component: elsewhere(0) if index is None else torch.device(self.devices[index])
            for component, index in device_map.items()
        }
        loaded = pkgutil.resolve_name(load)(name, device_map=places, **arguments)
        self._kept[model] = _Model(loaded)

    def apply(self, model: int, method: str, arguments: dict[str, object]) -> list[KeptTensor]:
        """Call a method that changes a model's weights; return all weights here."""
        module = self._kept[model].module
        getattr(module, method)(**arguments)
        self._kept[model] = _Model(module)  # its views have the old weights
        named = module.blocks.named_parameters(prefix="blocks", remove_duplicate=False)
        return [KeptTensor.of(w, model, name) for name, w in named if not w.is_meta]

    def fetch(self, number: int, name: str) -> torch.Tensor:
        """Return a tensor that is kept; see `KeptTensor`."""
        return self._kept[number][name]

    def begin(self, request: RunRequest) -> Reply:
        """Run blocks up to the first tap or the end."""
        dtype, *precisions = request.settings
        torch.set_default_dtype(dtype)
        for matmul, precision in zip(_MATMULS, precisions):
            if matmul.fp32_precision != precision:
                matmul.fp32_precision = precision
        run = self._kept[request.run] = _PausableRun(self._kept, request)
        return run.begin()

    def proceed(self, run: int, *arguments: Any) -> Reply:
        """Resume a paused run; see `_PausableRun`."""
        return self._kept[run].proceed(*arguments)

    def backward(self, run: int, *arguments: Any) -> list[torch.Tensor | None]:
        """Return the gradients of a part of a run; see `_PausableRun`."""
        return self._kept[run].backward(*arguments)


class _Model:
    """A model with some blocks here, and views of blocks for runs with hooks."""

    def __init__(self, module: Any) -> None:  # a `Model` with the attributes that patches add
        self.module, self.blocks = module, module.blocks
        self._views: dict[int, list[View[nn.Module]]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return attrgetter(name)(self.module)

    @contextmanager
    def view_of(self, layer: int) -> Iterator[nn.Module]:
        """Lend a view of a block: runs in flight must not see each other's hooks."""
        views = self._views.setdefault(layer, [])
        try:  # not `if views`: another thread may take the last one in between
            view = views.pop()
        except IndexError:
            view = View(self.blocks[layer])
        try:
            yield view.model
        finally:
            view.restore()
            views.append(view)


class _Ended(BaseException):  # not an Exception: a block may catch those
    """Ends a run that home has dropped."""


@dataclass
class _GraphPart:
    """A run's computation from its start, or from a reply, to the next reply."""

    leaves: list[torch.Tensor]  # its inputs that get gradients
    edge: GradientEdge | None = None  # of its value; None if that needs no gradient
    device: torch.device | None = None  # of its value


class _PausableRun:
    """A run of blocks. If there are taps, it has a thread, which waits at each for `proceed`."""

    def __init__(self, kept: dict[int, Any], request: RunRequest) -> None:
        self._kept, self._request = kept, request
        self._model: _Model = kept[request.model]
        self._replies = queue.SimpleQueue[Reply | BaseException]()
        # None ends the run; others are `proceed`'s `activation` and `in_place`.
        self._arrivals = queue.SimpleQueue[tuple[torch.Tensor | None, bool] | None]()
        self._cached: list[tuple[int, str, KeptTensor]] = []
        self._grown: list[tuple[int, dict[str, object]]] = []
        self._parts: list[_GraphPart] = []
        # The tensors that home has too, in its order: x, then the activation of each tap.
        self._shared: list[torch.Tensor] = []
        self._task = -1

    def begin(self) -> Reply:
        """Run up to the first tap, or the end."""
        steps = self._request.steps
        given = tree_leaves([self._request.x, [step.arguments for step in steps]])
        leaves = [given[index].requires_grad_() for index in self._request.leaves]
        self._parts.append(_GraphPart(leaves))
        if not any(step.taps for step in steps):
            return self._run()
        # Use a thread: the call that begins a run returns at the first tap, with the block's
        # frames still on the stack.
        threading.Thread(target=self._run_in_thread, daemon=True).start()
        return self._reply()

    def proceed(
        self, activation: torch.Tensor | None, needs_gradient: bool, in_place: bool
    ) -> Reply:
        """Resume the run, up to the next tap or the end.

        Args:
            activation: the activation after the tap's hooks; None if they left it unchanged.
            needs_gradient: True if home will ask for its gradient.
            in_place: True if a hook wrote to the activation, which other tensors may share.
        """
        if activation is not None:
            activation.requires_grad_(needs_gradient)
        self._parts.append(
            _GraphPart([activation] if activation is not None and needs_gradient else [])
        )
        self._arrivals.put((activation, in_place))
        return self._reply()

    def end(self) -> None:
        """End the run, if it is paused."""
        self._arrivals.put(None)

    def _reply(self) -> Reply:
        reply = self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def _run_in_thread(self) -> None:
        try:
            self._replies.put(self._run())
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001  # `_reply` raises it where home waits
            self._replies.put(error)

    def _run(self) -> Reply:
        request = self._request
        x = request.x  # [batch, pos, d_model]
        with torch.set_grad_enabled(request.has_graph), one_forward(request.facts):
            for number, step in enumerate(request.steps):
                output = self._run_block(number, step, x)
                x = output[0] if isinstance(output, tuple) else output
        return self._stopped(number, "", x, output)

    def _run_block(
        self, number: int, step: StepRequest, x: Float[torch.Tensor, "batch pos d_model"]
    ) -> Output:
        layer = step.layer
        device = self._model.module.placement.device_of(f"blocks.{layer}")
        entries: list[tuple[EntryState, CacheEntry, dict[str, object]]] = []

        def appended_to(state: EntryState) -> object:
            entry = self._entry(state, device)
            entries.append((state, entry, attributes_of(entry)))
            return as_cache(entry, layer) if state.is_in_cache else entry

        def here(tensor: torch.Tensor) -> torch.Tensor:
            # Hooks may write to a copy, but not to a leaf of the graph.
            return tensor.to(device, copy=tensor.is_leaf and tensor.requires_grad)

        x, arguments = tree_map_only(torch.Tensor, here, (x, step.arguments))
        args, kwargs = tree_map_only(
            EntryState, appended_to, arguments, is_leaf=lambda value: isinstance(value, EntryState)
        )
        self._shared = self._shared or [x]
        # Only hooks need a view: without them, runs in flight may share the block.
        model, has_hooks = self._model, step.taps or step.cached
        with model.view_of(layer) if has_hooks else nullcontext(model.blocks[layer]) as block:
            for path, changes in step.config.items():
                vars(config_at(block, path)).update(changes)
            if is_fused(block) is not step.is_fused:
                set_fused(block, step.is_fused)
            if step.has_mlp_in is not None:
                setattr(block, HAS_MLP_IN, step.has_mlp_in)
            for name in (*step.taps, *step.cached):
                self._put_hook(number, step, name, block.get_submodule(name))
            output: Output = block(x, *args, **kwargs)
        for state, entry, before in entries:
            self._keep(number, state.new, entry, before)
        return output

    def _entry(self, state: EntryState, device: torch.device) -> CacheEntry:
        """Return a copy of home's entry. Appending to it makes new tensors."""
        # Skip `__init__`: its arguments differ between classes and versions.
        entry: CacheEntry = object.__new__(state.kind)
        given = tree_map_only(
            KeptTensor, lambda one: self._kept[one.number][one.name], state.attributes
        )
        set_attributes(entry, given, device)
        return entry

    def _keep(self, number: int, new: int, entry: CacheEntry, before: dict[str, object]) -> None:
        """Keep the tensors of an entry if it has grown (a frozen one does not)."""
        attributes = attributes_of(entry)
        tensors = {k: v for k, v in attributes.items() if isinstance(v, torch.Tensor)}
        if any(before.get(name) is not tensor for name, tensor in tensors.items()):
            self._kept[new] = {name: tensor.detach() for name, tensor in tensors.items()}
            named = {name: KeptTensor.of(tensor, new, name) for name, tensor in tensors.items()}
            self._grown.append((number, attributes | named))

    def _put_hook(self, number: int, step: StepRequest, name: str, point: Any) -> None:
        """Register a torch hook on a hook point."""

        # A torch hook: home runs TransformerLens's conversions around the user's hook.
        def cache(module: object, args: object, activation: torch.Tensor) -> None:
            kept = step.cached[name]
            self._kept[kept] = {"": activation.detach()}
            self._cached.append((number, name, KeptTensor.of(activation, kept)))

        def pause(module: object, args: object, activation: torch.Tensor) -> torch.Tensor:
            return self._pause(number, name, activation)

        is_tap = name in step.taps
        handle = LensHandle(point.register_forward_hook(pause if is_tap else cache))
        # TransformerLens computes some activations only if these lists have hooks.
        kinds = step.taps[name] if is_tap else ["fwd"]
        point.fwd_hooks += [handle] * ("fwd" in kinds)
        point.bwd_hooks += [handle] * ("bwd" in kinds)

    def _pause(self, number: int, name: str, activation: torch.Tensor) -> torch.Tensor:
        """Send an activation home; return the one that replaces it."""
        shared = (index for index, one in enumerate(self._shared) if one is activation)
        same_as = next(shared, None)
        value = activation if same_as is None else None
        self._replies.put(self._stopped(number, name, activation, value, same_as))
        arrival = self._arrivals.get()
        if arrival is None:
            raise _Ended
        given, in_place = arrival
        if given is not None and in_place:
            activation.copy_(given)  # tensors that share its memory have to change too
        elif given is not None:
            # Copy it: `given` is a leaf of the graph, and the block may write to it.
            activation = given.to(activation.device, copy=self._request.has_graph)
            same_as = None
        elif same_as is None and activation.requires_grad:
            # Detach in place, if torch allows it: a Bridge's norms ask whether a hook returned the
            # same tensor. It is no leaf itself: later hooks may write to it.
            leaf = activation.detach().requires_grad_()
            activation = activation.detach() if activation._is_view() else activation.detach_()
            with torch.autograd._unsafe_preserve_version_counter(activation):
                activation.copy_(leaf)
            self._parts[-1].leaves.append(leaf)
        if same_as is None:
            self._shared.append(activation)
        return activation

    def _stopped(
        self,
        number: int,
        name: str,
        activation: torch.Tensor,
        value: Output | None,
        same_as: int | None = None,
    ) -> Reply:
        has_graph = activation.requires_grad and same_as is None
        part = self._parts[-1]
        # Keep the edge, not the tensor: hooks may write to the tensor.
        part.edge = get_gradient_edge(activation) if has_graph else None
        part.device = activation.device
        reply = Reply(number, name, value, same_as, has_graph, self._cached, self._grown)
        self._cached, self._grown = [], []
        return reply

    def backward(
        self, number: int, gradient: torch.Tensor | None, task: int
    ) -> list[torch.Tensor | None]:
        """Return the gradients of a part's leaves. Home asks for the last part first.

        Args:
            number: the part's number, from 0 on.
            gradient: the gradient of the part's value.
            task: the number of home's backward pass; several may go through one graph.
        """
        if task != self._task:  # a new backward pass begins
            self._task = task
            for leaf in self._leaves(len(self._parts)):
                leaf.grad = None
        part = self._parts[number]
        if gradient is not None and part.edge is not None:
            # A part may use leaves of earlier ones, whose gradients are kept until their turn.
            torch.autograd.backward(
                part.edge, gradient.to(part.device), retain_graph=True, inputs=self._leaves(number)
            )
        gradients = [leaf.grad for leaf in part.leaves]
        for leaf in part.leaves:
            leaf.grad = None
        return gradients

    def _leaves(self, number: int) -> list[torch.Tensor]:
        return [leaf for part in self._parts[: number + 1] for leaf in part.leaves]
