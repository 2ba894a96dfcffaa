"""The HookedTransformerConfig of a model that TransformerLens lists, or of any checkpoint.

TransformerLens guesses the architecture and sizes from parts of the name ("llama", "gemma-2"). A
local directory or a fine-tune on the hub may have any name, so we read its config.json.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformer_lens.loading_from_pretrained as tl_loading
from torch import nn
from transformer_lens import HookedTransformerConfig
from transformers import AutoConfig, PretrainedConfig

from tl_devicefix.checkpoints.hub import (
    as_saved,
    has_tokenizer,
    hub_arguments,
    is_checkpoint_directory,
    known_config,
    not_fetched,
    read_config,
    reading_config,
    refuse_directory,
    snapshot,
)
from tl_devicefix.checkpoints.live_weights import class_in_transformers, unwrap
from tl_devicefix.errors import did_you_mean
from tl_devicefix.hooked_transformer.components import component_sizes
from tl_devicefix.monkeypatch.applying import replaced_in_thread
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.placement.devices import consecutive, resolve, simulated_device
from tl_devicefix.placement.workers import one_load

_log = logging.getLogger(__name__)

Options = dict[str, Any]
"""Arguments of TransformerLens's loaders, or fields of its config, by name."""


def model_config(
    model_name: str, prefer_known: bool = False, hf_model: nn.Module | None = None, **kwargs: Any
) -> HookedTransformerConfig:
    """Return the HookedTransformerConfig for `model_name`, with one device.

    Args:
        model_name: a name that TransformerLens lists, a local checkpoint directory, or the name of
            another checkpoint on the hub.
        prefer_known: if known_configs.json has this model's config, use that and fetch nothing.
            This is for planning: a load always reads the checkpoint's own config.
        hf_model: a live model to load under this name. Its config is used, except for names
            whose sizes are in TransformerLens's code, such as Llama 2's.
        kwargs: as for `transformer_lens.loading_from_pretrained.get_pretrained_model_config`.

    Raises:
        ValueError: if the name is none of these, its config cannot be fetched, or TransformerLens
            lacks the architecture.
    """
    hf_config = None
    if hf_model is not None:
        hf_config = _config_of_live(hf_model)
        # TransformerLens reads the vocabulary size from this; multimodal configs nest it.
        kwargs["hf_cfg"] = getattr(hf_config, "text_config", hf_config).to_dict()
    if is_checkpoint_directory(model_name):
        return _config_of_directory(os.fspath(model_name), kwargs, hf_config=hf_config)
    name = official_name(model_name)
    if prefer_known and (hf_config := known_config(name)) is not None:
        _log.info("the sizes of %s are those that tl_devicefix lists: nothing was fetched", name)
    if is_listed(name):
        return _config_by_name(name, hf_config, **kwargs)
    if prefer_known and hf_config is not None:  # a model that TransformerLens does not list
        with tempfile.TemporaryDirectory() as directory:
            hf_config.save_pretrained(directory)
            cfg = _config_of_directory(directory, kwargs)
        cfg.model_name, cfg.tokenizer_name = name.rpartition("/")[2], None
        return cfg
    cfg = _config_of_directory(
        str(snapshot(name, tl_loading.OFFICIAL_MODEL_NAMES, **kwargs)), kwargs, name, hf_config
    )
    cfg.model_name = name.rpartition("/")[2]
    cfg.tokenizer_name = name if has_tokenizer(name, **kwargs) else None
    return cfg


def _config_of_live(hf_model: nn.Module) -> PretrainedConfig:
    """Return a live model's config with its architecture filled in, without quantisation."""
    model = unwrap(hf_model)
    config: Any = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights arrive dequantised
    name = class_in_transformers(model).__name__
    # The name of a base class, such as LlamaModel, is no architecture: keep the config's, if any.
    if not config.architectures or re.search(r"For[A-Z]|LMHead", name):
        config.architectures = [name]
    return config


def official_name(model_name: str) -> str:
    """Return the name that TransformerLens lists a model by; other names unchanged."""
    if is_checkpoint_directory(model_name):
        return model_name
    official = tl_loading.make_model_alias_map().get(model_name.lower())
    if official is not None:
        return official
    refuse_directory(model_name)
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model_name):
        return model_name
    meant = did_you_mean(model_name, tl_loading.make_model_alias_map())
    raise ValueError(
        f"TransformerLens lists no model {model_name!r}, and it is neither a local checkpoint "
        f"directory nor a name on the hub (organisation/model){meant}"
    )


