"""Blocks, and components of blocks, that a rank runs by one command, forward and backward.

A rank builds such a module of its config, as TransformerLens's constructor does: so it has to be
just what that makes, but for its tensors, which each command names. If anything else is set in it,
or listens in it, it is run operation by operation. With gradients, the rank holds the graph, which
is one node of autograd's here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attention.implementation import HOOKS
from tl_devicefix.dispatch.mixing import OutsideBlocks
from tl_devicefix.multihost import commands
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.peers import Owner
from tl_devicefix.simulation.geometry import Geometry, geometry_of
from tl_devicefix.simulation.tensor import SimTensor, wrap

Key = str | int
"""Of a tensor of a module's forward: an argument's name, or which of the module's tensors it is."""
_OURS = "_tl_devicefix"
_COMPONENTS = "transformer_lens.components."
_NOT_SETTINGS = {*vars(nn.Module()), "cfg", "name"}
_ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "TransformerBlock": lambda block: (block.attn.layer_id,),
    **dict.fromkeys(("Attention", "GroupedQueryAttention"), lambda a: (a.attn_type, a.layer_id)),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), lambda norm: (norm.length,)),
    **dict.fromkeys(("LayerNormPre", "RMSNormPre", "MLP", "GatedMLP"), lambda module: ()),
}
"""Class of TransformerLens's components that is run by one command -> what its constructor takes
beside the config."""


class Recipe(NamedTuple):
    """Of what a rank builds a module, but for its tensors.

    Attributes:
        cls: its class.
        arguments: of the constructor, behind the config.
        config_cls: class of the config.
        config: what is set in that, but for the device.
        marks: what this package has set in each of the modules, as "sdpa".
    """

    cls: type
    arguments: tuple[Any, ...]
    config_cls: Any
    config: dict[str, Any]
    marks: list[dict[str, str]]


def _recipe(module: Any) -> Recipe | None:
    """A module's; None if its config has something that other ranks may not have."""
    cls, config = type(module), vars(module.cfg).copy()
    config.pop("device", None)
    if not type(module.cfg).__module__.startswith("transformer_lens.") or not _is_plain(config):
        return None
    marks = [
        {name: mark for name, mark in vars(component).items() if name.startswith(_OURS)}
        for component in _components(module)
    ]
    marks = [
        {name: mark for name, mark in attributes.items() if type(mark) is str}
        for attributes in marks
    ]
    return Recipe(cls, _ARGUMENTS[cls.__name__](module), type(module.cfg), config, marks)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    is_one = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    return is_one and type(value).__module__ in ("builtins", "numpy", "torch")


def _components(module: nn.Module) -> list[Any]:
    """A module and those in it, but for hook points."""
    return [submodule for submodule in module.modules() if type(submodule) is not HookPoint]


