"""What another host does: it holds a model's blocks on its devices, and runs them when asked.

A plain class: `init_hosts` makes an actor of it, tests call it in a thread. It knows nothing of the
user's hooks. At each hook point on which somebody listens (a tap), a run stops, and goes on with
what comes from home:

    home                                   worker
    ----                                   ------
    begin(call, x, taps=["hook_z"])  --->  block 7 runs, up to hook_z
    hook(z)                          <---  "hook_z", z
    proceed(call, hook(z))           --->  block 7 runs on with that, and block 8
    the next block                   <---  "", output

With gradients, it keeps the graph of each of these parts, and `backward` runs one of them.
"""

from __future__ import annotations

import copy
import gc
import importlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
import transformer_lens
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only
from transformer_lens.hook_points import LensHandle
from transformers import cache_utils

from tl_devicefix.dispatch.views import restore, view_of
from tl_devicefix.fusing.fused import is_fused, set_fused
from tl_devicefix.fusing.one_forward import FACTS, kept_in_forward, one_forward
from tl_devicefix.monkeypatch.patch import package_of
from tl_devicefix.multihost.checkpoint_files import Files, differences
from tl_devicefix.placement.devices import elsewhere, free_memory

Reply = dict[str, Any]
"""Of a run that has stopped: at which tap of which of its blocks, the activation there, or which of
those that were there before, and what is kept of others and of KV caches."""

HAS_MLP_IN = "_use_hook_mlp_in"
"""A flag that a Bridge's block has itself."""

_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
]


def settings() -> list[Any]:
    """Those of torch that change what blocks give."""
    return [get() for get, _ in _SETTINGS]


