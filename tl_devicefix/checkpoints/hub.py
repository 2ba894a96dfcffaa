"""Checkpoints by name, on the Hugging Face hub or in a directory: tokenizers, configs and dtypes.

known_configs.json has those fields of common models' configs that TransformerLens reads. Only
planning uses it: a checkpoint's own config may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.utils import cached_file

from tl_devicefix.errors import did_you_mean, is_own_bug, shown
from tl_devicefix.monkeypatch.applying import replaced_in_thread
from tl_devicefix.placement.memory import is_out_of_memory

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
"""A checkpoint with any of these has a tokenizer."""

_OF_ACCESS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
HUB_ARGUMENTS = ("revision", "subfolder", *_OF_ACCESS)
"""Arguments of `from_pretrained` that say which files to fetch, and how."""


def hub_arguments(kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Return those of `HUB_ARGUMENTS` that are given."""
    return {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}


def in_one_line(error: BaseException) -> str:
    """Return an error's message in one line, with its type if that says more."""
    text = " ".join(str(error).split())
    speaks = isinstance(error, (OSError, RuntimeError, ValueError))
    return text if speaks and text else f"{type(error).__name__}: {text}"


def is_checkpoint_directory(model_name: str) -> bool:
    """Return True if this is the path of a local directory with a Hugging Face checkpoint."""
    return (Path(model_name) / "config.json").is_file()


def check_model(model_name: object, hf_model: object) -> None:
    """Refuse a model in place of its name, and a name in place of a model."""
    if not isinstance(model_name, str | os.PathLike):
        raise TypeError(
            f"model_name must be a name or a directory, but is {shown(model_name)}: pass a model "
            "that transformers has loaded as hf_model, along with its name"
        )
    if hf_model is not None and not hasattr(hf_model, "config"):
        raise TypeError(
            f"hf_model must be a model that transformers has loaded, but is {shown(hf_model)}: "
            "pass a name or a directory as model_name"
        )


def refuse_directory(model_name: str) -> None:
    """Refuse a local directory that does not exist, or that has no checkpoint."""
    directory = Path(model_name)
    # No name on the hub looks like this.
    is_path = model_name.startswith(("/", ".", "~")) or model_name.count("/") > 1
    if is_path and not directory.exists():
        raise ValueError(f"there is no directory {model_name!r}: give one with a checkpoint")
    if not directory.is_dir() or is_checkpoint_directory(model_name):
        return
    if (directory / "adapter_config.json").is_file():
        raise ValueError(
            f"the directory {model_name!r} has a PEFT adapter and no model: load both with "
            "peft.AutoPeftModelForCausalLM.from_pretrained(...), and pass that as hf_model "
            "along with the base model's name"
        )
    raise ValueError(
        f"the directory {model_name!r} has no config.json, so it is not a Hugging Face "
        "checkpoint; save one there with hf_model.save_pretrained(...)"
    )


def snapshot(name: str, listed: Collection[str] = (), **kwargs: object) -> Path:
    """Fetch a checkpoint's config.json and return its folder; errors suggest a name in `listed`."""
    try:
        config: Any = cached_file(name, "config.json", **hub_arguments(kwargs))
        return Path(config).parent
    except (OSError, ValueError) as error:
        raise not_fetched(name, listed, error) from error


def not_fetched(name: str, listed: Collection[str], error: Exception) -> ValueError:
    """Return the error for a config.json that cannot be fetched; it suggests a name in `listed`."""
    if name in listed:
        return ValueError(
            f"the config of {name!r} cannot be fetched: check the connection, or give a local "
            f"directory with its config.json: {in_one_line(error)}"
        )
    meant = did_you_mean(name, listed, 0.85 if "/" in name else 0.6)
    return ValueError(
        f"{name!r} is neither a model that TransformerLens lists nor a local directory"
        f"{meant + ' It' if meant else ', and it'} cannot be fetched from the hub: "
        f"{in_one_line(error)}"
    )


def has_tokenizer(name: str, **kwargs: object) -> bool:
    """Return True if a checkpoint, in a directory or on the hub, has a tokenizer."""
    return any(
        cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **hub_arguments(kwargs),
        )
        for file in _TOKENIZER_FILES
    )


