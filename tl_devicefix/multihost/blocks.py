"""Blocks that a rank runs by one command, forward and backward.

A rank builds such a block of its config, as TransformerLens's constructor does: so it has to be
just what that makes, but for its tensors, which each command names. If anything else is set in it,
or listens in it, it is run operation by operation. With gradients, the rank holds the graph, which
is one node of autograd's here.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from transformer_lens.hook_points import HookPoint

from tl_devicefix.dispatch.mixing import OutsideBlocks
from tl_devicefix.multihost.commands import RemoteTensor
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.peers import Owner
from tl_devicefix.simulation.geometry import Geometry, geometry_of
from tl_devicefix.simulation.tensor import SimTensor, wrap

Key = str | int
"""Of a tensor of a block's forward: an argument's name, or which of the block's tensors it is."""
Entry = tuple[type, Any, Any, bool]
"""Of a KV cache: class, keys, values, and whether it is frozen."""
_OURS = "_tl_devicefix"
_NOT_SETTINGS = {*vars(nn.Module()), "cfg", "name"}


class Recipe(NamedTuple):
    """Of what a rank builds a block, but for its tensors.

    Attributes:
        layer: the block's index.
        config_cls: class of the config.
        config: the settings in that, but for the device.
        marks: settings of this package in each of the components, as "sdpa".
    """

    layer: int
    config_cls: Any
    config: dict[str, Any]
    marks: list[dict[str, str]]

    def build(self, device: torch.device) -> Any:
        """Build a block for tensors of a device; its own are on meta."""
        from transformer_lens.components import TransformerBlock  # which TransformerLens 4 lacks

        config = self.config_cls.__new__(self.config_cls)
        vars(config).update(self.config, device="meta")
        with torch.device("meta"):
            block = TransformerBlock(config, self.layer)
        vars(config)["device"] = str(device)
        for component, marks in zip(_components(block), self.marks, strict=True):
            vars(component).update(marks)
        return block


def _recipe(block: Any) -> Recipe | None:
    """A block's; None if it is not what its constructor makes, or other ranks cannot build it."""
    config = {name: value for name, value in vars(block.cfg).items() if name != "device"}
    if not type(block.cfg).__module__.startswith("transformer_lens.") or not _is_plain(config):
        return None
    marks = [
        {
            name: mark
            for name, mark in vars(component).items()
            if name.startswith(_OURS) and type(mark) is str
        }
        for component in _components(block)
    ]
    recipe = Recipe(block.attn.layer_id, type(block.cfg), config, marks)
    return recipe if _is_as_built(block, recipe) else None


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    is_one = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    return is_one and type(value).__module__ in ("builtins", "numpy", "torch")


def _is_as_built(block: Any, recipe: Recipe) -> bool:
    """Whether a block is what its constructor makes, but for its tensors and for hooks."""
    try:
        built = recipe.build(torch.device("meta"))
        pairs = list(zip(_components(block), _components(built)))
        return (
            list(map(type, block.modules())) == list(map(type, built.modules()))
            and _named(block) == _named(built)
            and all(getattr(component, "cfg", block.cfg) is block.cfg for component, _ in pairs)
            and all(_settings(component) == _settings(other) for component, other in pairs)
        )
    except Exception:  # noqa: BLE001  # the constructor's, of a config that was changed since
        return False