def _tensors_in(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a module and those in it have their tensors: dicts and names, in order."""
    return [
        (container, name)
        for component in _components(module)
        for container in (component._parameters, component._buffers)
        for name, tensor in container.items()
        if tensor is not None
    ]


class Built:
    """What a rank has built of a recipe, for tensors of a device."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._modules = [self.module()]

    def module(self) -> Any:
        """Another module, with tensors on meta."""
        config = self._recipe.config_cls.__new__(self._recipe.config_cls)
        vars(config).update(self._recipe.config, device="meta")
        with torch.device("meta"):
            module = self._recipe.cls(config, *self._recipe.arguments)
        vars(config)["device"] = str(self._device)
        for component, marks in zip(_components(module), self._recipe.marks, strict=True):
            vars(component).update(marks)
        return module

    def run(
        self, tensors: Sequence[torch.Tensor], inputs: dict[str, Any], entry: Any = None
    ) -> list[torch.Tensor]:
        """What the module gives with these tensors, and keys and values that a KV cache has then.

        Of an entry of one it needs class, keys, values, and whether it is frozen.
        """
        try:
            module = self._modules.pop()
        except IndexError:  # another thread runs it
            module = self.module()
        slots = _tensors_in(module)
        blanks = [container[name] for container, name in slots]
        try:
            for (container, name), tensor in zip(slots, tensors, strict=True):
                container[name] = tensor
            if entry is None:
                return [module(**inputs)]
            cls, keys, values, is_frozen = entry
            cache = cls(past_keys=keys, past_values=values, frozen=is_frozen)
            output = module(**inputs, past_kv_cache_entry=cache)
            return [output] if is_frozen else [output, cache.past_keys, cache.past_values]
        finally:
            for (container, name), blank in zip(slots, blanks):
                container[name] = blank
            self._modules.append(module)


class Graph:
    """A forward of a module, and what a backward through it needs.

    Attributes:
        output: what the module gives.
    """

    def __init__(
        self,
        built: Built,
        tensors: Sequence[torch.Tensor],
        inputs: dict[str, Any],
        keys: Sequence[Key],
    ) -> None:
        named: dict[Key, Any] = dict(enumerate(tensors))
        named.update(inputs)
        leaves = {key: named[key].detach().requires_grad_() for key in keys}
        self._leaves = list(leaves.values())
        named |= leaves
        own = [named[index] for index in range(len(tensors))]
        with torch.enable_grad():
            (self._output,) = built.run(own, {name: named[name] for name in inputs})
        # What a sum gives, its gradient does not need: it may be changed in place.
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


class _Seen:
    """What is set in a module, while it is what its constructor makes.

    Attributes:
        recipe: of which a rank builds it, also as bytes; None if it is anything else.
        names: of its tensors, in order.
    """

    def __init__(self, module: Any) -> None:
        vars(module)[_SEEN] = self  # and not beside it, as garbage is collected together
        own, inside = _components(module), list(module.modules())
        dicts = [*map(vars, own), *(component._modules for component in own), vars(module.cfg)]
        self._seen_attributes = [
            (attributes, tuple(attributes), tuple(attributes.values())) for attributes in dicts
        ]
        points = [vars(submodule) for submodule in inside if type(submodule) is HookPoint]
        self._sized = [(point, len(point)) for point in points]
        self._of_tensors = [
            container
            for component in own
            for container in (component._parameters, component._buffers)
        ]
        self._names = list(map(tuple, self._of_tensors))
        self._inside = inside[1:]
        self._classes = list(map(type, self._inside))
        self._hooks = [vars(submodule)[name] for submodule in inside[1:] for name in HOOKS]
        self._shapes = [_shape(container[name]) for container, name in _tensors_in(module)]
        self.names = [name for _, name in _tensors_in(module)]
        self.recipe = _recipe(module)
        self.pickled_recipe = pickle.dumps(self.recipe, protocol=5)
        if self.recipe is not None and not _is_as_built(module, self.recipe):
            self.recipe = None

    def holds(self, module: nn.Module) -> bool:
        """Whether it is of this module, in which nothing but tensors was exchanged since."""
        return (
            self._seen_attributes[0][0] is vars(module)
            and all(map(_is_same, self._seen_attributes))
            and self._names == list(map(tuple, self._of_tensors))
            and all(len(point) == size for point, size in self._sized)
            and self._classes == list(map(type, self._inside))
        )

    def is_heard(self) -> bool:
        """Whether somebody listens in it."""
        return any(self._hooks)

    def tensors(self, device: torch.device) -> list[Any] | None:
        """Its tensors; None if they are not all there, or have other shapes or dtypes now."""
        tensors = [
            tensor
            for container in self._of_tensors
            for tensor in container.values()
            if tensor is not None
        ]
        is_here = all(type(tensor) is SimTensor and tensor.device == device for tensor in tensors)
        return tensors if is_here and list(map(_shape, tensors)) == self._shapes else None

    # A copy is looked at anew.

    def __reduce__(self) -> Any:
        return type(None), ()


def _shape(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype


def _is_same(seen: tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]) -> bool:
    attributes, names, values = seen
    return tuple(attributes) == names and all(map(is_, attributes.values(), values))


def _is_as_built(module: Any, recipe: Recipe) -> bool:
    """Whether a module is what its constructor makes, but for its tensors and for hooks."""
    try:
        built = Built(recipe, torch.device("meta")).module()
        ones, others = list(module.modules()), list(built.modules())
        if list(map(type, ones)) != list(map(type, others)) or any(
            "forward" in vars(one) for one in ones
        ):
            return False
        return [name for _, name in _tensors_in(module)] == [
            n for _, n in _tensors_in(built)
        ] and all(
            getattr(one, "cfg", module.cfg) is module.cfg and _settings(one) == _settings(other)
            for one, other in zip(_components(module), _components(built))
        )
    except Exception:  # noqa: BLE001  # the constructor's, of a config that was changed since
        return False


def _settings(module: nn.Module) -> dict[str, Any]:
    """What is set in a module, but for None, and what torch and this package set."""
    return {
        name: (type(value), value)
        for name, value in vars(module).items()
        if value is not None and name not in _NOT_SETTINGS and not name.startswith(_OURS)
    } | {"compiled": module._compiled_call_impl}


_SEEN = "_tl_devicefix_seen"


def _is_looked_into() -> bool:
    """Whether there is something around that sees, or changes, each operation."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return (
        bool(_has_any_global_hook())
        or _len_torch_dispatch_stack() > 0
        or not all(isinstance(mode, OutsideBlocks) for mode in modes)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )


def run_by_command(
    far: FarDevices, module: Any, inputs: dict[str, Any], entry: Any = None
) -> torch.Tensor | None:
    """What a block, or one of its components, gives, run by one command."""
    residual = next(iter(inputs.values()))
    if type(residual) is not SimTensor or "forward" in vars(module) or _is_looked_into():
        return None
    cls = type(module)
    if cls.__name__ not in _ARGUMENTS or not cls.__module__.startswith(_COMPONENTS):
        return None
    seen: _Seen | None = vars(module).get(_SEEN)
    if seen is None or not seen.holds(module):
        seen = _Seen(module)
    device, dtype = residual.device, residual.dtype
    tensors = None if seen.recipe is None or seen.is_heard() else seen.tensors(device)
    # Of another dtype, or lying otherwise, it would give another one.
    if tensors is None or dtype != module.cfg.dtype or not residual.is_contiguous():
        return None
    others = [argument for argument in inputs.values() if isinstance(argument, torch.Tensor)]
    if entry is not None:
        others += [entry.past_keys, entry.past_values]
    if not all(type(tensor) is SimTensor and tensor.device == device for tensor in others):
        return None
    call = _Call(far, device, seen, tensors, inputs)
    far.wait_for_room(call.rank)
    if torch.is_grad_enabled():
        named: dict[Key, Any] = dict(enumerate(tensors))
        named.update(inputs)
        keys = tuple(
            k for k, tensor in named.items() if tensor is not None and tensor.requires_grad
        )
        if keys:
            is_seen = entry is not None or torch.is_anomaly_enabled() or _saves_by_hooks()
            return None if is_seen else _Whole.apply(call, keys, *(named[key] for key in keys))  # type: ignore[no-any-return]
    outputs, past = [_output(residual)], None
    if entry is not None:
        if not type(entry).__module__.startswith("transformer_lens."):
            return None
        past = type(entry), entry.past_keys._cpu, entry.past_values._cpu, entry.frozen
        if not entry.frozen:
            for batch, length, *heads in (tensor.shape for tensor in past[1:3]):
                outputs.append(_contiguous((batch, length + residual.shape[1], *heads), dtype))
    output, *cached = call.run(past, outputs)
    if cached:
        entry.past_keys, entry.past_values = cached
    return output


def _saves_by_hooks() -> bool:
    """Within `torch.autograd.graph.saved_tensors_hooks`, which see what operations save."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _output(residual: torch.Tensor) -> Geometry:
    """Of what a block gives: the shape of the residual stream."""
    batch, pos, *_, d_model = residual.shape
    return _contiguous((batch, pos, d_model), residual.dtype)


def _contiguous(shape: Any, dtype: torch.dtype) -> Geometry:
    return Geometry(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)


class _Call:
    """A call of a module by one command, with or without a graph."""

    def __init__(
        self,
        far: FarDevices,
        device: torch.device,
        seen: _Seen,
        tensors: list[SimTensor],
        inputs: dict[str, Any],
    ) -> None:
        self.far, self._device, self.seen = far, device, seen
        self.tensors, self.inputs = tensors, inputs
        self._machine = next(iter(inputs.values()))._allocation.machine
        self.rank = far.places[device.index].rank
        key = device.index, seen.pickled_recipe
        self._runner = far.built.get(key) or far.built.setdefault(key, self._build())

    def _build(self) -> Built | Owner:
        if not self.rank:
            assert self.seen.recipe is not None
            return Built(self.seen.recipe, self.far.places[self._device.index].device)
        owner = self.far.owner(self.rank)
        number = self.far.places[self._device.index].number
        self.far.tell(self.rank, commands.Hold(owner.number, self.seen.pickled_recipe, number))
        return owner

    def _behind(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The module's tensors, and its arguments, as they are behind those of the machine."""
        named = self.inputs.items()
        inputs = {name: value._cpu if type(value) is SimTensor else value for name, value in named}
        return [tensor._cpu for tensor in self.tensors], inputs

    def wrapped(self, made: torch.Tensor) -> SimTensor:
        """What was computed there, on its device."""
        return wrap(made, self._machine, self._device)

    def run(self, entry: Any, outputs: list[Geometry]) -> list[SimTensor]:
        """What it gives without a graph, and what an entry of a KV cache has then."""
        if isinstance(self._runner, Built):
            with torch.no_grad():
                made = self._runner.run(*self._behind(), entry)
        else:
            if entry is not None:
                cls, keys, values, is_frozen = entry
                entry = cls, self.far.stored(keys), self.far.stored(values), is_frozen
            made = [self.far.promise(geometry, self.rank) for geometry in outputs]
            arguments, gives = self._command_arguments(), self.far.promised(made)
            self.far.tell(self.rank, commands.Call(self._runner.number, *arguments, entry, gives))
        return list(map(self.wrapped, made))

    def _command_arguments(self) -> tuple[tuple[commands.Stored, ...], dict[str, Any]]:
        """The module's tensors and arguments, as a command names them."""
        tensors, inputs = self._behind()
        return tuple(map(self.far.stored, tensors)), self.far.command_arguments([], inputs)[1]

    def record(self, keys: tuple[Key, ...], leaves: Any) -> tuple[SimTensor, Graph | _FarGraph]:
        """What it gives, and its graph, for gradients to what is wanted, by keys."""
        if isinstance(self._runner, Built):
            graph = Graph(self._runner, *self._behind(), keys)
            return self.wrapped(graph.output), graph
        output = self.far.promise(_output(next(iter(self.inputs.values()))), self.rank)
        far_graph = _FarGraph(self.far, self.rank, leaves)
        numbers, gives = (far_graph.number, self._runner.number), self.far.promised([output])
        self.far.tell(self.rank, commands.Record(*numbers, *self._command_arguments(), keys, gives))
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
        """Gradients of some of the tensors that ask for them, which the rank is told to make."""
        gives = [self._far.promise(self._like[index], self._rank) for index in which]
        of, made = self._far.stored(gradient), self._far.promised(gives)
        self._far.tell(self._rank, commands.Backward(self.number, of, which, keeps, made))
        if not keeps:
            self._owner = None
        return gives


class _Whole(torch.autograd.Function):
    """A module's forward and backward, each one command."""

    @staticmethod
    def forward(ctx: Any, call: _Call, keys: tuple[Key, ...], *leaves: Any) -> Any:  # type: ignore[override]
        output, ctx.graph = call.record(keys, leaves)
        # Also frozen weights; but a bias may be changed before the backward, as nothing reads it.
        weights = [
            tensor
            for tensor, name in zip(call.tensors, call.seen.names)
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
                "gradients of gradients do not go through blocks that are run by one command: join "
                "by init_hosts(whole_blocks=False)"
            )
        which = tuple(index for index, need in enumerate(ctx.needs_input_grad[2:]) if need)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        made = ctx.graph.backward(gradient._cpu, which, keeps)
        gradients = dict(zip(which, map(ctx.wrapped, made)))
        return None, None, *(gradients.get(index) for index in range(len(ctx.needs_input_grad) - 2))
