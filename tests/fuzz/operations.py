"""What a case is made of: runs of a tiny model, and changes that users make between and within.

An operation is a function of a trial and of a few arguments. The type of an argument says what it
may be: a `Literal`, or a name of `pools.py`. `("hook", "blocks.0.hook_resid_pre", "scale", "fwd")`
in a list of operations calls `hook(trial, "blocks.0.hook_resid_pre", "scale", "fwd")`.

A change that a hook makes acts from the next block on. So `within` changes other blocks, or all of
them from between two blocks. Code that users exchange is left out: it acts once they fuse again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

import pools
import torch
import transformer_lens
from packaging.version import Version
from pools import IS_BRIDGE
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

Grad = Literal["grad", "no_grad", "inference"]
N = Literal[1, 2, 5, 9]
Pads = Literal["", "right", "left"]
Effect = Literal["read", "scale", "edit in place", "zero", "copy", "upcast", "raise"]


class Trial:
    """A model, what was seen of it so far, and how to undo what holds for the whole process."""

    def __init__(self, model: Any, other: Callable[[], Any]) -> None:
        self.model = model
        self.other = other  # makes another model of the same shapes
        self.seen: list[tuple[str, Any]] = []
        self.messages: list[str] = []
        self.undo = contextlib.ExitStack()
        self.handles: list[Any] = []
        self.leaves_out = False  # the first example, whose first row sees no token
        self.generator = torch.Generator().manual_seed(1)

    def at(self, path: str) -> Any:
        """A submodule, or an attribute, by its path."""
        return operator.attrgetter(path)(self.model)

    def put(self, path: str, value: Any) -> None:
        """Put something in the place of a submodule or an attribute."""
        owner, _, name = path.rpartition(".")
        setattr(self.at(owner) if owner else self.model, name, value)

    def note(self, label: str, value: Any) -> None:
        """Note a value; of a container, each part."""
        if isinstance(value, torch.Tensor):
            value = value[-1:] if self.leaves_out and value.dim() else value
            self.seen.append((label, value.detach().cpu().clone()))
        elif isinstance(value, (tuple, list)):
            for i, part in enumerate(value):
                self.note(f"{label}[{i}]", part)
        elif value is not None:
            self.seen.append(
                (label, value if isinstance(value, (int, str)) else type(value).__name__)
            )

    def do(self, operation: tuple[Any, ...]) -> None:
        """Do an operation, and note the type of its error if it raises one."""
        name, *arguments = operation
        torch.manual_seed(0)  # of dropout
        n_seen = len(self.seen)
        try:
            OPERATIONS[name](self, *arguments)
        except RecursionError:  # how deep it got depends on the calls around it
            del self.seen[n_seen:]
        except Exception as error:  # noqa: BLE001 - whatever it is, the installed one has to raise it
            # Which of these a module gives that is not there, or of another kind, does not matter.
            is_lookup = isinstance(error, (KeyError, AttributeError, TypeError))
            error_name = "LookupError" if is_lookup else type(error).__name__
            self.seen.append((f"{name} raises {error_name}", None))
            self.model.zero_grad()
            self.messages.append(f"{operation}: {type(error).__name__}: {error}")

    def randn_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=self.generator).to(x)


OPERATIONS: dict[str, Callable[..., None]] = {}
RUNS: list[Any] = []
CHANGES: list[Any] = []


def run(function: Any) -> Any:
    """List an operation among those that run the model."""
    RUNS.append(function)
    return OPERATIONS.setdefault(function.__name__, function)


def change(function: Any) -> Any:
    """List an operation among those that change something, by hand or in a hook."""
    CHANGES.append(function)
    return OPERATIONS.setdefault(function.__name__, function)


# Runs.


def tokens(n: int) -> torch.Tensor:
    return torch.randint(3, 40, (2, n), generator=torch.Generator().manual_seed(n))


def grad_mode(grad: str) -> Any:
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    return modes.get(grad, torch.inference_mode)()


def finish(trial: Trial, grad: str, logits: Any) -> None:
    """Note logits, and with gradients those of every weight."""
    if trial.leaves_out:
        trial.leaves_out, logits = False, logits.flatten(0, 1)[1:]
    trial.note("logits", logits)
    if grad == "grad":
        logits.float().pow(2).sum().backward()
        for name, parameter in trial.model.named_parameters():
            trial.note(f"grad {name}", parameter.grad)
        trial.model.zero_grad()


def mask_of(n: int, pads: str) -> torch.Tensor:
    """The mask of two prompts of some tokens, of which the first is padded."""
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, {"left": slice(1), "right": slice(-1, None)}.get(pads, slice(0))] = 0
    return mask


@run
def forward(
    trial: Trial,
    n: N,
    grad: Grad,
    pads: Pads,
    stop_at_layer: Literal[None, 1, -1],
) -> None:
    options: dict[str, Any] = {}
    if pads and n > 1:
        options["attention_mask"] = mask_of(n, pads)
    if stop_at_layer is not None:
        options["stop_at_layer"] = stop_at_layer
    with grad_mode(grad):
        finish(trial, grad, trial.model(tokens(n), **options))


@run
def run_with_cache(
    trial: Trial,
    n: N,
    grad: Grad,
    names: Literal["all", "resid", "attn.hook", "mlp"],
    incl_bwd: Literal[False, True],
) -> None:
    names_filter = None if names == "all" else lambda name: names in name
    with grad_mode("grad" if incl_bwd else grad):
        _, cache = trial.model.run_with_cache(
            tokens(n),
            names_filter=names_filter,
            **({"incl_bwd": True, "return_type": "loss"} if incl_bwd else {}),
        )
    for name in cache.keys():  # noqa: SIM118 - a cache's iterator differs
        trial.note(f"cache {name}", cache[name])


@run
def run_with_hooks(
    trial: Trial,
    n: N,
    grad: Grad,
    point: pools.Point,
    effect: Effect,
    backward: Literal[False, True],
) -> None:
    hooks = [(point, functools.partial(act, trial, effect))]
    with grad_mode(grad), trial.model.hooks(**{"bwd_hooks" if backward else "fwd_hooks": hooks}):
        finish(trial, grad, trial.model(tokens(n)))


# A Bridge alone loses its KV cache there: transformers gives it by another name.
LOSES_CACHE = IS_BRIDGE and Version(version("transformers")) >= Version("5.24")


@run
def generate(
    trial: Trial, n: N, use_past_kv_cache: Literal[True, False], do_sample: Literal[False, True]
) -> None:
    torch.manual_seed(0)
    made = trial.model.generate(
        tokens(n),
        max_new_tokens=3,
        use_past_kv_cache=use_past_kv_cache and not LOSES_CACHE,
        do_sample=do_sample,
        stop_at_eos=False,
        prepend_bos=False,
        verbose=False,
        return_type="tokens",
    )
    trial.note("generated", made)


# Hooks.


def act(trial: Trial, effect: str, x: Any, hook: Any = None) -> Any:
    """What a hook does with what it is given."""
    trial.note(f"hook {getattr(hook, 'name', hook)}", x)
    if effect == "read" or not isinstance(x, torch.Tensor):
        return None
    if effect == "raise":
        raise ZeroDivisionError("a hook that fails")
    if effect == "edit in place":
        x[:, 0] *= 0.5
        return None
    made = {"scale": lambda: x * 1.25, "zero": lambda: torch.zeros_like(x), "copy": x.clone}
    return made.get(effect, x.double)()


@change
def hook(
    trial: Trial,
    point: pools.Point,
    effect: Effect,
    direction: Literal["fwd", "bwd"],
    how: Literal["name", "filter", "permanent", "on the point", "prepended"],
) -> None:
    function = functools.partial(act, trial, effect)
    if how == "name":
        trial.model.add_hook(point, function, direction)
    elif how == "filter":
        suffix = point.rpartition(".")[2]
        trial.model.add_hook(lambda name: name.endswith(suffix), function, direction)
    elif how == "permanent":
        trial.model.add_perma_hook(point, function, direction)
    else:
        trial.model.hook_dict[point].add_hook(function, direction, False, None, how == "prepended")


@change
def torch_hook(
    trial: Trial,
    module: pools.Module,
    kind: Literal[
        "forward",
        "forward with_kwargs",
        "forward always_call",
        "forward prepend",
        "forward_pre",
        "forward_pre with_kwargs",
        "full_backward",
        "full_backward_pre",
    ],
    effect: Literal["read", "scale"],
) -> None:
    register, _, flag = kind.partition(" ")

    def hook(_: Any, *given: Any) -> Any:
        value = given[1] if register == "forward_pre" and flag and not given[0] else given[0]
        noted = tuple(value.values()) if type(value) is dict else value
        if register == "forward":
            value, noted = given[-1], given  # a hook of a point gets its input as it came
        trial.note(f"torch's {kind} {module}", noted)
        if effect == "read" or register == "full_backward_pre":
            return None
        if flag == "with_kwargs" and register == "forward_pre":
            return scaled(given[0]), given[1]
        return scaled(value)

    options = {flag: True} if flag else {}
    register_hook = getattr(trial.at(module), f"register_{register}_hook")
    trial.handles.append(register_hook(hook, **options))


def scaled(x: Any) -> Any:
    """A tensor, or each tensor of a tuple, times 1.25."""
    if isinstance(x, torch.Tensor):
        return x * 1.25 if x.is_floating_point() else x
    return tuple(map(scaled, x)) if type(x) is tuple else x


@change
def global_hook(trial: Trial, kind: Literal["forward", "forward_pre", "full_backward"]) -> None:
    def hook(module: Any, *given: Any) -> None:
        trial.note(f"global {kind} {type(module).__name__}", given[-1])

    handle = getattr(torch_module, f"register_module_{kind}_hook")(hook)
    trial.handles.append(handle)
    trial.undo.callback(handle.remove)


@change
def remove_hooks(trial: Trial, which: Literal["reset", "permanent", "handles"]) -> None:
    if which == "handles":
        while trial.handles:
            trial.handles.pop().remove()
    else:
        trial.model.reset_hooks(including_permanent=which == "permanent")


@change
def replace_hook_dicts(
    trial: Trial,
    module: pools.Module,
    which: Literal["_forward_hooks", "_forward_pre_hooks", "_backward_hooks"],
    how: Literal["of all", "of one", "clear"],
) -> None:
    """The idiom by which people remove all hooks."""
    for of in trial.model.modules() if how != "of one" else [trial.at(module)]:
        if how == "clear":
            getattr(of, which).clear()
        else:
            setattr(of, which, OrderedDict())


# Configs and attributes.


@change
def set_config(trial: Trial, setting: pools.Setting) -> None:
    """Of the config that all components share."""
    setattr(trial.model.cfg, *setting)


@change
def set_attribute(trial: Trial, block: pools.Block, attribute: pools.Attribute) -> None:
    path, value = attribute
    trial.at(f"{block}.{path}")  # which has to be there
    trial.put(f"{block}.{path}", nn.Tanh() if value == "tanh" else value)


@change
def set_mode(trial: Trial, mode: Literal["train", "eval", "frozen", "float64", "bfloat16"]) -> None:
    if mode == "frozen":
        trial.model.requires_grad_(False)
    elif mode in ("train", "eval"):
        trial.model.train(mode == "train")
    else:
        trial.model.to(getattr(torch, mode))


@change
def weight(
    trial: Trial,
    block: pools.Block,
    name: pools.Weight,
    how: Literal["in place", "data", "new", "half", "frozen", "tensor", "parametrized", "deleted"],
) -> None:
    path, _, name = f"{block}.{name}".rpartition(".")  # type: ignore[assignment]
    module = trial.at(path)
    old = getattr(module, name)
    new = trial.randn_like(old) * 0.3
    do: dict[str, Callable[[], Any]] = {
        "in place": lambda: torch.no_grad()(old.mul_)(0.5),
        "data": lambda: setattr(old, "data", new),
        "new": lambda: setattr(module, name, nn.Parameter(new)),
        "half": lambda: setattr(old, "data", old.data.bfloat16()),
        "frozen": lambda: old.requires_grad_(False),
        "parametrized": lambda: parametrize.register_parametrization(module, name, nn.Tanh()),
    }
    if how in do:
        do[how]()
        return
    delattr(module, name)
    if how == "tensor":
        setattr(module, name, new)


# Of a HookedTransformer only.


def kv_cache(trial: Trial, n: N, more: Literal[1, 3], grad: Grad, pads: Pads) -> None:
    """Three forwards with a KV cache, of a HookedTransformer."""
    name = next(name for name in dir(transformer_lens) if name.endswith("KeyValueCache"))
    cache = getattr(transformer_lens, name).init_cache(trial.model.cfg, trial.model.cfg.device, 2)
    logits: list[torch.Tensor] = []
    with grad_mode(grad):
        for length in (n, more, 1):
            mask = mask_of(length, pads if length == n > 1 and not logits else "")
            options = {"past_kv_cache": cache, "attention_mask": mask}
            logits.append(trial.model(tokens(length), **options))
        for entry in cache.entries:
            trial.note("past", (entry.past_keys, entry.past_values))
        finish(trial, grad, torch.cat(logits, 1))


def own_config(
    trial: Trial, block: pools.Block, component: pools.Component, setting: pools.Setting
) -> None:
    module = trial.at(block + component)
    module.cfg = copy.copy(module.cfg)
    setattr(module.cfg, *setting)


def buffer(
    trial: Trial,
    block: pools.Block,
    name: Literal["rotary_sin", "rotary_cos", "IGNORE", "mask"],
    how: Literal["in place", "replaced", "data"],
) -> None:
    attn = trial.at(f"{block}.attn")
    old = getattr(attn, name)
    new = {"mask": torch.ones_like(old), "IGNORE": torch.full_like(old, -2.0)}.get(name, old * 0.5)
    if how == "in place":
        old.copy_(new)
    elif how == "data":
        old.data = new
    else:
        setattr(attn, name, new)


if not IS_BRIDGE:
    run(kv_cache)
    change(own_config)
    change(buffer)


# Modules.


class Doubling(nn.Module):
    """Stands in the place of a module."""

    def forward(self, x: Any = None, **kwargs: Any) -> Any:
        return (next(iter(kwargs.values())) if x is None else x) * 2


@change
def exchange(
    trial: Trial,
    module: pools.Module,
    by: Literal["copy", "Doubling", "Identity", "Sequential", "another model's"],
) -> None:
    make: dict[str, Callable[[], Any]] = {
        "copy": lambda: copy.deepcopy(trial.at(module)),
        "Doubling": Doubling,
        "Identity": nn.Identity,
        "Sequential": lambda: nn.Sequential(trial.at(module), Doubling()),
        "another model's": lambda: operator.attrgetter(module)(trial.other()),
    }
    trial.put(module, make[by]())


@change
def graft(trial: Trial, block: pools.Block, of: pools.Block) -> None:
    """A block of another model in the place of one."""
    trial.put(block, operator.attrgetter(of)(trial.other()))


# Within a forward.


def within(trial: Trial, point: str, operation: tuple[Any, ...]) -> None:
    """A change that a hook makes, once: of a hook point, or one of torch's of a module."""
    todo = [operation]

    def hook(x: Any, hook: Any) -> None:
        if todo:
            # As inference tensors, new weights could have no gradients later.
            with torch.inference_mode(False):
                trial.do(todo.pop())

    if point in trial.model.hook_dict:
        trial.model.add_hook(point, hook)
    else:
        trial.at(point).register_forward_pre_hook(hook)


OPERATIONS["within"] = within