def is_listed(model_name: str) -> bool:
    """Return True if TransformerLens lists a model by this name."""
    return model_name.lower() in tl_loading.make_model_alias_map()


def _config_by_name(
    name: str, hf_config: PretrainedConfig | None = None, token: object = None, **kwargs: Any
) -> HookedTransformerConfig:
    """Return TransformerLens's config for a name, read from `hf_config` or else the hub."""
    read = functools.partial(_config_for_transformer_lens, hf_config, token)
    try:
        with one_load, replaced_in_thread(AutoConfig, "from_pretrained", read):
            cfg = tl_loading.get_pretrained_model_config(name, **kwargs)
    except OSError as error:
        raise not_fetched(name, [name], error) from error
    architecture = str(cfg.original_architecture)
    if architecture in _OTHER_CLASSES:
        raise ValueError(
            f"{name!r} holds a {architecture}: load it with {_OTHER_CLASSES[architecture]}"
        )
    if architecture == "GemmaForCausalLM" and cfg.act_fn == "gelu":
        cfg.act_fn = "gelu_pytorch_tanh"  # TransformerLens 3 has the exact GELU
    if architecture == "Gemma2ForCausalLM":  # TransformerLens before 3.8 has "global" first
        cfg.attn_types = [("local", "global")[layer % 2] for layer in range(cfg.n_layers)]
    return cfg


class _UnguessedPath(str):
    """A path from which TransformerLens cannot guess an architecture."""

    def lower(self) -> str:
        return ""

    def startswith(self, *_: object) -> bool:
        return False

    def __contains__(self, _: object) -> bool:
        return False


# Architectures that TransformerLens configures only by an official name: start from the config of
# that name, and replace its sizes with those in config.json.
_CONFIGURED_BY_NAME = {
    "GemmaForCausalLM": "google/gemma-2b",
    "Gemma2ForCausalLM": "google/gemma-2-2b",
    "Gemma3ForCausalLM": "google/gemma-3-1b-pt",
    "Gemma3ForConditionalGeneration": "google/gemma-3-4b-it",
    "OlmoForCausalLM": "allenai/OLMo-1B-hf",
    "Olmo2ForCausalLM": "allenai/OLMo-2-0425-1B",
}

# Architectures that TransformerLens converts for classes other than HookedTransformer.
_OTHER_CLASSES = {
    "T5ForConditionalGeneration": "HookedEncoderDecoder",
    "BertForMaskedLM": "HookedEncoder",
    "HubertModel": "HookedAudioEncoder",
    "HubertForCTC": "HookedAudioEncoder",
    "Wav2Vec2Model": "HookedAudioEncoder",
}


def _config_of_directory(
    path: str, kwargs: Options, on_hub: str | None = None, hf_config: PretrainedConfig | None = None
) -> HookedTransformerConfig:
    """Return the config of a checkpoint directory; `kwargs` are as for `model_config`.

    `on_hub` is its name on the hub, if it was fetched; `hf_config` a live model's config, to use in
    place of the directory's.
    """
    called, fetching = on_hub or path, hub_arguments(kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in fetching}
    # Read it by the hub's name: the directory has no code of the checkpoint yet, only config.json.
    trusted = kwargs.get("trust_remote_code", False)
    fetched = fetching if on_hub else {}
    hf_config = hf_config or read_config(called, trust_remote_code=trusted, **fetched)
    architecture = (hf_config.architectures or [""])[0]
    if not architecture:
        raise ValueError(f"config.json in {called!r} names no architecture: add 'architectures'")
    try:
        with reading_config(called):
            cfg = _config_of_architecture(architecture, hf_config, path, kwargs)
            component_sizes(cfg)  # raises if TransformerLens cannot build the modules
    except NotImplementedError as error:
        raise ValueError(
            f"{called!r} holds a {architecture}, which TransformerLens {installed()} cannot "
            "convert to a HookedTransformer: try TransformerBridge (3.9 or later)"
        ) from error
    cfg.load_in_4bit = False  # packed weights arrive dequantised
    cfg.trust_remote_code = trusted  # TransformerLens sets True for some architectures
    cfg.original_architecture = architecture
    cfg.model_name = Path(path).resolve().name
    cfg.tokenizer_name = path if has_tokenizer(path) else None
    return cfg


