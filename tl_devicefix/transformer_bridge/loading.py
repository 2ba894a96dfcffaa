"""`TransformerBridge.boot_transformers` across n devices, each component on its planned device."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.component_setup import refresh_container_state_owners
from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES
from transformers import PretrainedConfig, PreTrainedModel, modeling_utils

from tl_devicefix.checkpoints.checkpoint import UNREADABLE, check_report, stored_tensors
from tl_devicefix.checkpoints.hub import (
    check_model,
    is_checkpoint_directory,
    not_fetched,
    read_config,
    refuse_directory,
    torch_dtype,
)
from tl_devicefix.errors import refuse_unknown
from tl_devicefix.fusing import fused
from tl_devicefix.monkeypatch.applying import replaced_in_thread
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.multihost.loading import loading_elsewhere
from tl_devicefix.multihost.remote_block import attach
from tl_devicefix.placement.deciding import decide_fitting
from tl_devicefix.placement.devices import CPU, resolve, simulated_device
from tl_devicefix.placement.fitting import Mover, move_components
from tl_devicefix.placement.placement import Placement
from tl_devicefix.placement.workers import one_load
from tl_devicefix.transformer_bridge.alignment import placement_as_it_lies, settle_bridge
from tl_devicefix.transformer_bridge.components import (
    adapter_for,
    empty_hf_model,
    hf_model_class,
    layout_of,
)
from tl_devicefix.transformer_bridge.twin import EXTRA_PARTS, check_bridge_numbers
from tl_devicefix.twin import OnMismatch, chosen_action, extra_parts, warn_or_refuse

_Boot = Callable[..., TransformerBridge]


@patches(
    "TransformerBridge",
    takes="model_name device dtype hf_model device_map n_devices max_memory",
    why="place by the plan: embed, final norm and unembed together; devices of any type",
)
def boot_transformers(
    original: _Boot,
    *args: object,
    fuse_blocks: bool = False,
    on_mismatch: OnMismatch | None = None,
    **kwargs: object,
) -> TransformerBridge:
    """Boot a model from transformers, on one device or across several.

    The arguments are those of `TransformerBridge.boot_transformers`, and two more. `fuse_blocks`
    runs each block as one function, see `tl_devicefix.fuse_blocks`. `on_mismatch` says what to do
    if a Bridge with this config would not give transformers' numbers, with hooks or without: "warn"
    (the default), "refuse" or "ignore"; the environment variable TL_DEVICEFIX_ON_MISMATCH sets
    another default. `dtype` may also be a name ("bfloat16").

    With `n_devices`, or one of the strategies "auto", "balanced" and "sequential" as `device_map`,
    blocks lie in contiguous ranges on `device` and the devices after it. The embeddings, the
    final norm and the unembedding are all on the first, so that tied weights are together.
    `device_map` may also name components ("embed", "blocks.3", "blocks"), or modules of the Hugging
    Face model, as in transformers. Blocks on "cpu" in `device_map`, or that do not fit if
    `max_memory` has "cpu", are offloaded: kept in CPU memory, and copied to the device that runs
    them. The Bridge's `placement` says where its components are.

    Raises:
        ValueError: if the arguments contradict each other, or the model does not fit.
        TypeError: if an argument has an unknown name; the message suggests a similar one.
    """
    takes = inspect.signature(original)
    later = inspect.signature(TransformerBridge.enable_compatibility_mode).parameters
    for name in kwargs.keys() & later.keys() - takes.parameters.keys():
        raise TypeError(
            f"boot_transformers has no argument {name!r}: give it to enable_compatibility_mode()"
        )
    refuse_unknown("boot_transformers", kwargs, [*takes.parameters, "fuse_blocks", "on_mismatch"])
    bound = takes.bind(*args, **kwargs)
    options = bound.arguments
    check_model(options["model_name"], options.get("hf_model"))
    if options.get("hf_model") is None:
        refuse_directory(str(options["model_name"]))
    if isinstance(options.get("dtype"), str):  # as HookedTransformer takes it
        options["dtype"] = torch_dtype(options["dtype"])
    warning = _check_numbers(options, on_mismatch)
    extra = _check_parts(options, on_mismatch)
    bridge = _boot(original, bound)
    bridge.__dict__.update({"numbers_warning": warning, EXTRA_PARTS: extra})
    if fuse_blocks:
        fused.fuse_blocks(bridge)
    return bridge


def _check_parts(options: Mapping[str, Any], on_mismatch: OnMismatch | None) -> str:
    """Warn about parts of an `hf_model` that its config does not describe, and return them."""
    choice, hf_model = chosen_action(on_mismatch), options.get("hf_model")
    extra = extra_parts(hf_model) if isinstance(hf_model, nn.Module) else ""
    if extra and choice != "ignore":  # compatibility mode refuses them later, if not ignored there
        message = (
            f"hf_model has parts that its config does not describe ({extra}), which a "
            "TransformerBridge may leave out: compare its numbers with hf_model's, or silence this "
            "with on_mismatch='ignore'"
        )
        warn_or_refuse(message, choice)
    return extra


def _check_numbers(options: Mapping[str, Any], on_mismatch: OnMismatch | None) -> str | None:
    """Check a tiny model of the same config, and return the warning, if any."""
    choice, hf_config = chosen_action(on_mismatch), _config_of(options)
    if choice == "ignore" or not options.get("load_weights", True) or hf_config is None:
        return None
    vars(hf_config).update(options.get("hf_config_overrides") or {})
    return check_bridge_numbers(hf_config, str(options["model_name"]), on_mismatch)


def _config_of(options: Mapping[str, Any]) -> PretrainedConfig | None:
    """Return the config of the model to boot; None if only TransformerLens can read it.

    Raises:
        ValueError: if the checkpoint has none that can be read, or it cannot be fetched.
    """
    name, hf_model = str(options["model_name"]), options.get("hf_model")
    if hf_model is not None:
        return copy.deepcopy(getattr(hf_model, "config", None))  # a module may have none
    read_by = {k: options[k] for k in ("trust_remote_code", "revision") if k in options}
    read_by.setdefault("trust_remote_code", False)  # or transformers asks at the terminal
    try:
        return read_config(name, **read_by)
    except ValueError as error:
        if is_checkpoint_directory(name):
            raise
        if isinstance(error.__cause__, OSError):
            raise not_fetched(name, _LISTED, error.__cause__) from error
        return None


_LISTED = [*OFFICIAL_MODEL_NAMES, *itertools.chain(*MODEL_ALIASES.values())]


def _boot(boot: _Boot, bound: inspect.BoundArguments) -> TransformerBridge:
    """Boot a model with the arguments of the installed `boot_transformers`."""
    options = bound.arguments
    if options.get("hf_model") is None and options.get("load_weights", True):
        with contextlib.ExitStack() as elsewhere, one_load:
            return _boot_checkpoint(boot, options, elsewhere)
    if options.get("hf_model") is None and options.get("device") is None:
        options["device"] = simulated_device()
    bridge = boot(*bound.args, **bound.kwargs)
    settle_bridge(bridge, placement_as_it_lies(bridge))
    return bridge


def _boot_checkpoint(
    boot: _Boot, options: dict[str, Any], elsewhere: contextlib.ExitStack
) -> TransformerBridge:
    """Boot a model; blocks on other hosts are loaded once `elsewhere` is closed."""
    arguments = {**options}
    with contextlib.ExitStack() as stack:
        arguments["model_class"] = planned = _PlannedClass(options, elsewhere, stack)
        if planned.spreads:
            # Hide these from TransformerLens: it would refuse to split a state space model, which
            # works here, since each block's state stays on its device.
            for ours in ("device", "device_map", "n_devices", "max_memory"):
                arguments.pop(ours, None)
        elif options.get("device") is None:
            arguments["device"] = simulated_device()
        else:
            resolve(options["device"])  # its error is clearer than TransformerLens's
        bridge = boot(**arguments)
    placement = planned.placement
    if placement is None:
        settle_bridge(bridge, placement_as_it_lies(bridge))
        return bridge
    hf_model: Any = bridge.original_model
    if placement.here is not placement or CPU in placement.memories:
        # With a map, TransformerLens and transformers assume that accelerate offloads the model.
        vars(hf_model).pop("hf_device_map", None)
    placement = placement.local_part
    move_components(bridge, placement, rest=hf_model)
    # The Bridge also lists the buffers that it has no component for, which have moved.
    refresh_container_state_owners(bridge)
    settle_bridge(bridge, placement)
    attach(bridge, planned.remotes)
    return bridge


class _PlannedClass:
    """Stands in for a transformers class; its `from_pretrained` places the model by a plan.

    TransformerLens gets it as `model_class`. An incomplete checkpoint is refused.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        elsewhere: contextlib.ExitStack,
        booting: contextlib.ExitStack,
    ) -> None:
        self._options, self._elsewhere, self._booting = options, elsewhere, booting
        n_devices, *limits = (options.get(n) for n in ("n_devices", "device_map", "max_memory"))
        self.spreads = n_devices not in (None, 1) or limits != [None, None]
        self.placement: Placement | None = None
        self.remotes: dict[str, Any] = {}
        """The models of blocks on other hosts."""

    def from_pretrained(self, model_name: object, **kwargs: Any) -> PreTrainedModel:
        """Load the model onto its planned devices."""
        name = str(model_name)
        adapter = adapter_for(kwargs["config"], name, kwargs["torch_dtype"])
        real = self._options.get("model_class") or hf_model_class(adapter)
        if isinstance(real, type) and issubclass(real, PreTrainedModel):
            kwargs.pop("code_revision", None)  # only the Auto classes take it
        if not self.spreads:
            return self._load(real, name, kwargs)
        self.placement, kwargs["device_map"] = placement, _ = self._plan(real, adapter, kwargs)
        if CPU in (own := placement.here.memories) and len(own) > 1:
            # transformers would leave weights on the CPU without values, and the Bridge reads them:
            # load all to the CPU, and move the others later.
            kwargs["device_map"] = {"": "cpu"}
        options = {key: value for key, value in self._options.items() if key != "model_name"}
        options["on_mismatch"] = "ignore"
        load = "transformer_lens.model_bridge:TransformerBridge.boot_transformers"
        hub = {key: options[key] for key in ("revision",) if key in options}
        loading = loading_elsewhere(placement.local_part, load, name, options, **hub)
        self.remotes = self._elsewhere.enter_context(loading)
        if placement.here is not placement:
            self._booting.enter_context(_without_all_values())
        hf_model = self._load(real, name, kwargs)
        # accelerate picks the device of the outermost module's own tensors, such as BART's
        # `final_logits_bias`, by the hashes of the devices' names.
        for tensor in (*hf_model._parameters, *hf_model._buffers):
            Mover().move(hf_model, tensor, placement.home)
        # TransformerLens would move it to one device.
        self._booting.enter_context(mock.patch.object(hf_model, "to", return_value=hf_model))
        return hf_model

    def _load(self, real: type[Any], name: str, kwargs: dict[str, Any]) -> PreTrainedModel:
        """Load the model, and check that the checkpoint has all of its weights."""
        if self._options.get("n_ctx") is None:  # with n_ctx, TransformerLens reports wrong shapes
            kwargs.setdefault("ignore_mismatched_sizes", True)
        try:
            hf_model, report = real.from_pretrained(name, output_loading_info=True, **kwargs)
        except UNREADABLE:
            stored_tensors(name, kwargs)  # raises an error naming the file, if one is damaged
            raise
        check_report(report, name, kwargs, hf_model)
        return hf_model

    def _plan(
        self, real: type[Any], adapter: ArchitectureAdapter, kwargs: Mapping[str, Any]
    ) -> tuple[Placement, dict[str, str]]:
        """Return the placement, and transformers' `device_map` for it."""
        options = self._options
        trusted = {name: kwargs[name] for name in ("trust_remote_code",) if name in kwargs}
        empty = empty_hf_model(real, kwargs["config"], kwargs["torch_dtype"], **trusted)
        layout = layout_of(empty, adapter)
        placement = decide_fitting(
            layout.sizes(empty),
            options.get("n_devices"),
            options.get("device"),
            layout.in_components(options.get("device_map"), empty),
            options.get("max_memory"),
        )
        return placement, layout.device_map(empty, placement)


@contextlib.contextmanager
def _without_all_values() -> Iterator[None]:
    """Accept weights without values, those of blocks on other hosts, within a `with` block."""
    with contextlib.ExitStack() as stack:
        # accelerate's dispatch expects weights for all blocks.
        dispatch = modeling_utils, "accelerate_dispatch"
        stack.enter_context(replaced_in_thread(*dispatch, lambda *_, **__: None))
        # TransformerLens splits fused matrices, and checks their values before.
        check = "require_readable_weight"
        for name, module in dict(sys.modules).items():
            is_own = name.startswith("transformer_lens.") and not name.endswith("quantization")
            if is_own and hasattr(module, check):
                as_it_is = replaced_in_thread(module, check, lambda _, weight, *__, **___: weight)
                stack.enter_context(as_it_is)
        yield
