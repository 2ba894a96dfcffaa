"""What users do to a model: they run it, hook it, and change its parts.

An operation is a function of a trial and of a few arguments. The type of an argument says what it
may be: a `Literal`, one of `SETTINGS`, or a name that `models.names_in` finds. `("hook", "blocks.0.hook_resid_pre", "scale", "fwd",
"name")` in a case calls `hook(trial, "blocks.0.hook_resid_pre", "scale", "fwd", "name")`.

Left out are code that users exchange by hand, because it acts once they fuse again, and hooks for
all modules, with which no block runs fused.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Literal, NewType

import models
import torch
import transformer_lens
from models import BLOCKS, IS_BRIDGE
from packaging.version import Version
from torch import nn
from torch.nn.utils import parametrize

Grad = Literal["grad", "no_grad", "inference"]
N = Literal[1, 2, 5, 9]
Padded = Literal[False, False, True]
Effect = Literal["read", "scale", "edit in place", "zero", "upcast"]
Setting = NewType("Setting", tuple[str, Any])
"""The path of an attribute, and its new value."""

_CONFIG = [
    *(("attention_dir", value) for value in ("bidirectional", "causal")),
    *(("window_size", value) for value in (2, 4)),
    *(("attn_scores_soft_cap", 3.0), ("clip_qkv", 0.5), ("eps", 0.1), ("rotary_dim", 2)),
    *((flag, True) for flag in ("rotary_adjacent_pairs", "use_attn_result", "use_attn_in")),
    *((flag, True) for flag in ("use_split_qkv_input", "use_hook_mlp_in", "parallel_attn_mlp")),
    *(("ungroup_grouped_query_attention", True), ("dtype", torch.bfloat16)),
    ("positional_embedding_type", "standard"),
]
_OF_BLOCKS = [
    *(("attn._attention_dir_override", value) for value in ("bidirectional", "causal")),
    *(("attn.attn_type", value) for value in ("local", "global")),
    *(("attn.attn_scale", 0.5), ("attn.alibi", None), ("ln1.eps", 0.1), ("mlp.act_fn", "tanh")),
]
if IS_BRIDGE:
    # Not those for results or inputs of heads: a Bridge adds these up, which rounds otherwise.
    _CONFIG = [("eps", 0.1), ("use_hook_mlp_in", True)]
    _OF_BLOCKS = [
        *(("attn._original_component.scaling", 0.3), ("mlp._original_component.act_fn", "tanh")),
        *((f"ln1._original_component.{eps}", 0.1) for eps in ("variance_epsilon", "eps")),
    ]
# Parts share the model's config, but may have one of their own.
_PARTS = () if IS_BRIDGE else ("blocks.0.", "blocks.0.attn.", "blocks.1.attn.", "blocks.1.mlp.")
SETTINGS = [(f"{part}cfg.{name}", value) for part in ("", *_PARTS) for name, value in _CONFIG]
SETTINGS += 4 * [(f"{block}.{name}", value) for block in BLOCKS for name, value in _OF_BLOCKS]


class Trial:
    """A model, and what was seen of it so far: labels, and tensors over their largest number."""

    def __init__(self, model: Any, other: Callable[[], Any], padding: str) -> None:
        self.model = model
        self.other = other  # makes another model of the same shapes
        self.padding = padding
        self.seen: list[tuple[str, float, list[Any]]] = []
        self.errors: list[str] = []
        self.handles: list[Any] = []

    def at(self, path: str) -> Any:
        """A submodule, or an attribute, by its path."""
        return operator.attrgetter(path)(self.model)

    def put(self, path: str, value: Any) -> None:
        """Put something in the place of a submodule or an attribute."""
        owner, _, name = path.rpartition(".")
        setattr(self.at(owner) if owner else self.model, name, value)

    def note(self, label: str, value: Any) -> None:
        """Note a value, or the parts of a container."""
        parts = list(_leaves(value))
        numbers = [x[x.abs() < 1e30] for x in parts if _is_float(x)]  # without masked scores
        scale = max([1.0, *(float(x.abs().max()) for x in numbers if x.numel())])
        self.seen.append((label, scale, [x / scale if _is_float(x) else x for x in parts]))

    def note_activations(self, label: str, value: Any) -> None:
        """Note a value; with padding on the left without the first example."""
        # Its first row sees no token, and such rows may differ.
        rows = slice(-1 if self.padding == "left" else None, None)
        self.note(label, [x[rows] if _is_float(x) and x.dim() else x for x in _leaves(value)])

    def do(self, operation: tuple[Any, ...]) -> None:
        """Do an operation, and note the type of its error if it raises one."""
        name, *arguments = operation
        torch.manual_seed(0)  # of dropout, sampling and new weights
        n_seen = len(self.seen)
        try:
            globals()[name](self, *arguments)
        except RecursionError:  # how deep it got depends on the calls around it
            del self.seen[n_seen:]
        except Exception as error:  # noqa: BLE001 - whatever it is, the installed one has to raise it
            # Which of these a module gives that is not there, or of another kind, does not matter.
            is_lookup = isinstance(error, (KeyError, AttributeError, TypeError))
            error_name = "LookupError" if is_lookup else type(error).__name__
            self.note(f"{name} raises {error_name}", None)
            self.model.zero_grad()
            self.errors.append(f"{operation}: {type(error).__name__}: {error}")


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value.detach().cpu().clone()
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif value is not None:
        yield value if isinstance(value, (int, str)) else type(value).__name__


# Runs.


def tokens(n: int) -> torch.Tensor:
    return torch.randint(3, 40, (2, n), generator=torch.Generator().manual_seed(n))


def options_of(trial: Trial, n: int, is_padded: bool) -> dict[str, Any]:
    """The mask of two prompts of some tokens, of which the first has a pad."""
    if not is_padded or n == 1:
        return {}
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, {"left": 0, "middle": n // 2, "right": -1}[trial.padding]] = 0
    return {"attention_mask": mask}


def in_mode(grad: str) -> Any:
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    return modes.get(grad, torch.inference_mode)()


def finish(trial: Trial, grad: str, logits: Any) -> None:
    """Note logits, and with gradients those of every weight."""
    if trial.padding == "left":
        logits = logits.flatten(0, 1)[1:]
    trial.note("logits", logits)
    if grad == "grad":
        logits.float().pow(2).sum().backward()
        # Together, because some of them, as of b_K, are the rounding of others.
        trial.note("grads", [p.grad for _, p in sorted(trial.model.named_parameters())])
        trial.model.zero_grad()


def forward(
    trial: Trial, n: N, grad: Grad, padded: Padded, stop_at_layer: Literal[None, None, None, 1, -1]
) -> None:
    options = options_of(trial, n, padded)
    if stop_at_layer is not None:
        options["stop_at_layer"] = stop_at_layer
    with in_mode(grad):
        finish(trial, grad, trial.model(tokens(n), **options))


def run_with_cache(
    trial: Trial,
    n: N,
    grad: Grad,
    names: Literal["", "", "resid", "attn.hook", "mlp"],
    incl_bwd: Literal[False, False, True],
) -> None:
    options: dict[str, Any] = {"names_filter": lambda name: names in name} if names else {}
    if incl_bwd:
        options |= {"incl_bwd": True, "return_type": "loss"}
    with in_mode("grad" if incl_bwd else grad):
        _, cache = trial.model.run_with_cache(tokens(n), **options)
    for name in cache.keys():  # noqa: SIM118 - a cache's iterator differs
        trial.note_activations(f"cache {name}", cache[name])


def run_with_hooks(
    trial: Trial,
    n: N,
    grad: Grad,
    point: models.Point,
    effect: Effect,
    direction: Literal["fwd_hooks", "bwd_hooks"],
) -> None:
    hooks = [(point, functools.partial(act, trial, effect))]
    with in_mode(grad), trial.model.hooks(**{direction: hooks}):
        finish(trial, grad, trial.model(tokens(n)))


# A Bridge alone loses its KV cache there: transformers gives it by another name.
LOSES_CACHE = IS_BRIDGE and Version(version("transformers")) >= Version("5.24")


def generate(
    trial: Trial, n: N, use_past_kv_cache: Literal[True, False], do_sample: Literal[False, True]
) -> None:
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


def kv_cache(trial: Trial, n: N, more: Literal[1, 3], grad: Grad, padded: Padded) -> None:
    """Three forwards with a KV cache, of a HookedTransformer."""
    name = next(name for name in dir(transformer_lens) if name.endswith("KeyValueCache"))
    cache = getattr(transformer_lens, name).init_cache(trial.model.cfg, trial.model.cfg.device, 2)
    with in_mode(grad):
        first = trial.model(tokens(n), past_kv_cache=cache, **options_of(trial, n, padded))
        later = [trial.model(tokens(k), past_kv_cache=cache) for k in (more, 1)]
        for entry in cache.entries:
            trial.note_activations("past", (entry.past_keys, entry.past_values))
        finish(trial, grad, torch.cat([first, *later], 1))


# Hooks.


def act(trial: Trial, effect: str, x: Any, hook: Any = None) -> Any:
    """What a hook does with what it is given."""
    trial.note_activations(f"hook {hook.name}", x)
    if not isinstance(x, torch.Tensor):
        return None
    if effect == "edit in place":
        x[:, 0] *= 0.5
    if effect == "upcast" and "attn." not in hook.name:  # there, TransformerLens's own raises
        return x.double()
    made = {"scale": lambda: x * 1.25, "zero": lambda: torch.zeros_like(x)}
    return made.get(effect, lambda: None)()


def hook(
    trial: Trial,
    point: models.Point,
    effect: Effect,
    direction: Literal["fwd", "fwd", "bwd"],
    how: Literal["name", "permanent", "on the point"],
) -> None:
    function = functools.partial(act, trial, effect)  # which leads to the model, also in copies
    if how == "on the point":
        trial.model.hook_dict[point].add_hook(function, direction)
    else:
        trial.model.add_hook(point, function, direction, is_permanent=how == "permanent")


def torch_hook(
    trial: Trial,
    module: models.Module,
    kind: Literal[
        "forward", "forward prepend", "forward_pre", "forward_pre with_kwargs", "full_backward"
    ],
    effect: Literal["read", "scale"],
) -> None:
    register, _, flag = kind.partition(" ")

    def hook(_: Any, *given: Any) -> Any:
        # Arguments, then keyword arguments or the output; or gradients of inputs and of outputs.
        trial.note_activations(f"torch's {kind} {module}", [*given[:1], *map(_values, given[1:])])
        if effect == "scale":
            scaled_args = _scaled(given[-1] if register == "forward" else given[0])
            return (scaled_args, given[1]) if flag == "with_kwargs" else scaled_args
        return None

    options = {flag: True} if flag else {}
    register_hook = getattr(trial.at(module), f"register_{register}_hook")
    trial.handles.append(register_hook(hook, **options))


def _values(x: Any) -> Any:
    return list(x.values()) if type(x) is dict else x


def _scaled(x: Any) -> Any:
    """A tensor, or each tensor of a tuple, times 1.25."""
    if isinstance(x, torch.Tensor):
        return x * 1.25 if x.is_floating_point() else x
    return tuple(map(_scaled, x)) if type(x) is tuple else x


def remove_hooks(trial: Trial, which: Literal["reset", "permanent", "handles"]) -> None:
    if which == "handles":
        while trial.handles:
            trial.handles.pop().remove()
    else:
        trial.model.reset_hooks(including_permanent=which == "permanent")


def replace_hook_dicts(
    trial: Trial,
    module: models.Module,
    which: Literal["_forward_hooks", "_forward_pre_hooks", "_backward_hooks"],
    how: Literal["of all", "of one", "clear"],
) -> None:
    """The idiom by which people remove all hooks."""
    for of in trial.model.modules() if how != "of one" else [trial.at(module)]:
        if how == "clear":
            getattr(of, which).clear()
        else:
            setattr(of, which, OrderedDict())


# Configs, attributes and weights.


def set_value(trial: Trial, setting: Setting) -> None:
    path, value = setting
    owner = path.rpartition(".")[0]
    if owner.endswith(".cfg"):
        trial.put(owner, copy.copy(trial.at(owner)))
    trial.at(path)  # which has to be there
    trial.put(path, nn.Tanh() if value == "tanh" else value)


def set_mode(trial: Trial, mode: Literal["train", "eval", "frozen", "float64", "bfloat16"]) -> None:
    if mode == "frozen":
        trial.model.requires_grad_(False)
    elif mode in ("train", "eval"):
        trial.model.train(mode == "train")
    else:
        trial.model.to(getattr(torch, mode))


def edit(
    trial: Trial,
    tensor: models.Tensor,
    how: Literal["in place", "data", "new", "half", "frozen", "tensor", "parametrized"],
) -> None:
    path, _, name = tensor.rpartition(".")
    module, old = trial.at(path), trial.at(tensor)
    new = torch.ones_like(old)  # a mask that masks nothing
    if old.is_floating_point():
        new = torch.randn(old.shape).to(old) * 0.3 - (name == "IGNORE")
    if how == "tensor":
        delattr(module, name)
        setattr(module, name, new)
        return
    is_parameter = isinstance(old, nn.Parameter)
    do: dict[str, Callable[[], Any]] = {
        "in place": lambda: torch.no_grad()(old.copy_)(new),
        "data": lambda: setattr(old, "data", new),
        "new": lambda: setattr(module, name, nn.Parameter(new) if is_parameter else new),
        "half": lambda: setattr(old, "data", old.data.bfloat16()),
        "frozen": lambda: old.requires_grad_(False),
        "parametrized": lambda: parametrize.register_parametrization(module, name, nn.Tanh()),
    }
    do[how]()


# Modules.


class Doubling(nn.Module):
    """Stands in the place of a module."""

    def forward(self, x: Any = None, **kwargs: Any) -> Any:
        return (next(iter(kwargs.values())) if x is None else x) * 2


def exchange(
    trial: Trial,
    module: models.Module,
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


def copy_model(trial: Trial) -> None:
    """Go on with a copy of the model."""
    trial.model = copy.deepcopy(trial.model)


# Within a forward.


def within(trial: Trial, point: str, operation: tuple[Any, ...]) -> None:
    """A change that a hook makes, once."""
    todo = [operation]

    def hook(x: Any, hook: Any) -> None:
        if todo:
            # As inference tensors, new weights could have no gradients later.
            with torch.inference_mode(False):
                trial.do(todo.pop())

    trial.model.add_hook(point, hook)


RUNS = [forward, run_with_cache, run_with_hooks, generate, *([] if IS_BRIDGE else [kv_cache])]
CHANGES = [
    *(hook, torch_hook, remove_hooks, replace_hook_dicts),
    *(set_value, set_value, set_mode, edit, exchange, copy_model),
]