def _config_of_architecture(
    architecture: str, hf_config: PretrainedConfig, path: str, kwargs: Options
) -> HookedTransformerConfig:
    """Convert transformers' config of an architecture."""
    if architecture in _CONFIGURED_BY_NAME:
        if _CONFIGURED_BY_NAME[architecture] not in tl_loading.OFFICIAL_MODEL_NAMES:
            raise NotImplementedError  # TransformerLens's error for unknown architectures
        cfg = _config_by_name(_CONFIGURED_BY_NAME[architecture], hf_config, **kwargs)
        sizes = _olmo_sizes if architecture.startswith("Olmo") else _gemma_sizes
        text_config = getattr(hf_config, "text_config", hf_config)
        # The caller's choices override config.json.
        chosen = {"n_layers": kwargs.get("first_n_layers"), "n_ctx": kwargs.get("n_ctx")}
        overrides = sizes(text_config)
        overrides |= {name: size for name, size in chosen.items() if size is not None}
    else:
        cfg = _config_by_name(_UnguessedPath(path), hf_config, **kwargs)
        overrides = overlooked(architecture, hf_config)
    return type(cfg).from_dict({**cfg.to_dict(), **overrides})


def _config_for_transformer_lens(
    hf_config: Any,
    token: object,
    original: Callable[..., PretrainedConfig],
    /,
    *args: object,
    **kwargs: object,
) -> PretrainedConfig:
    """Replace `AutoConfig.from_pretrained`; add the fields that TransformerLens reads."""
    if token is not None:
        kwargs["token"] = token
    hf_config = hf_config or as_saved(original(*args, **kwargs))
    # TransformerLens 2.x reads GPT-2's n_ctx, which transformers no longer saves. 3.9 reads Phi's
    # partial_rotary_factor, which transformers 5 keeps in rope_parameters.
    if hf_config.model_type == "gpt2" and not hasattr(hf_config, "n_ctx"):
        hf_config.n_ctx = hf_config.n_positions
    if hf_config.model_type == "apertus":  # transformers always has these norms
        hf_config.qk_norm = True
    rope = getattr(hf_config, "rope_parameters", None) or {}
    if "partial_rotary_factor" in rope and not hasattr(hf_config, "partial_rotary_factor"):
        hf_config.partial_rotary_factor = rope["partial_rotary_factor"]
    return hf_config


@patches(
    "HookedTransformerConfig",
    "__post_init__",
    takes="self",
    why="n_devices counts devices of the config's own type",
    until="3",
)
def config_post_init(original: Callable[..., None], self: HookedTransformerConfig) -> None:
    """Wrap `HookedTransformerConfig.__post_init__`, which counts CUDA devices for any device.

    Within `tl_devicefix.simulate`, `n_devices` > 1 defaults to simulated devices.

    Raises:
        ValueError: if there are not `n_devices` devices of the config's own type.
    """
    n_devices, self.n_devices = self.n_devices, 1
    if self.device is None and n_devices > 1 and simulated_device() is not None:
        self.device = str(simulated_device())
    original(self)
    self.n_devices = n_devices
    if n_devices > 1:
        consecutive(resolve(self.device), n_devices)


def overlooked(architecture: str, hf_config: PretrainedConfig) -> Options:
    """Return settings from config.json that some TransformerLens versions set to a default."""
    if architecture == "LlamaForCausalLM":
        return _rope(hf_config)
    if architecture == "GPTNeoXForCausalLM":
        return {**_rope(hf_config), "parallel_attn_mlp": hf_config.use_parallel_residual}
    if architecture == "GPT2LMHeadModel":
        name = "scale_attn_by_inverse_layer_idx"
        return {name: getattr(hf_config, name, False)}
    return {}


def _named_sizes(hf_config: PretrainedConfig, d_head: int) -> Options:
    """Return the sizes that OLMo's and Gemma's configs name alike."""
    return {
        "d_model": hf_config.hidden_size,
        "d_head": d_head,
        "n_heads": hf_config.num_attention_heads,
        "d_mlp": hf_config.intermediate_size,
        "n_layers": hf_config.num_hidden_layers,
        "n_ctx": hf_config.max_position_embeddings,
        "d_vocab": hf_config.vocab_size,
        "d_vocab_out": hf_config.vocab_size,
        "rotary_dim": d_head,
        "attn_scale": d_head**0.5,
    }


