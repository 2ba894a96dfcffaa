"""What is replaced in TransformerLens, for which versions, and why; apply it and undo it.

Nothing is replaced unless everything can be: a target that is missing or has another signature
than the one known leaves TransformerLens as it was, and says so.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from packaging.version import Version

SUPPORTED = "2.16.1 <= transformer_lens < 4"


class UnsupportedTransformerLens(ImportError):
    """The installed TransformerLens is not one that can be patched; the message says why."""


@dataclass(frozen=True)
class Patch:
    """One thing that is replaced."""

    name: str
    """The attribute of `owner`, or the function."""
    replacement: Callable[..., Any]
    parameters: tuple[str, ...]
    """Parameters that the installed target must have, in this order, for the patch to be right."""
    why: str
    versions: str = "2.16.1 - 3.9"
    owner: str | None = "HookedTransformer"
    """The class it is an attribute of; None for a function that several modules import."""

    @property
    def target(self) -> str:
        """What is replaced, as a person would write it."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


def _table() -> tuple[Patch, ...]:
    """Every patch. Imported here, so that an unsupported TransformerLens is named first."""
    from tl_devicefix import (
        activations,
        alignment,
        devices,
        gathering,
        hooking,
        interruption,
        loading,
        moving,
        processing,
        training,
    )

    loads = "one component at a time, to its planned device, folded in float32"
    folds = "each component on its own device, in float32 or wider, rounded once"
    gathers = "weights of several devices are read at home, or on the device of `gather_on`"
    state = ("self", "state_dict")
    return (
        Patch(
            "from_pretrained",
            loading.from_pretrained,
            ("cls", "model_name", "fold_ln", "hf_model", "device", "n_devices", "dtype"),
            f"load {loads}; device_map and max_memory",
        ),
        Patch("load_and_process_state_dict", processing.load_and_process_state_dict, state, folds),
        Patch("process_weights_", processing.process_weights_, ("self", "fold_ln"), folds),
        Patch("fill_missing_keys", processing.fill_missing_keys, state, "never fill in garbage"),
        Patch("fold_layer_norm", processing.fold_layer_norm, (*state, "fold_biases"), folds),
        Patch("fold_value_biases", processing.fold_value_biases, state, folds),
        Patch("center_writing_weights", processing.center_writing_weights, state, folds),
        Patch("center_unembed", processing.center_unembed, state, folds),
        Patch(
            "refactor_factored_attn_matrices",
            processing.refactor_factored_attn_matrices,
            state,
            folds,
        ),
        Patch(
            "move_model_modules_to_device",
            moving.move_model_modules_to_device,
            ("self",),
            "place by the plan, not by whichever device has most free memory",
        ),
        Patch(
            "to",
            moving.to,
            ("self", "device_or_dtype"),
            "keep the device's index; a dtype keeps the placement",
        ),
        Patch("_apply", moving._apply, ("self", "fn"), "inputs follow the weights when they move"),
        Patch(
            "load_state_dict",
            interruption.load_state_dict,
            ("self", "state_dict"),
            "with all weights, a model whose processing was interrupted can be used again",
        ),
        Patch("__setstate__", moving.__setstate__, ("self", "state"), "copies keep the placement"),
        Patch(
            "setup",
            alignment.setup,
            ("self",),
            "SAEs and the like run where they are, whatever block they are attached to",
        ),
        Patch(
            "get_caching_hooks",
            activations.get_caching_hooks,
            ("self", "names_filter", "incl_bwd", "device"),
            "cached activations are read at home",
        ),
        Patch(
            "add_caching_hooks",
            activations.add_caching_hooks,
            ("self", "names_filter", "incl_bwd", "device"),
            "cached activations are read at home",
        ),
        Patch(
            "forward",
            alignment.forward,
            ("self", "input", "return_type", "start_at_layer", "stop_at_layer"),
            "what leaves the model is at home",
        ),
        *(
            Patch(name, gathering.stacked(name), (), "stack weights of any devices in one copy")
            for name in gathering.STACKED
        ),
        *(
            Patch(name, gathering.single(name), (), "read on the device of `gather_on`")
            for name in ("W_E", "W_U", "b_U", "W_pos")
        ),
        Patch("W_E_pos", gathering.get_W_E_pos, (), gathers),
        Patch("accumulated_bias", gathering.gathered("accumulated_bias"), ("self",), gathers),
        Patch(
            "all_composition_scores",
            gathering.gathered("all_composition_scores"),
            ("self", "mode"),
            gathers,
        ),
        Patch(
            "tokens_to_residual_directions",
            gathering.tokens_to_residual_directions,
            ("self", "tokens"),
            gathers,
        ),
        Patch(
            "__init__",
            gathering.init_svd_interpreter,
            ("self", "model"),
            gathers,
            owner="SVDInterpreter",
        ),
        *(
            Patch(
                name,
                activations.reading_together(name),
                ("self",),
                "cached activations meet weights on one device",
                owner="ActivationCache",
            )
            for name in (
                "accumulated_resid",
                "apply_ln_to_stack",
                "decompose_resid",
                "get_full_resid_decomposition",
                "get_neuron_results",
                "logit_attrs",
                "stack_activation",
                "stack_head_results",
                "stack_neuron_results",
            )
        ),
        Patch(
            "compute_head_results",
            activations.compute_head_results,
            ("self",),
            "each block's head results on its own device",
            owner="ActivationCache",
        ),
        Patch(
            "remove_batch_dim",
            activations.remove_batch_dim,
            ("self",),
            "activations stay where they are",
            owner="ActivationCache",
        ),
        Patch(
            "apply_slice_to_batch_dim",
            activations.apply_slice_to_batch_dim,
            ("self", "batch_slice"),
            "activations stay where they are",
            owner="ActivationCache",
        ),
        Patch(
            "to",
            activations.to,
            ("self", "device"),
            "activations go there from where they are, not by way of home",
            owner="ActivationCache",
        ),
        *(
            Patch(
                name,
                activations.read_where_chosen(name),
                ("self",),
                "activations are read on the device of `gather_on`",
                owner="ActivationCache",
            )
            for name in ("__getitem__", "items", "values")
        ),
        Patch(
            "add_hook",
            hooking.add_hook,
            ("self", "hook", "dir", "is_permanent"),
            "a hook may use tensors of all the model's devices",
            owner="HookPoint",
        ),
        Patch(
            "get_device_for_block_index",
            alignment.get_device_for_block_index,
            ("index", "cfg", "device"),
            "route the residual stream by the placement",
            owner=None,
        ),
        Patch(
            "train",
            training.train,
            ("model", "config", "dataset"),
            "a spread model is trained where it lies",
            owner=None,
        ),
        Patch(
            "__post_init__",
            devices.config_post_init,
            ("self",),
            "n_devices counts devices of the config's own type",
            owner="HookedTransformerConfig",
        ),
    )