def configs_of(block: Any) -> dict[str, Any]:
    """The configs of libraries in a block, each by the path of a module that has it."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in block.named_modules():
        config = vars(module).get("cfg") or vars(module).get("config")
        if config is not None and package_of(type(config)) in ("transformer_lens", "transformers"):
            found.setdefault(id(config), (path, config))
    return dict(found.values())


def config_at(block: Any, path: str) -> Any:
    """The config of a module in a block."""
    has = vars(block.get_submodule(path))
    return has.get("cfg") or has["config"]


class Worker:
    """Holds and runs blocks. All that it keeps has a number, which comes from home.

    Args:
        devices: of this host, as torch calls them here.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._kept: dict[int, Any] = {}

    def forget(self, numbers: Sequence[int]) -> None:
        """Let go of what has these numbers; a run that waits ends."""
        for number in numbers:
            item = self._kept.pop(number, None)
            if isinstance(item, _Run):
                item.end()
            elif isinstance(item, _Model):
                del item
                gc.collect()

    def free_memory(self, device: int, forget: Sequence[int] = ()) -> int:
        """Bytes that are free on a device, by its index among the host's; `forget`s before."""
        self.forget(forget)
        named = torch.device(self.devices[device])
        free = free_memory(named)
        return int(psutil.virtual_memory().available) if free is None else free

    def differences(self, files: Files, name: str, hub: dict[str, Any]) -> list[str]:
        """What is wrong with this host's files of a checkpoint, compared with home's."""
        return differences(files, name, hub)

    def load(
        self,
        number: int,
        load: str,
        name: str,
        arguments: dict[str, Any],
        device_map: dict[str, int | None],
        forget: Sequence[int],
    ) -> None:
        """Load those components of a model that this host has, from its own files.

        Args:
            number: the model's, from now on.
            load: a class of TransformerLens and its method: "HookedTransformer.from_pretrained".
            name: of the checkpoint.
            arguments: of that method.
            device_map: the device of each component, by its index; None if it is elsewhere.
            forget: as `forget`, before.
        """
        self.forget(forget)
        places = {
            component: elsewhere(0) if index is None else torch.device(self.devices[index])
            for component, index in device_map.items()
        }
        cls, _, method = load.partition(".")
        of = "transformer_lens" if cls == "HookedTransformer" else "transformer_lens.model_bridge"
        model = getattr(getattr(importlib.import_module(of), cls), method)(
            name, device_map=places, **arguments
        )
        self._kept[number] = _Model(model)

    def apply(self, model: int, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a method of a model, which changes its weights; returns shapes and dtypes of all."""
        module = self._kept[model].module
        getattr(module, method)(**arguments)
        self._kept[model] = _Model(module)  # views are of what was before
        named = module.blocks.named_parameters(prefix="blocks", remove_duplicate=False)
        own = {name: weight for name, weight in named if not weight.is_meta}
        return {name: (tuple(weight.shape), weight.dtype) for name, weight in own.items()}

    def weight(self, model: int, name: str) -> torch.Tensor:
        """A weight or buffer, by its name in the model."""
        path, _, name = name.rpartition(".")
        return _sent(getattr(self._kept[model].module.get_submodule(path), name))

    def kept(self, number: int, name: str) -> torch.Tensor:
        """An activation that is kept, or a tensor of a block's part of a KV cache."""
        item = self._kept[number]
        return _sent(getattr(item, name) if name else item)

    def begin(self, call: int, model: int, request: dict[str, Any]) -> Reply:
        """Begin a run of some blocks, one after the other; see `_Run`."""
        self.forget(request["forget"])
        for (get, put), value in zip(_SETTINGS, request["settings"]):
            if get() != value:
                put(value)
        run = self._kept[call] = _Run(self._kept[model], self._kept, request)
        return run.begin()

    def proceed(
        self, call: int, activation: torch.Tensor | None, has_gradient: bool, in_place: bool
    ) -> Reply:
        """Go on with a run that has stopped at a tap.

        Args:
            call: the run's number.
            activation: what is to be there; None if what was there is unchanged.
            has_gradient: whether the gradient of that is asked for.
            in_place: whether what was there was changed: whoever has it there sees that.
        """
        return self._kept[call].proceed(activation, has_gradient, in_place)  # type: ignore[no-any-return]

    def backward(
        self, call: int, part: int, gradient: torch.Tensor | None, task: int
    ) -> list[torch.Tensor | None]:
        """The gradients of what a part of a run was given; the last part comes first."""
        return self._kept[call].backward(part, gradient, task)  # type: ignore[no-any-return]


class _Model:
    """A model of which some blocks are here; and views of blocks, for runs that have hooks."""

    def __init__(self, module: Any) -> None:
        self.module, self.blocks = module, module.blocks
        # Of all blocks at once, as they may have one config together.
        self._as_loaded = [
            {path: dict(vars(cfg)) for path, cfg in configs_of(block).items()}
            for block in module.blocks
        ]
        self._views: dict[int, list[Any]] = {}

    def configure(self, layer: int, changes: dict[str, dict[str, Any]]) -> None:
        """Have a block's configs differ in this from what they were after loading."""
        for path, as_loaded in self._as_loaded[layer].items():
            config = config_at(self.blocks[layer], path)
            vars(config).update({**as_loaded, **changes.get(path, {})})

    def borrow(self, layer: int) -> Any:
        """A view of a block: runs that are under way together do not see each other's hooks."""
        views = self._views.setdefault(layer, [])
        try:
            return views.pop()
        except IndexError:
            return view_of(self.module.blocks[layer])

    def give_back(self, layer: int, view: Any) -> None:
        """Have a view for the next run."""
        restore(view)
        self._views[layer].append(view)


class _Ended(BaseException):
    """Ends a run that nobody at home waits for any more."""


class _Run:
    """A run of some blocks. If there are taps, a thread runs them, and waits at each."""

    def __init__(self, model: _Model, kept: dict[int, Any], request: dict[str, Any]) -> None:
        self._model, self._kept, self._request = model, kept, request
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._looked: list[Any] = []
        self._grown: list[Any] = []
        # Of each part, what it was given of which gradients are asked, and where what it gave is.
        self._leaves: list[list[torch.Tensor]] = []
        self._edges: list[Any] = []
        self._devices: list[torch.device] = []
        self._both: list[torch.Tensor] = []
        self._task = -1
        self._gradients: dict[int, torch.Tensor] = {}

    def begin(self) -> Reply:
        """Run up to the first tap, or the end."""
        given = tree_leaves(
            [self._request["x"], [step["arguments"] for step in self._request["steps"]]]
        )
        self._leaves.append([given[index].requires_grad_() for index in self._request["leaves"]])
        if any(step["taps"] for step in self._request["steps"]):
            threading.Thread(target=self._run_in_thread, daemon=True).start()
            return self._reply()
        return self._run()

    def proceed(self, activation: torch.Tensor | None, has_gradient: bool, in_place: bool) -> Reply:
        """Run up to the next tap, or the end."""
        if activation is not None:
            activation.requires_grad_(has_gradient)
        self._leaves.append([activation] if activation is not None and has_gradient else [])
        self._arrivals.put((activation, in_place))
        return self._reply()

    def end(self) -> None:
        """End it, if it waits."""
        self._arrivals.put((_Ended, False))

    def _reply(self) -> Reply:
        reply = self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply  # type: ignore[no-any-return]

    def _run_in_thread(self) -> None:
        try:
            self._replies.put(self._run())
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001  # is raised where the run is waited for
            self._replies.put(error)

    def _run(self) -> Reply:
        request = self._request
        x = request["x"]
        with torch.set_grad_enabled(request["graph"]), one_forward():
            kept_in_forward()[FACTS] = request["facts"]
            for number, step in enumerate(request["steps"]):
                output = self._run_block(number, step, x)
                x = output[0] if isinstance(output, tuple) else output
        return self._stopped(number, "", x, output)

    def _run_block(self, number: int, step: dict[str, Any], x: Any) -> Any:
        layer, block = step["layer"], self._model.blocks[step["layer"]]
        device = self._model.module.placement.device_of(f"blocks.{layer}")
        x, (args, kwargs) = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device), (x, step["arguments"])
        )
        self._both = self._both or [x]
        entry = None if step["entry"] is None else self._entry(step["entry"], device)
        if entry is not None:
            args, kwargs = tree_map_only(
                str,
                lambda text: as_argument(text, entry, layer) if text in (CACHE, ENTRY) else text,
                (args, kwargs),
            )
            before = state_of(entry)[2]
        has_hooks = bool(step["taps"] or step["looks"])
        if has_hooks:
            block = self._model.borrow(layer)
        try:
            self._model.configure(layer, step["config"])
            if is_fused(block) is not step["fused"]:
                set_fused(block, step["fused"])
            if step["has_mlp_in"] is not None:
                setattr(block, HAS_MLP_IN, step["has_mlp_in"])
            for name in (*step["taps"], *step["looks"]):
                point = block.get_submodule(name)
                handle = LensHandle(point.register_forward_hook(self._hook(number, step, name)))
                # TransformerLens asks of which kind hooks are.
                point.fwd_hooks += [handle] * (name in step["looks"] or "fwd" in step["taps"][name])
                point.bwd_hooks += [handle] * ("bwd" in step["taps"].get(name, ()))
            output = block(x, *args, **kwargs)
        finally:
            if has_hooks:
                self._model.give_back(layer, block)
        if entry is not None:
            self._keep(number, step["entry"]["new"], entry, before)
        return output

    def _entry(self, sent: dict[str, Any], device: torch.device) -> Any:
        """A block's part of a KV cache; that of before is left as it is."""
        if not isinstance(sent["tensors"], int):
            return made_of(sent["class"], sent["plain"], sent["tensors"], device)
        entry = copy.copy(self._kept[sent["tensors"]])
        vars(entry).update(sent["plain"])
        return entry

    def _keep(self, number: int, key: int, entry: Any, before: dict[str, torch.Tensor]) -> None:
        """Keep a block's part of a KV cache, if it has grown."""
        _, settings, tensors = state_of(entry)
        if all(before.get(name) is tensor for name, tensor in tensors.items()):
            return
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                setattr(entry, name, tensor.detach())
        self._kept[key] = entry
        geometry = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self._grown.append((number, settings, geometry))

    def _hook(self, number: int, step: dict[str, Any], name: str) -> Callable[..., Any]:
        """A hook of torch's on a hook point, below conversions, which are home's."""

        def look(module: Any, args: Any, activation: torch.Tensor) -> None:
            key = step["looks"][name]
            self._kept[key] = activation.detach()
            self._looked.append((number, name, tuple(activation.shape), activation.dtype))

        def tap(module: Any, args: Any, activation: torch.Tensor) -> torch.Tensor:
            same_as = next((n for n, one in enumerate(self._both) if one is activation), None)
            self._replies.put(self._stopped(number, name, activation, None, same_as))
            given, in_place = self._arrivals.get()
            if given is _Ended:
                raise _Ended
            if in_place and not (activation.is_leaf and activation.requires_grad):
                activation.copy_(given)
            elif given is not None:
                activation = given.to(activation.device, copy=self._request["graph"])
                self._both.append(activation)
                return activation
            elif same_as is None and activation.requires_grad:
                activation = _cut(activation)
                self._leaves[-1].append(activation)
            if same_as is None:
                self._both.append(activation)
            return activation

        return tap if name in step["taps"] else look

    def _stopped(
        self,
        number: int,
        name: str,
        activation: torch.Tensor,
        output: Any = None,
        same_as: int | None = None,
    ) -> Reply:
        has_graph = activation.requires_grad and same_as is None
        # Where the graph is, as hooks may change the tensor.
        self._edges.append(get_gradient_edge(activation) if has_graph else None)
        self._devices.append(activation.device)
        reply = {
            "step": number,
            "tap": name,
            "value": None
            if same_as is not None
            else _sent(activation if output is None else output),
            "same_as": same_as,
            "has_graph": has_graph,
            "looked": self._looked,
            "grown": self._grown,
        }
        self._looked, self._grown = [], []
        return reply

    def backward(
        self, part: int, gradient: torch.Tensor | None, task: int
    ) -> list[torch.Tensor | None]:
        """Gradients of the leaves of a part; those of earlier parts' wait for these."""
        if task != self._task:  # of another backward
            self._task, self._gradients = task, {}
        edge = self._edges[part]
        leaves = [leaf for of_part in self._leaves[: part + 1] for leaf in of_part]
        if gradient is not None and edge is not None:
            device = self._devices[part]
            made = torch.autograd.grad(
                edge, leaves, gradient.to(device), retain_graph=True, allow_unused=True
            )
            for leaf, new in zip(leaves, made):
                if new is not None:
                    before = self._gradients.get(id(leaf))
                    self._gradients[id(leaf)] = new if before is None else before + new
        return [self._gradients.pop(id(leaf), None) for leaf in self._leaves[part]]