def _olmo_sizes(hf_config: PretrainedConfig) -> Options:
    """Return the sizes of an OLMo or OLMo 2, by TransformerLens's names."""
    return {
        **_named_sizes(hf_config, hf_config.hidden_size // hf_config.num_attention_heads),
        "eps": getattr(hf_config, "rms_norm_eps", 1e-5),  # fixed in OLMo's LayerNorm
        "act_fn": hf_config.hidden_act,
        "attn_types": ["global"] * hf_config.num_hidden_layers,
        **_rope(hf_config),
    }


def _gemma_sizes(hf_config: PretrainedConfig) -> Options:
    """Return the sizes of a Gemma, by TransformerLens's names."""
    sizes = {
        **_named_sizes(hf_config, hf_config.head_dim),
        "act_fn": _gemma_activation(hf_config),
        "n_key_value_heads": hf_config.num_key_value_heads,
        "n_ctx": min(hf_config.max_position_embeddings, 8192),
        "eps": hf_config.rms_norm_eps,
        **_gemma_rope(hf_config),
    }
    if getattr(hf_config, "query_pre_attn_scalar", None) is not None:
        sizes["attn_scale"] = hf_config.query_pre_attn_scalar**0.5
    # -1 means no cap. In transformers, only Gemma 2 caps scores.
    scores_cap = hf_config.model_type == "gemma2" and hf_config.attn_logit_softcapping
    sizes["attn_scores_soft_cap"] = scores_cap or -1.0
    sizes["output_logits_soft_cap"] = getattr(hf_config, "final_logit_softcapping", None) or -1.0
    if getattr(hf_config, "layer_types", None) is not None:
        sizes["window_size"] = hf_config.sliding_window
        sizes["attn_types"] = [
            "local" if kind == "sliding_attention" else "global" for kind in hf_config.layer_types
        ]
    return sizes


def _gemma_activation(hf_config: PretrainedConfig) -> str:
    """Return the activation of a Gemma; Gemma 1's config has an older field for it."""
    if hf_config.model_type != "gemma":
        return str(hf_config.hidden_activation)
    # The first checkpoints say "gelu" but mean its approximation, which transformers 5 uses.
    activation = str(hf_config.hidden_act)
    return "gelu_pytorch_tanh" if activation == "gelu" else activation


def _gemma_rope(hf_config: PretrainedConfig) -> Options:
    """Return the rotary bases of a Gemma; Gemma 3 has a second one for local attention."""
    # transformers 5 has the bases in rope_parameters: for Gemma 3, one dict per kind of attention.
    rope = getattr(hf_config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope) or getattr(hf_config, "rope_scaling", None) or {}
    local = rope.get("sliding_attention", {}).get("rope_theta")
    bases = {
        "rotary_base": full.get("rope_theta") or getattr(hf_config, "rope_theta", None),
        "rotary_base_local": local or getattr(hf_config, "rope_local_base_freq", None),
    }
    settings = {name: int(value) for name, value in bases.items() if value is not None}
    settings["rotary_scaling_factor"] = full.get("factor", 1.0)
    return {name: value for name, value in settings.items() if name in _config_fields()}


def _rope(hf_config: PretrainedConfig) -> Options:
    """Return the rotary settings; TransformerLens has a default base for unlisted models."""
    # transformers 5 keeps all in rope_parameters, 4 in rope_theta and rope_scaling.
    rope = getattr(hf_config, "rope_parameters", None) or {}
    rope = {**(getattr(hf_config, "rope_scaling", None) or {}), **rope}
    theta = rope.get("rope_theta", getattr(hf_config, "rope_theta", None))
    theta = theta or getattr(hf_config, "rotary_emb_base", None)
    settings: Options = {} if theta is None else {"rotary_base": theta}
    if rope.get("rope_type", rope.get("type")) == "llama3":
        settings |= {
            "use_NTK_by_parts_rope": True,
            "NTK_by_parts_low_freq_factor": rope["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": rope["high_freq_factor"],
            "NTK_by_parts_factor": rope["factor"],
        }
        if "NTK_original_ctx_len" in _config_fields():
            settings["NTK_original_ctx_len"] = rope["original_max_position_embeddings"]
    return settings


def _config_fields() -> set[str]:
    return {field.name for field in dataclasses.fields(HookedTransformerConfig)}
