"""What users do to a model: they run it, hook it, and change its parts.

An operation is a function of a trial and of a few arguments. The type of an argument says what it
may be: a `Literal`, one of `SETTINGS`, or a name that `models.names_in` finds. In a case,
`("replace_module", "blocks.0.mlp", "copy")` calls
`replace_module(trial, "blocks.0.mlp", "copy")`.

Not drawn are replaced methods and classes, which take effect only after fusing again, torch's
global module hooks, with which no block runs fused, and weights that are no parameters any more
(tests/fusing has them).
"""

from __future__ import annotations

import copy
import functools
import operator
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

import torch
import transformer_lens
from models import BLOCKS, IS_BRIDGE, Module, Point, Tensor
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

N = Literal[1, 2, 5, 9]
Bool = Literal[False, True]
Grad = Literal["enable_grad", "no_grad", "inference_mode"]
Names = Literal["", "resid", "attn.hook", "mlp"]
Effect = Literal["read", "scale", "edit in place", "zero", "upcast"]
Direction = Literal["fwd", "bwd"]
How = Literal["sweep", "batches", "in flight"]
Returns = Literal["logits", "logits", "loss", "both"]
TorchHook = Literal[
    "forward", "forward prepend", "forward_pre", "forward_pre with_kwargs", "full_backward"
]
Mode = Literal["train", "eval", "float64", "bfloat16"]
Edit = Literal["in place", "data", "new", "half", "frozen"]
Replacement = Literal["copy", "Tanh", "Identity", "Sequential", "another model's"]
Setting = NewType("Setting", tuple[str, Any])
"""The path of an attribute, and its new value."""

_CONFIG: list[tuple[str, Any]] = [
    *(("attention_dir", value) for value in ("bidirectional", "causal")),
    *(("window_size", value) for value in (2, 4)),
    *(("attn_scores_soft_cap", 3.0), ("clip_qkv", 0.5), ("eps", 0.1), ("rotary_dim", 2)),
    *((flag, True) for flag in ("rotary_adjacent_pairs", "use_attn_result", "use_attn_in")),
    *((flag, True) for flag in ("use_split_qkv_input", "use_hook_mlp_in", "parallel_attn_mlp")),
    *(("ungroup_grouped_query_attention", True), ("dtype", torch.bfloat16)),
    ("positional_embedding_type", "standard"),
]
_OF_BLOCKS: list[tuple[str, Any]] = [
    *(("attn._attention_dir_override", value) for value in ("bidirectional", "causal")),
    *(("attn.attn_type", value) for value in ("local", "global")),
    *(("attn.attn_scale", 0.5), ("attn.alibi", None), ("ln1.eps", 0.1), ("mlp.act_fn", "tanh")),
]
if IS_BRIDGE:
    # Without use_attn_result and use_attn_in: a Bridge sums over heads, which rounds otherwise.
    _CONFIG = [("eps", 0.1), ("use_hook_mlp_in", True)]
    _OF_BLOCKS = [
        *(("attn._original_component.scaling", 0.3), ("mlp._original_component.act_fn", "tanh")),
        *((f"ln1._original_component.{eps}", 0.1) for eps in ("variance_epsilon", "eps")),
    ]
# Parts share the model's config, but may have one of their own.
_PARTS = () if IS_BRIDGE else ("blocks.0.", "blocks.0.attn.", "blocks.1.attn.", "blocks.1.mlp.")
SETTINGS = [(f"{part}cfg.{name}", value) for part in ("", *_PARTS) for name, value in _CONFIG]
SETTINGS += 8 * [(f"{block}.{name}", value) for block in BLOCKS for name, value in _OF_BLOCKS]