_MISSING = object()
# What was replaced: (object, attribute, what was there, or _MISSING if it was inherited).
_replaced: list[tuple[Any, str, Any]] = []


def apply() -> None:
    """Replace everything in the table; does nothing if that is done already.

    Raises:
        UnsupportedTransformerLens: if this TransformerLens cannot be patched; it is untouched.
    """
    if _replaced:
        return
    check_version()
    _originals.clear()
    table = _table()
    for patch in table:
        _check_target(patch)
    for patch in table:
        for owner in _owners(patch):
            there = vars(owner).get(patch.name, _MISSING)
            _replaced.append((owner, patch.name, there))
            setattr(owner, patch.name, _as_found(patch, there))


def restore() -> None:
    """Put back the very objects that `apply` replaced. Does nothing if nothing is replaced.

    A model that is spread over devices at that time still runs, but what it caches is not read at
    home, its weights are not gathered, and hooks that are added before `apply` is called again may
    not mix devices.
    """
    _originals.clear()
    while _replaced:
        owner, name, there = _replaced.pop()
        replacement = vars(owner).get(name)
        if there is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, there)
        if inspect.ismodule(owner):
            for module in _modules_with(name, replacement):  # which were imported since
                setattr(module, name, there)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Apply the patches within a `with` block, and leave them as they were after it."""
    were_applied = is_applied()
    apply()
    try:
        yield
    finally:
        if not were_applied:
            restore()


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """TransformerLens as it was installed, within a `with` block."""
    were_applied = is_applied()
    restore()
    try:
        yield
    finally:
        if were_applied:
            apply()


def is_applied() -> bool:
    """Whether the patches are in place."""
    return bool(_replaced)


def report() -> None:
    """Print a table of what is replaced, for which TransformerLens versions, and why."""
    check_version()
    state = "applied" if is_applied() else "not applied"
    print(f"tl_devicefix on transformer_lens {_installed()}: {state}")
    rows = [("target", "TL versions", "why")]
    for patch in _table():
        rows.append((patch.target, patch.versions, patch.why))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for target, versions, why in rows:
        print(f"{target:<{widths[0]}}  {versions:<{widths[1]}}  {why}")


def original(cls: type, name: str) -> Any:
    """What `cls.name` is without the patches: the raw attribute, as in the class's `__dict__`.

    Raises:
        AttributeError: if TransformerLens has no such attribute.
    """
    if (cls, name) not in _originals:
        _originals[cls, name] = _find_original(cls, name)
    return _originals[cls, name]


# Looked up at every forward, so kept; forgotten when the patches change.
_originals: dict[tuple[type, str], Any] = {}


def _find_original(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        # A subclass's own from_pretrained is not TransformerLens's: look further up.
        if base.__module__.partition(".")[0] not in ("transformer_lens", "torch"):
            continue
        replaced = {attribute: there for owner, attribute, there in _replaced if owner is base}
        found = replaced.get(name, vars(base).get(name, _MISSING))
        if found is not _MISSING:
            return found
    raise AttributeError(f"{cls.__name__} has no {name}")


def check_version() -> None:
    """Check that the installed TransformerLens is one that is known.

    Raises:
        UnsupportedTransformerLens: with one sentence that says what to install.
    """
    installed = _installed()
    if installed >= Version("4.dev0"):
        raise UnsupportedTransformerLens(
            f"tl_devicefix patches HookedTransformer, which transformer_lens {installed} no longer "
            "has: install 'transformer_lens<4', or use TransformerBridge without tl_devicefix"
        )
    if installed < Version("2.16.1"):
        raise UnsupportedTransformerLens(
            f"tl_devicefix needs {SUPPORTED}, but {installed} is installed: upgrade it"
        )


def _installed() -> Version:
    return Version(importlib.metadata.version("transformer_lens"))


def _owners(patch: Patch) -> list[Any]:
    """The class, or every module that has imported the function."""
    if patch.owner:
        return [_class(patch.owner)]
    # TransformerLens 3 imports the name itself into each user; 2 goes through its module.
    return _modules_with(patch.name, _function(patch.name))


def _modules_with(name: str, value: Any) -> list[Any]:
    """TransformerLens's modules in which a name means this."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "transformer_lens" and vars(module).get(name) is value
    ]