def _settings(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, but for None, and those of torch and this package."""
    return {
        name: (type(value), value)
        for name, value in vars(module).items()
        if value is not None and name not in _NOT_SETTINGS and not name.startswith(_OURS)
    } | {"compiled": module._compiled_call_impl}


def _components(block: nn.Module) -> list[Any]:
    """A block and the modules in it, but for hook points."""
    return [module for module in block.modules() if type(module) is not HookPoint]


def _containers(block: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a block and its components have their tensors, in order."""
    return [kind for module in _components(block) for kind in (module._parameters, module._buffers)]


def _tensors_in(containers: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [item for items in containers for item in items.items() if item[1] is not None]


def _named(block: nn.Module) -> list[str]:
    return [name for name, _ in _tensors_in(_containers(block))]


class Built:
    """A block that a rank has built of a pickled recipe, for tensors of a device."""

    def __init__(self, recipe: bytes, device: torch.device) -> None:
        self._recipe, self._device = pickle.loads(recipe), device
        self._blocks = [self._recipe.build(device)]

    def run(
        self, tensors: Sequence[torch.Tensor], inputs: dict[str, Any], entry: Entry | None = None
    ) -> list[torch.Tensor]:
        """Run the block with these tensors; return its output, and an entry's new keys, values."""
        try:
            block = self._blocks.pop()
        except IndexError:  # another thread runs it
            block = self._recipe.build(self._device)
        slots = [
            (container, name)
            for container in _containers(block)
            for name, blank in container.items()
            if blank is not None
        ]
        blanks = [container[name] for container, name in slots]
        try:
            for (container, name), tensor in zip(slots, tensors, strict=True):
                container[name] = tensor
            if entry is None:
                return [block(**inputs)]
            cls, keys, values, is_frozen = entry
            cache = cls(past_keys=keys, past_values=values, frozen=is_frozen)
            output = block(**inputs, past_kv_cache_entry=cache)
            return [output] if is_frozen else [output, cache.past_keys, cache.past_values]
        finally:
            for (container, name), blank in zip(slots, blanks):
                container[name] = blank
            self._blocks.append(block)


class Graph:
    """A forward of a block, and its graph, for gradients of its tensors and inputs by key.

    Attributes:
        output: of the forward.
    """

    def __init__(
        self,
        built: Built,
        tensors: Sequence[torch.Tensor],
        inputs: dict[str, Any],
        keys: Sequence[Key],
    ) -> None:
        named = dict[Key, Any](enumerate(tensors)) | inputs
        leaves = {key: named[key].detach().requires_grad_() for key in keys}
        self._leaves = list(leaves.values())
        named |= leaves
        own = [named[index] for index in range(len(tensors))]
        with torch.enable_grad():
            (self._output,) = built.run(own, {name: named[name] for name in inputs})
        # The gradient of a sum does not need the sum, which may be changed in place.
        node = self._output.grad_fn
        is_sum = node is not None and node.name() == "AddBackward0"
        self.output = self._output.detach() if is_sum else self._output.detach().clone()

    def backward(
        self, gradient: torch.Tensor, which: Sequence[int], keeps: bool = False
    ) -> list[torch.Tensor]:
        """Gradients of tensors of some of the keys; it keeps the graph for another backward."""
        leaves = [self._leaves[index] for index in which]
        return list(
            torch.autograd.grad(
                self._output, leaves, gradient, retain_graph=keeps, materialize_grads=True
            )
        )


class _Snapshot:
    """Settings and tensors of a block, by which a change of them is noticed.

    All else that may change in a block is noticed by the `Look` that has this snapshot: modules
    and their classes, hooks, and attributes that come or go.

    Attributes:
        recipe: of which a rank builds the block, pickled; None if it cannot.
        names: of its tensors, in order.
    """

    def __init__(self, block: Any) -> None:
        namespaces = [*map(vars, _components(block)), vars(block.cfg)]
        self._seen = [(space, tuple(space), tuple(space.values())) for space in namespaces]
        self._containers = _containers(block)
        self.names = _named(block)
        self._layout = self._lying()
        recipe = _recipe(block)
        self.recipe = None if recipe is None else pickle.dumps(recipe, protocol=5)

    def holds(self) -> bool:
        """Whether all settings are still the same objects."""
        return all(
            tuple(space) == names and all(map(is_, space.values(), values))
            for space, names, values in self._seen
        )

    def tensors(self, device: torch.device) -> list[Any] | None:
        """The block's; None if one is elsewhere, or they have other names, shapes or dtypes now."""
        tensors = [tensor for _, tensor in _tensors_in(self._containers)]
        return tensors if _are_on(device, tensors) and self._lying() == self._layout else None

    def _lying(self) -> list[Any]:
        named = _tensors_in(self._containers)
        return [(name, tensor.shape, tensor.dtype) for name, tensor in named]


def _are_on(device: torch.device, tensors: Sequence[Any]) -> bool:
    return all(type(tensor) is SimTensor and tensor.device == device for tensor in tensors)


def _is_looked_into() -> bool:
    """Whether there is something around that sees, or changes, each operation."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return (
        _len_torch_dispatch_stack() > 0
        or not all(isinstance(mode, OutsideBlocks) for mode in modes)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )


def run_by_command(
    far: FarDevices, block: Any, inputs: dict[str, Any], entry: Any, look: Any
) -> torch.Tensor | None:
    """Run a block by one command; None if it has to be run operation by operation.

    Args:
        far: the devices.
        block: one that runs the plain function, in which nobody listens.
        inputs: its arguments, but for the entry; the first is the residual stream.
        entry: the block's of a KV cache, if there is one.
        look: at the block just now, which keeps the snapshot.
    """
    residual = next(iter(inputs.values()))
    device, dtype = residual.device, residual.dtype
    if look.snapshot is None or not look.snapshot.holds():
        look.snapshot = _Snapshot(block)
    snapshot: _Snapshot = look.snapshot
    # Of another dtype, or lying otherwise, it would give another one.
    if (
        snapshot.recipe is None
        or dtype != block.cfg.dtype
        or not residual.is_contiguous()
        or _is_looked_into()
    ):
        return None
    others = [argument for argument in inputs.values() if isinstance(argument, torch.Tensor)]
    if entry is not None:
        others += [entry.past_keys, entry.past_values]
        if not type(entry).__module__.startswith("transformer_lens."):
            return None
    tensors = snapshot.tensors(device) if _are_on(device, others) else None
    if tensors is None:
        return None
    call = _Call(far, device, snapshot, tensors, inputs)
    far.wait_for_room(call.rank)
    if torch.is_grad_enabled():
        named = dict[Key, Any](enumerate(tensors)) | inputs
        keys = tuple(
            key for key, tensor in named.items() if tensor is not None and tensor.requires_grad
        )
        if keys:
            saves_by_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            if entry is not None or torch.is_anomaly_enabled() or saves_by_hooks:
                return None
            return _Whole.apply(call, keys, *(named[key] for key in keys))  # type: ignore[no-any-return]
    outputs, past = [_output(residual)], None
    if entry is not None:
        past = type(entry), entry.past_keys._cpu, entry.past_values._cpu, entry.frozen
        if not entry.frozen:
            for batch, length, *heads in (tensor.shape for tensor in past[1:3]):
                outputs.append(_contiguous((batch, length + residual.shape[1], *heads), dtype))
    output, *cached = call.run(past, outputs)
    if cached:
        entry.past_keys, entry.past_values = cached
    return output


def _output(residual: torch.Tensor) -> Geometry:
    """Of a block's output: the shape of the residual stream."""
    return _contiguous(residual.shape, residual.dtype)


def _contiguous(shape: Any, dtype: torch.dtype) -> Geometry:
    return Geometry(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)


class _Call:
    """A call of a block by one command, with or without a graph."""

    def __init__(
        self,
        far: FarDevices,
        device: torch.device,
        snapshot: _Snapshot,
        tensors: list[SimTensor],
        inputs: dict[str, Any],
    ) -> None:
        self.far, self._device, self.snapshot = far, device, snapshot
        self.tensors, self.inputs = tensors, inputs
        self._machine = next(iter(inputs.values()))._allocation.machine
        self._place = far.places[device.index]
        self.rank = self._place.rank
        assert snapshot.recipe is not None
        key = device.index, snapshot.recipe
        self._runner = far.built.get(key) or far.built.setdefault(key, self._build(snapshot.recipe))

    def _build(self, recipe: bytes) -> Built | Owner:
        if not self.rank:
            return Built(recipe, self._place.device)
        owner = self.far.owner(self.rank)
        self.far.tell(self.rank, "build", owner.number, recipe, self._place.number)
        return owner

    def _behind(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The block's tensors, and its arguments, as they are behind those of the machine."""
        named = self.inputs.items()
        inputs = {name: value._cpu if type(value) is SimTensor else value for name, value in named}
        return [tensor._cpu for tensor in self.tensors], inputs

    def wrapped(self, made: torch.Tensor) -> SimTensor:
        """A result, on its device."""
        return wrap(made, self._machine, self._device)

    def run(self, entry: Entry | None, outputs: list[Geometry]) -> list[SimTensor]:
        """Run it without a graph; return its output, and an entry's new keys and values."""
        if isinstance(self._runner, Built):
            with torch.no_grad():
                made = self._runner.run(*self._behind(), entry)
        else:
            if entry is not None:
                cls, keys, values, is_frozen = entry
                entry = cls, self.far.stored(keys), self.far.stored(values), is_frozen
            made = [self.far.promise(geometry, self.rank) for geometry in outputs]
            storages = self.far.storages_of(made)
            self.far.tell(self.rank, "call", *self._arguments(self._runner), entry, storages)
        return list(map(self.wrapped, made))

    def _arguments(self, block: Owner) -> tuple[int, tuple[RemoteTensor, ...], dict[str, Any]]:
        """The block, its tensors and its arguments, as a command names them."""
        tensors, inputs = self._behind()
        return block.number, tuple(map(self.far.stored, tensors)), self.far.named(inputs)

    def record(self, keys: tuple[Key, ...], leaves: Any) -> tuple[SimTensor, Graph | _FarGraph]:
        """Run it; return its output, and the graph for gradients of some tensors, by key."""
        if isinstance(self._runner, Built):
            graph = Graph(self._runner, *self._behind(), keys)
            return self.wrapped(graph.output), graph
        output = self.far.promise(_output(next(iter(self.inputs.values()))), self.rank)
        far_graph = _FarGraph(self.far, self.rank, leaves)
        graph_and_keys = far_graph.number, keys, self.far.storages_of([output])
        self.far.tell(self.rank, "record", *self._arguments(self._runner), *graph_and_keys)
        return self.wrapped(output), far_graph


class _FarGraph:
    """A `Graph` that another rank holds, until this is let go."""

    def __init__(self, far: FarDevices, rank: int, leaves: Sequence[SimTensor]) -> None:
        self._far, self._rank = far, rank
        self._owner: Owner | None = far.owner(rank)
        self.number = self._owner.number
        # As parameters lie: autograd copies a gradient that lies otherwise.
        self._like = [geometry_of(torch.empty_like(leaf._cpu)) for leaf in leaves]

    def backward(
        self, gradient: torch.Tensor, which: tuple[int, ...], keeps: bool
    ) -> list[torch.Tensor]:
        """Tell the rank to make gradients of tensors of some of the keys."""
        made = [self._far.promise(self._like[index], self._rank) for index in which]
        arguments = self.number, self._far.stored(gradient), which, keeps
        self._far.tell(self._rank, "backward", *arguments, self._far.storages_of(made))
        if not keeps:
            self._owner = None
        return made


class _Whole(torch.autograd.Function):
    """A block's forward and backward, each one command."""

    @staticmethod
    def forward(ctx: Any, call: _Call, keys: tuple[Key, ...], *leaves: Any) -> Any:  # type: ignore[override]
        output, ctx.graph = call.record(keys, leaves)
        # Also frozen weights; but a bias may be changed before the backward, as nothing reads it.
        weights = [
            tensor
            for tensor, name in zip(call.tensors, call.snapshot.names)
            if name.lstrip("_")[0] in "Ww"
        ]
        inputs = [
            argument for argument in call.inputs.values() if isinstance(argument, torch.Tensor)
        ]
        ctx.save_for_backward(*weights, *inputs)
        ctx.wrapped, call.inputs = call.wrapped, {}
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        assert ctx.saved_tensors  # which raises if something was changed, or there was one before
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients do not pass through blocks that another rank runs by one "
                "command: call init_hosts(whole_blocks=False)"
            )
        which = tuple(index for index, need in enumerate(ctx.needs_input_grad[2:]) if need)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        made = ctx.graph.backward(gradient._cpu, which, keeps)
        gradients = dict(zip(which, map(ctx.wrapped, made)))
        return None, None, *(gradients.get(index) for index in range(len(ctx.needs_input_grad) - 2))