@dataclass
class Trial:
    """A model, and the values seen so far.

    Each has a label, whether the model had numbers of 16 bits, a scale (the largest number, at
    least 1), and the values divided by the scale.
    """

    model: Any
    other: Callable[[], Any]  # makes another model of the same shapes
    padding: str
    seen: list[tuple[str, bool, float, list[Any]]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    is_quiet: bool = False  # notes nothing

    def at(self, path: str) -> Any:
        """A submodule, or an attribute, by its path."""
        return operator.attrgetter(path)(self.model)

    def put(self, path: str, value: Any) -> None:
        """Put something in the place of a submodule or an attribute."""
        owner, _, name = path.rpartition(".")
        setattr(self.at(owner) if owner else self.model, name, value)

    def note(self, label: str, *values: Any) -> None:
        """Note values, and the parts of containers."""
        if self.is_quiet:
            return
        parts = [_plain(part) for part in tree_leaves(values)]
        numbers = [x[x.abs() < 1e30] for x in parts if _is_float(x)]  # without masked scores
        scale = max([1.0, *(float(x.abs().max()) for x in numbers if x.numel())])
        parts = [x / scale if _is_float(x) else x for x in parts]
        self.seen.append((label, _has_16_bits(self.model), scale, parts))

    def note_activations(self, label: str, *values: Any) -> None:
        """Note values, except with left padding: a pad's row, which sees no token, may differ."""
        if self.padding != "left":
            self.note(label, *values)

    def do(self, operation: tuple[Any, ...]) -> None:
        """Do an operation, and note its error if it raises one."""
        name, *arguments = operation
        torch.manual_seed(0)  # of dropout, sampling and new weights
        try:
            globals()[name](self, *arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the installed one has to raise it
            # Leave out addresses, and torch's names of a device's tensors ("CPUFloatType").
            of_device = r"0x\w+|(sim|torch\.|CPU)(?=\w+(Type|Tensor))|(?<=\w)(Type|Tensor)\b"
            says = re.sub(of_device, "", f"{type(error).__name__}: {error}")
            self.note(f"{name} raises {says}", None)
            self.model.zero_grad()
            print(f"pid {os.getpid()}: {operation} raised {type(error).__name__}: {error}")


def _has_16_bits(model: Any) -> bool:
    """Return True if a model computes with numbers of 16 bits anywhere."""
    dtypes = {tensor.dtype for tensor in (*model.parameters(), *model.buffers())}
    dtypes |= {getattr(getattr(part, "cfg", None), "dtype", None) for part in model.modules()}
    return torch.bfloat16 in dtypes


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _plain(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().clone()
    return x if isinstance(x, (int, str)) else type(x).__name__


def tokens(n: int) -> torch.Tensor:
    return torch.randint(3, 40, (2, n), generator=torch.Generator().manual_seed(n))


def mask_of(trial: Trial, n: int, is_padded: bool) -> torch.Tensor:
    """Return the mask of two prompts of `n` tokens; with padding, the first has a pad."""
    mask = torch.ones(2, n, dtype=torch.long)
    if is_padded and n > 1:
        mask[0, 0 if trial.padding == "left" else n // 2] = 0
    return mask


def finish(trial: Trial, grad: str, logits: Any) -> None:
    """Note logits, and with gradients those of every weight."""
    if trial.padding == "left":
        logits = logits.flatten(0, 1)[1:]
    trial.note("logits", logits)
    if grad == "enable_grad":
        logits.float().pow(2).sum().backward()
        # Noted together, with one scale: some, such as b_K's, are nothing but rounding.
        trial.note("grads", [p.grad for _, p in trial.model.named_parameters()])
        trial.model.zero_grad()


def forward(trial: Trial, n: N, grad: Grad, padded: Bool, stops: Bool) -> None:
    options: dict[str, Any] = {"attention_mask": mask_of(trial, n, True)} if padded else {}
    if stops:
        options["stop_at_layer"] = 1
    with getattr(torch, grad)():
        finish(trial, grad, trial.model(tokens(n), **options))


def run_with_cache(trial: Trial, n: N, grad: Grad, names: Names, incl_bwd: Bool) -> None:
    options: dict[str, Any] = {"names_filter": lambda name: names in name} if names else {}
    if incl_bwd:
        options |= {"incl_bwd": True, "return_type": "loss"}
    with getattr(torch, "enable_grad" if incl_bwd else grad)():
        _, cache = trial.model.run_with_cache(tokens(n), **options)
    for name in cache.keys():  # noqa: SIM118 - a cache's iterator differs
        trial.note_activations(f"cache {name}", cache[name])


def generate(trial: Trial, n: N, use_past_kv_cache: Bool, do_sample: Bool) -> None:
    made = trial.model.generate(
        tokens(n),
        max_new_tokens=3,
        # An unpatched Bridge loses its cache, which transformers 5.24 has renamed.
        use_past_kv_cache=use_past_kv_cache and not IS_BRIDGE,
        do_sample=do_sample,
        stop_at_eos=False,
        prepend_bos=False,
        verbose=False,
        return_type="tokens",
    )
    trial.note("generated", made)


def kv_cache(trial: Trial, n: N, more: Literal[1, 3], grad: Grad, padded: Bool) -> None:
    """Three forwards with a KV cache, of a HookedTransformer."""
    name = next(name for name in dir(transformer_lens) if name.endswith("KeyValueCache"))
    cache = getattr(transformer_lens, name).init_cache(trial.model.cfg, trial.model.cfg.device, 2)
    with getattr(torch, grad)():
        logits: list[torch.Tensor] = []
        for k in (n, more, 1):
            mask = mask_of(trial, k, padded and not logits)
            logits.append(trial.model(tokens(k), past_kv_cache=cache, attention_mask=mask))
        for entry in cache.entries:
            trial.note_activations("past", (entry.past_keys, entry.past_values))
        finish(trial, grad, torch.cat(logits, 1))


def act(trial: Trial, effect: str, x: Any, hook: Any = None) -> Any:
    """Note what a hook is given, and do what the effect says."""
    trial.note_activations(f"hook {hook.name}", x)
    return affected(effect, x, hook)


def affected(effect: str, x: Any, hook: Any) -> Any:
    """Do to an activation what an effect says, and return what a hook would."""
    if not isinstance(x, torch.Tensor):
        return None
    if effect == "edit in place":
        x[:, 0] *= 0.5
    if effect == "upcast" and "attn." not in hook.name:  # TransformerLens's attention raises
        return x.double()
    made = {"scale": lambda: x * 1.25, "zero": lambda: torch.zeros_like(x)}
    return made.get(effect, lambda: None)()


def many_runs(
    trial: Trial, n: N, grad: Grad, how: How, returns: Returns, a: Point, b: Point, effect: Effect
) -> None:
    """Runs that differ in their hooks: by the package, or in the other process in a loop."""
    trial.model(tokens(n))  # changes that hooks make once are made now: `within`
    if trial.model.training and how == "batches":  # with dropout, which draws for all runs at once
        how = "sweep"
    given: list[list[Any]] = [[] for _ in range(4)]  # what the hooks of each run were given

    def hook_of(run: int, effect: str) -> Any:
        def hook(x: Any, hook: Any) -> Any:
            given[run].append((hook.name, tree_map(_plain, x)))
            return affected(effect, x, hook)

        return hook

    effects: list[list[Any]] = [
        [(a, effect)],
        [],
        [(b, "scale"), (a, effect)],
        [(b.__eq__, effect)],
    ]
    runs = [[(at, hook_of(run, do)) for at, do in hooks] for run, hooks in enumerate(effects)]
    trial.is_quiet = True  # a run that starts at a later block calls fewer of the other hooks
    try:
        with getattr(torch, grad)():
            results = _many_runs(trial.model, tokens(n), runs, how, given, return_type=returns)
            if grad == "enable_grad":
                sum(x.float().pow(2).sum() for x in tree_leaves(results)).backward()
    finally:
        trial.is_quiet = False
    trial.note("many runs", given, results)
    trial.note("grads", [p.grad for _, p in trial.model.named_parameters()])
    trial.model.zero_grad()


def _many_runs(
    model: Any, tokens: torch.Tensor, runs: Any, how: str, given: Any, **options: Any
) -> list[Any]:
    package = sys.modules.get("tl_devicefix")

    def one(model: Any, hooks: Any) -> Any:
        return model.run_with_hooks(tokens, fwd_hooks=hooks, **options)

    if package is None:
        return [one(model, hooks) for hooks in runs]
    try:
        if how == "in flight":
            return list(package.pipeline_map(model, one, runs, 3))
        size = 3 if how == "batches" else 1
        return list(package.sweep(model, tokens, runs, batch_size=size, **options))
    except Exception as error:  # of a batch, another run's error may come first
        for each in given:
            each.clear()
        results = list(package.sweep(model, tokens, runs, **options))
        if not re.search("batch_size=1|max_in_flight=1", str(error)):
            raise
        return results


def hook(trial: Trial, point: Point, effect: Effect, direction: Direction, forever: Bool) -> None:
    function = functools.partial(act, trial, effect)  # refers to the trial, so to its model
    trial.model.add_hook(point, function, direction, is_permanent=forever)


def torch_hook(trial: Trial, module: Module, kind: TorchHook, scales: Bool) -> None:
    register, _, flag = kind.partition(" ")

    def hook(_: Any, *given: Any) -> Any:
        trial.note_activations(f"torch's {kind} {module}", *given)
        if not scales:
            return None
        value = given[-1] if register == "forward" else given[0]
        scaled = tree_map(lambda x: x * 1.25 if _is_float(x) else x, value)
        return (scaled, given[1]) if flag == "with_kwargs" else scaled

    options = {flag: True} if flag else {}
    register_hook = getattr(trial.at(module), f"register_{register}_hook")
    trial.handles.append(register_hook(hook, **options))


def remove_hooks(trial: Trial, how: Literal["reset", "permanent", "handles"]) -> None:
    while how == "handles" and trial.handles:
        trial.handles.pop().remove()
    if how != "handles":
        trial.model.reset_hooks(including_permanent=how == "permanent")


def set_value(trial: Trial, setting: Setting) -> None:
    path, value = setting
    owner = path.rpartition(".")[0]
    if owner.endswith(".cfg"):
        trial.put(owner, copy.copy(trial.at(owner)))
    trial.at(path)  # raises if there is none
    trial.put(path, nn.Tanh() if value == "tanh" else value)


def set_mode(trial: Trial, mode: Mode) -> None:
    if mode in ("train", "eval"):
        trial.model.train(mode == "train")
    else:
        trial.model.to(getattr(torch, mode))


def edit(trial: Trial, tensor: Tensor, how: Edit) -> None:
    path, _, name = tensor.rpartition(".")
    module, old = trial.at(path), trial.at(tensor)
    new = torch.ones_like(old)  # a mask that masks nothing
    if old.is_floating_point():
        new = torch.randn(old.shape).to(old) * 0.3
    is_parameter = isinstance(old, nn.Parameter)
    do: dict[str, Callable[[], Any]] = {
        "in place": lambda: torch.no_grad()(old.copy_)(new),
        "data": lambda: setattr(old, "data", new),
        "new": lambda: setattr(module, name, nn.Parameter(new) if is_parameter else new),
        "half": lambda: setattr(old, "data", old.data.bfloat16()),
        "frozen": lambda: old.requires_grad_(False),
    }
    do[how]()


def replace_module(trial: Trial, module: Module, by: Replacement) -> None:
    make: dict[str, Callable[[], Any]] = {
        "copy": lambda: copy.deepcopy(trial.at(module)),
        "Tanh": nn.Tanh,
        "Identity": nn.Identity,
        "Sequential": lambda: nn.Sequential(trial.at(module), nn.Tanh()),
        "another model's": lambda: operator.attrgetter(module)(trial.other()),
    }
    trial.put(module, make[by]())


def copy_model(trial: Trial) -> None:
    """Go on with a copy of the model."""
    trial.model = copy.deepcopy(trial.model)


def within(trial: Trial, point: str, operation: tuple[Any, ...]) -> None:
    """Add a hook that makes a change in its first call."""
    todo = [operation]

    def hook(x: Any, hook: Any) -> None:
        if todo:
            # New weights must not be inference tensors, which cannot have gradients later.
            with torch.inference_mode(False):
                trial.do(todo.pop())

    trial.model.add_hook(point, hook)


RUNS = [forward, run_with_cache, generate, many_runs, *([] if IS_BRIDGE else [kv_cache])]
CHANGES = [
    *(hook, hook, hook, torch_hook, remove_hooks),
    *(set_value, set_value, set_mode, edit, edit, replace_module),
    *([] if IS_BRIDGE else [copy_model]),  # a Bridge's copy refers weakly to the Bridge
]
