"""`HookedTransformer.from_pretrained` across n devices.

Each GPU holds at most one component beyond the model:

    source -> one component -> its device -> fold in float32 -> round once -> the model's parameter
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformer_lens.loading_from_pretrained as tl_loading
from torch import nn
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoModel, AutoModelForCausalLM

from tl_devicefix.checkpoints.checkpoint import (
    UNREADABLE,
    check_report,
    dtypes_as_stored,
    stored_tensors,
)
from tl_devicefix.checkpoints.hub import (
    check_model,
    hub_arguments,
    in_one_line,
    is_checkpoint_directory,
    known_config,
    read_config,
    tokenizers_fetched_with,
    torch_dtype,
)
from tl_devicefix.checkpoints.live_weights import class_in_transformers, unwrap
from tl_devicefix.checkpoints.sources import HuggingFaceSource, Source, StateDictSource
from tl_devicefix.errors import clear_frames, is_own_bug, refuse_unknown
from tl_devicefix.fusing import fused
from tl_devicefix.hooked_transformer.components import POST_NORM, component_sizes
from tl_devicefix.hooked_transformer.config import Options, is_listed, model_config, official_name
from tl_devicefix.hooked_transformer.empty_model import empty_model
from tl_devicefix.hooked_transformer.moving import place
from tl_devicefix.hooked_transformer.processing import fill, installed_conventions
from tl_devicefix.hooked_transformer.twin import check_hooked_numbers
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.multihost.loading import loading_elsewhere
from tl_devicefix.multihost.remote_block import attach
from tl_devicefix.placement.deciding import DeviceMap, decide_fitting
from tl_devicefix.placement.devices import default_device, resolve
from tl_devicefix.placement.memory import MaxMemory, is_out_of_memory
from tl_devicefix.placement.workers import one_load
from tl_devicefix.twin import OnMismatch, chosen_action, refuse_extra_parts
from tl_devicefix.weight_processing import Steps

_log = logging.getLogger(__name__)


@patches(
    "HookedTransformer",
    takes="cls model_name fold_ln hf_model device n_devices dtype",
    why="load one component at a time, to its planned device, folded in float32; device_map and "
    "max_memory",
)
def from_pretrained(
    original: Callable[..., HookedTransformer],
    cls: type[HookedTransformer],
    *args: object,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    fuse_blocks: bool = False,
    on_mismatch: OnMismatch | None = None,
    **kwargs: object,
) -> HookedTransformer:
    """Load a model, its weights folded, on one device or across several.

    It takes every argument of the installed `HookedTransformer.from_pretrained`, and:

    Args:
        device_map: one of "balanced" (the same as "auto") and "sequential"; one device; or a dict
            from components ("embed", "blocks.3", "unembed") or prefixes to devices. Leave
            `n_devices` out.
        max_memory: the most that weights may take of each device: one size ("36GiB"), or a dict
            (`{0: "20GiB", 1: "40GiB"}`). All GPUs in the dict are used, unless `n_devices` or
            `device_map` says which; "cpu" in it allows offloading.
        fuse_blocks: run each block as one function; see `tl_devicefix.fuse_blocks`.
        on_mismatch: "warn" (the default), "refuse" or "ignore": what to do if the model would not
            give transformers' numbers. A tiny random model of the same config is checked before
            weights are read. "ignore" also skips the check for extra parts of `hf_model`. The
            environment variable TL_DEVICEFIX_ON_MISMATCH sets another default.

    `model_name` may also be a local directory with a Hugging Face checkpoint, or the hub name of
    a fine-tune that TransformerLens does not list. `revision`, `cache_dir`, `token` and
    `local_files_only` are as in transformers. `hf_model` may be on any devices, offloaded in part
    or whole, or quantised by bitsandbytes. It may be a PEFT model: its active adapters are merged
    as they are read. It is never changed. `n_devices=4` with `device="cuda:2"` means cuda:2 to
    cuda:5. The model's `placement` says where its components are.

    Weights are folded in float32 or wider, and rounded to `dtype` once. So in bfloat16 and float16,
    folding is as exact as the dtype allows. You need `from_pretrained_no_processing` only if
    weights must equal the checkpoint's bit for bit.

    Parameters are laid out as in the checkpoint, and blocks on one device share masks and rotary
    tables. torch.save keeps layout and sharing; safetensors refuses both, so give it copies:

        copied = {"device": "cpu", "copy": True, "memory_format": torch.contiguous_format}
        save_file({name: t.to(**copied) for name, t in model.state_dict().items()}, path)

    Raises:
        ValueError: one sentence saying what is wrong with the arguments or the checkpoint. No
            model is returned, and the arguments are unchanged.
        TypeError: if an argument's name is a near miss of one that exists.
        ImportError: if `hf_model` needs an optional library (peft, bitsandbytes).
        torch.OutOfMemoryError: saying which device was full, and what it held.
    """
    handled = id(sys.exc_info()[1])  # the caller's error, if one is being handled, is left alone
    try:
        arguments = bind_arguments(original, cls, *args, **kwargs)
        model = _load(cls, arguments, device_map, max_memory, on_mismatch)
    except BaseException as error:
        # Its frames would keep the loaded weights alive as long as the error.
        clear_frames(error, but_not=[handled])
        raise
    if fuse_blocks:
        fused.fuse_blocks(model)
    return model


def _load(
    cls: type[HookedTransformer],
    arguments: Options,
    device_map: DeviceMap | None,
    max_memory: MaxMemory | None,
    on_mismatch: OnMismatch | None,
) -> HookedTransformer:
    """Load a model; `arguments` are all those of `from_pretrained`."""
    hf_kwargs = arguments.pop("from_pretrained_kwargs", {})  # TransformerLens passes them on
    parameters = [*arguments, "device_map", "max_memory", "fuse_blocks", "on_mismatch"]
    refuse_unknown("from_pretrained", hf_kwargs, parameters, passes_on=True)
    dtype = torch_dtype(hf_kwargs.pop("torch_dtype", arguments["dtype"]))
    check_model(arguments["model_name"], arguments["hf_model"])
    arguments["model_name"] = os.fspath(arguments["model_name"])
    model_name = official_name(arguments["model_name"])
    _refuse_unsupported(model_name, arguments, hf_kwargs)

    cfg = _load_config(model_name, arguments, hf_kwargs, dtype)
    steps = applicable_steps(cfg, arguments)
    warning = check_load(model_name, cfg, arguments, steps, on_mismatch, hf_kwargs)
    n_devices, device = arguments["n_devices"], arguments["device"]
    placement = decide_fitting(component_sizes(cfg), n_devices, device, device_map, max_memory)
    if not arguments["move_to_device"]:
        placement = placement.gathered_on(torch.device("cpu"))
    placement = placement.local_part
    for_workers = {**arguments, **hf_kwargs, "dtype": dtype, "on_mismatch": "ignore"}
    load = "transformer_lens:HookedTransformer.from_pretrained"
    with loading_elsewhere(placement, load, model_name, for_workers, **hf_kwargs) as remotes:
        with one_load:  # loading replaces methods of classes meanwhile
            source = _open_source(model_name, cfg, arguments["hf_model"], dtype, hf_kwargs)
            hf_model = getattr(source, "hf_model", None)
            tokenizer, side = arguments["tokenizer"], arguments["default_padding_side"]
            with tokenizers_fetched_with(model_name, hf_kwargs):
                model = empty_model(cls, cfg, tokenizer, side, hf_model)
        fill(model, source, placement, steps)
    place(model, placement)  # the weights are on their devices, the buffers not yet
    attach(model, remotes)
    vars(model)["numbers_warning"] = warning
    if not arguments["move_to_device"]:
        # `move_model_modules_to_device` moves the weights there later.
        device = resolve(device) if isinstance(device, int) else device or default_device()
        model.cfg.device = str(device)
    print(f"Loaded pretrained model {arguments['model_name']} into HookedTransformer")
    return model


def bind_arguments(installed: Callable[..., Any], *args: object, **kwargs: object) -> Options:
    """Return the arguments by name, with the defaults of the installed `from_pretrained`."""
    bound = inspect.signature(installed).bind(*args, **kwargs)
    passed = set(bound.arguments)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if "n_devices" not in passed:
        arguments["n_devices"] = None  # so that max_memory may name the devices
    arguments.pop("cls")
    return arguments


def _refuse_unsupported(name: str, arguments: Options, hf_kwargs: Options) -> None:
    if hf_kwargs.get("load_in_8bit") or hf_kwargs.get("load_in_4bit"):
        raise ValueError(
            "HookedTransformer takes neither load_in_4bit nor load_in_8bit: load the quantised "
            "model with transformers and pass it as hf_model"
        )
    if (label := arguments.get("checkpoint_label")) is not None:
        if arguments["checkpoint_value"] is not None:
            raise ValueError(
                "checkpoint_value and checkpoint_label are one setting: give one, not both"
            )
        arguments["checkpoint_value"] = label
    chosen = arguments.get("checkpoint_index"), arguments.get("checkpoint_value")
    if chosen != (None, None) and not is_listed(name):
        raise ValueError(
            f"{name!r} is a single checkpoint: leave out checkpoint_index and checkpoint_value, "
            "which choose among the training checkpoints of a model that TransformerLens lists"
        )


def _load_config(
    model_name: str, arguments: Options, hf_kwargs: Options, dtype: torch.dtype
) -> HookedTransformerConfig:
    passed_on = (
        *("checkpoint_index", "checkpoint_value", "fold_ln", "default_prepend_bos"),
        *("first_n_layers", "n_ctx"),
    )
    options = {name: arguments[name] for name in passed_on if name in arguments}
    # Leave n_devices out: TransformerLens would require as many CUDA devices.
    options |= {"hf_model": arguments["hf_model"], "dtype": dtype, "device": "cpu"}
    return model_config(model_name, **options, **hf_kwargs)


def applicable_steps(cfg: HookedTransformerConfig, arguments: Mapping[str, Any]) -> Steps:
    """Return the requested steps without those that do not apply to this config."""
    steps = {name: arguments[name] for name in Steps.__dataclass_fields__ if name in arguments}
    refused: dict[str, str] = {}  # as TransformerLens's own `from_pretrained` refuses them
    if cfg.positional_embedding_type == "shortformer":
        for name in ("fold_ln", "center_unembed", "center_writing_weights"):
            refused[name] = "a shortformer model"
    if cfg.original_architecture in POST_NORM:
        for name in ("fold_ln", "center_writing_weights"):
            refused[name] = f"the post-norm architecture {cfg.original_architecture}"
    if (cfg.output_logits_soft_cap or 0) > 0:
        refused["center_unembed"] = "a model with a logit softcap"
    for name, reason in refused.items():
        if steps[name]:
            _log.warning("%s=True does not apply to %s: set to False", name, reason)
            steps[name] = False
    return Steps(**steps).applicable(cfg, installed_conventions())


def check_load(
    model_name: str,
    cfg: HookedTransformerConfig,
    arguments: Options,
    steps: Steps,
    on_mismatch: OnMismatch | None,
    hf_kwargs: Options,
    prefer_known: bool = False,
) -> str | None:
    """Check a tiny model of the same config, and return the warning, if any.

    With `prefer_known`, a config in known_configs.json is not fetched.
    """
    if chosen_action(on_mismatch) == "ignore" or has_own_format(model_name):
        return None
    if arguments["hf_model"] is None:
        hf_config = known_config(model_name) if prefer_known else None
        if hf_config is None:
            trusted = {"trust_remote_code": cfg.trust_remote_code}
            hf_config = read_config(model_name, **trusted, **hub_arguments(hf_kwargs))
        return check_hooked_numbers(hf_config, cfg, steps, on_mismatch)
    model: Any = unwrap(arguments["hf_model"])
    n_layers = getattr(model.config, "text_config", model.config).num_hidden_layers
    if n_layers > cfg.n_layers and arguments.get("first_n_layers") is None:
        raise ValueError(
            f"hf_model has {n_layers} layers, but {model_name!r} has {cfg.n_layers}, so the "
            f"last {n_layers - cfg.n_layers} would be left out: give the model's own name or "
            f"directory, or first_n_layers={cfg.n_layers}"
        )
    refuse_extra_parts(model)
    hf_class = class_in_transformers(model)
    return check_hooked_numbers(model.config, cfg, steps, on_mismatch, hf_class)


def has_own_format(model_name: str) -> bool:
    """Return True for a checkpoint in HookedTransformer's format, not in transformers'."""
    own = ("NeelNanda", "ArthurConmy", "Baidicoot")  # as in TransformerLens
    return is_listed(model_name) and model_name.startswith(own)


def _open_source(
    model_name: str,
    cfg: HookedTransformerConfig,
    hf_model: nn.Module | None,
    dtype: torch.dtype,
    hf_kwargs: Options,
) -> Source:
    if hf_model is not None:
        return HuggingFaceSource(hf_model, cfg)
    if has_own_format(model_name):
        # Read in float32 at least: rounding comes once, after folding.
        hf_kwargs = {**hf_kwargs, "dtype": torch.promote_types(dtype, torch.float32)}
        return StateDictSource(tl_loading.get_pretrained_state_dict(model_name, cfg, **hf_kwargs))
    return HuggingFaceSource(load_hf_model(model_name, cfg, **hf_kwargs), cfg)


def load_hf_model(model_name: str, cfg: HookedTransformerConfig, **kwargs: Any) -> nn.Module:
    """Load a checkpoint on the CPU, each tensor in the dtype in which it is stored."""
    is_directory = is_checkpoint_directory(model_name)
    if not is_directory and model_name in tl_loading.NON_HF_HOSTED_MODEL_NAMES:
        raise ValueError(f"{model_name} is not on the hub: load it yourself and pass hf_model=...")
    if "revision" not in kwargs and cfg.from_checkpoint:
        # TransformerLens names the revisions of its two families with training checkpoints.
        is_stanfords = model_name.startswith("stanford-crfm")
        kwargs["revision"] = f"{'checkpoint-' if is_stanfords else 'step'}{cfg.checkpoint_value}"
    kwargs.setdefault("token", os.environ.get("HF_TOKEN") or None)
    # A directory may have a listed name by chance, so it gets no trust_remote_code.
    listed = not is_directory and model_name in tl_loading.OFFICIAL_MODEL_NAMES
    if listed and model_name.startswith(tuple(tl_loading.NEED_REMOTE_CODE_MODELS)):
        kwargs.setdefault("trust_remote_code", True)
    multimodal = cfg.original_architecture == "Gemma3ForConditionalGeneration"
    auto: Any = AutoModel if multimodal else AutoModelForCausalLM
    try:
        with dtypes_as_stored():
            model, report = auto.from_pretrained(
                model_name,
                dtype="auto",
                output_loading_info=True,
                # Wrong shapes are reported, and refused below with the rest.
                ignore_mismatched_sizes=True,
                **kwargs,
            )
    except UNREADABLE as error:
        if is_out_of_memory(error) or is_own_bug(error):
            raise
        stored_tensors(model_name, kwargs)  # raises an error that names a damaged file
        raise ValueError(
            f"transformers cannot read the checkpoint {model_name!r}: {in_one_line(error)}"
        ) from error
    check_report(report, model_name, kwargs, model, refuse_unexpected=True)
    return model.requires_grad_(False)