def _class(name: str) -> Any:
    import transformer_lens
    import transformer_lens.hook_points

    return getattr(transformer_lens, name, None) or getattr(transformer_lens.hook_points, name)


def _function(name: str) -> Any:
    """The module-level function, which TransformerLens 3 moved; None if it is in neither place."""
    for module_name in (
        "transformer_lens.utilities.multi_gpu",
        "transformer_lens.utilities.devices",
        "transformer_lens.train",
    ):
        if importlib.util.find_spec(module_name) is not None:
            found = getattr(importlib.import_module(module_name), name, None)
            if found is not None:
                return found
    return None


def _check_target(patch: Patch) -> None:
    target = (
        getattr(_class(patch.owner), patch.name, None) if patch.owner else _function(patch.name)
    )
    if target is None:
        raise UnsupportedTransformerLens(
            f"transformer_lens {_installed()} has no {patch.target}, which tl_devicefix replaces; "
            f"it is left as it was: install a version with {SUPPORTED}"
        )
    function: Any = getattr(target, "__func__", target)
    if isinstance(target, property):
        function = target.fget
    there = list(inspect.signature(inspect.unwrap(function)).parameters)
    known = [name for name in there if name in patch.parameters]
    if known != list(patch.parameters):
        raise UnsupportedTransformerLens(
            f"{patch.target} of transformer_lens {_installed()} takes ({', '.join(there)}), "
            f"not the ({', '.join(patch.parameters)}, ...) that tl_devicefix knows; it is left as "
            f"it was: install a version with {SUPPORTED}"
        )


def _as_found(patch: Patch, there: Any) -> Any:
    """The replacement in the form of what it replaces: a classmethod stays one."""
    if isinstance(there, classmethod):
        return _classmethod_like(there, patch.replacement)
    if isinstance(there, property):
        return _property_like(there, patch.replacement)
    takes = inspect.signature(patch.replacement).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in takes):
        owner = _class(patch.owner or "HookedTransformer")
        return _method_like(getattr(owner, patch.name), patch.replacement)
    return patch.replacement


@cache  # so that applying again puts the same object there
def _method_like(there: Any, replacement: Callable[..., Any]) -> Any:
    """The replacement with the signature and docstring of what it wraps."""

    @wraps(there)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, *args, **kwargs)

    return method


@cache
def _property_like(there: property, replacement: Any) -> property:
    """The replacement, a getter, with the docstring of what it replaces."""
    return property(replacement, doc=there.__doc__)


@cache
def _classmethod_like(there: Any, replacement: Callable[..., Any]) -> Any:
    target = there.__func__
    new = [
        parameter
        for parameter in inspect.signature(replacement).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    *parameters, hf_kwargs = inspect.signature(target).parameters.values()

    def method(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(cls, *args, **kwargs)

    # help() shows the installed signature with what is new, and both docstrings.
    method.__name__, method.__qualname__ = target.__name__, target.__qualname__
    method.__doc__ = f"{replacement.__doc__}\n\n{target.__doc__ or ''}"
    method.__signature__ = inspect.Signature([*parameters, *new, hf_kwargs])  # type: ignore[attr-defined]
    return classmethod(method)