@contextlib.contextmanager
def tokenizers_fetched_with(model_name: str, kwargs: Mapping[str, object]) -> Iterator[None]:
    """Fetch tokenizers with the model's hub arguments, within a `with` block.

    `revision` and `subfolder` apply only to the model's own repository, the rest (`cache_dir`,
    `token`, ...) to every repository.
    """
    options = hub_arguments(kwargs)

    def fetch(original: Callable[..., object], name: str, **own: object) -> object:
        own |= {k: v for k, v in options.items() if k in _OF_ACCESS or name == model_name}
        return original(name, **own)

    # Replace the class's method: TransformerLens fetches tokenizers in several modules.
    with replaced_in_thread(AutoTokenizer, "from_pretrained", fetch):
        yield


def read_config(name: str, **kwargs: Any) -> PretrainedConfig:
    """Return a checkpoint's config, as transformers reads it."""
    with reading_config(name):
        config = as_saved(AutoConfig.from_pretrained(name, **kwargs))
        if not isinstance(architectures := config.architectures or [], list):
            raise ValueError(f"architectures must be a list of names, but is {architectures!r}")
        return config


_READS_ROPE_PARAMETERS = Version(transformers.__version__) >= Version("5.dev0")


def as_saved(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with its rotary settings where the installed transformers reads them."""
    # transformers 5 saves them in `rope_parameters`. transformers 4 ignores that, so it and
    # TransformerLens 2 would use defaults.
    text: Any = getattr(config, "text_config", config)
    rope = getattr(text, "rope_parameters", None)
    if _READS_ROPE_PARAMETERS or not rope:
        return config
    scaling = dict(rope.get("full_attention", rope))  # Gemma 3 has one per layer type
    theta, partial = scaling.pop("rope_theta", None), scaling.pop("partial_rotary_factor", None)
    settings = {
        "rope_theta": theta,
        "rotary_emb_base": theta,  # GPT-NeoX's name, like rotary_pct below
        "partial_rotary_factor": partial,
        "rotary_pct": partial,
        "rope_local_base_freq": rope.get("sliding_attention", {}).get("rope_theta"),
    }
    for name, value in settings.items():
        if value is not None and hasattr(text, name):
            setattr(text, name, value)
    text.rope_scaling = None if scaling.get("rope_type") == "default" else scaling
    return config


@contextlib.contextmanager
def reading_config(name: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Within a `with` block, turn errors from a config.json's values into one sentence."""
    try:
        yield
    except (ImportError, NotImplementedError):  # the config itself is fine
        raise
    except errors as error:
        if is_out_of_memory(error) or is_own_bug(error):
            raise
        # huggingface_hub's strict dataclasses hide the reason in the cause.
        is_strict = type(error).__name__.startswith("StrictDataclass")
        cause = (is_strict and error.__cause__) or error
        advice = "check its name, the connection and the values"
        if is_checkpoint_directory(name):
            advice = "correct it, or fetch it again"
        raise ValueError(
            f"config.json of {name!r} cannot be read ({in_one_line(cause)}); {advice}"
        ) from error


def known_config(name: str) -> PretrainedConfig | None:
    """Return a model's config from known_configs.json; None if it is not there."""
    if name not in known_fields():
        return None
    fields = dict(known_fields()[name])
    model_type = fields.pop("model_type")
    if model_type in CONFIG_MAPPING:
        return AutoConfig.for_model(model_type, **fields)
    return PretrainedConfig(**fields)  # Qwen 1, whose class comes with its checkpoint


@cache
def known_fields() -> dict[str, dict[str, Any]]:
    """Return known_configs.json: a model's name -> fields of its config. Do not change them."""
    entries = json.loads((Path(__file__).parent / "known_configs.json").read_text())
    fields: dict[str, dict[str, Any]] = {}
    for entry in entries:  # with `like`, it lists only the differences from that model
        like = fields[entry["like"]] if "like" in entry else {}
        for name in entry["names"]:
            fields[name] = {**like, **entry["config"]}
    return fields


_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype, or the one of this name ("bfloat16", "bf16", "torch.bfloat16")."""
    named: object = dtype
    if isinstance(dtype, str):
        named = _SHORT.get(dtype, getattr(torch, dtype.removeprefix("torch."), None))
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(
            "dtype must be a floating-point torch.dtype or its name, such as 'bfloat16' or "
            f"'fp16', but is {shown(dtype)}"
        )
    return named