def _cut(activation: torch.Tensor) -> torch.Tensor:
    """Have an activation be a leaf of the graph that follows: itself, unless it is a view.

    Somebody may ask whether it is still the same, as a Bridge's norms do.
    """
    if activation._is_view():
        return activation.detach().requires_grad_()
    return activation.detach_().requires_grad_()


def _sent(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu"), value)


# --------------------------------------------------------------------------------------------
# A block's part of a KV cache, as it is sent: class, settings and tensors. The worker keeps the
# part, and at home its tensors are `RemoteTensor`s of a number. Each run that appends gets a new
# number: whoever has kept the tensors of before has them still.

ENTRY, CACHE = "\0entry", "\0cache"
"""What stands in the place of an entry of TransformerLens's, or of transformers' cache."""
_PLAIN = (bool, int, float, str)


def layer_of_cache(cache: Any, index: int) -> Any:
    """A layer's part of a cache of transformers'; None if it is none that grows by itself."""
    if type(cache) is not cache_utils.DynamicCache or index > len(cache.layers):
        return None
    if index == len(cache.layers):
        if not cache.layer_class_to_replicate:
            return None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    kinds = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer
    return layer if type(layer) in kinds else None


def state_of(entry: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    """Its class, and what it has: settings, and tensors."""
    has = vars(entry)
    settings = {name: value for name, value in has.items() if isinstance(value, _PLAIN)}
    tensors = {name: value for name, value in has.items() if isinstance(value, torch.Tensor)}
    return type(entry).__name__, settings, tensors


def made_of(
    kind: str, settings: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device
) -> Any:
    """The entry that has this."""
    cls = getattr(transformer_lens, kind, None) or getattr(cache_utils, kind)
    entry = object.__new__(cls)
    vars(entry).update({"keys": None, "values": None} if "is_initialized" in settings else {})
    vars(entry).update(settings)
    for name, tensor in tensors.items():
        setattr(entry, name, tensor.to(device))
        if "is_initialized" in settings:
            entry.dtype, entry.device = tensor.dtype, device
    return entry


def as_argument(mark: str, entry: Any, index: int) -> Any:
    """What a block takes for it: the entry, or a cache that has this layer's part alone."""
    if mark == ENTRY:
        return entry
    cache = cache_utils.DynamicCache()
    cache.layers = [None] * index + [entry]  # type: ignore[list-item]
    return cache
