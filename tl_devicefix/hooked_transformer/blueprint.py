"""The blueprint of a HookedTransformer: its config, and a model without values made from it."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import transformer_lens
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.loading_from_pretrained import get_pretrained_model_config
from transformers import PreTrainedTokenizerBase

from tl_devicefix.checkpoints.hub import HUB_ARGUMENTS, torch_dtype
from tl_devicefix.fusing.kv_cache import drop_room
from tl_devicefix.hooked_transformer.components import component_sizes
from tl_devicefix.hooked_transformer.config import Options, model_config, official_name
from tl_devicefix.hooked_transformer.empty_model import empty_model
from tl_devicefix.hooked_transformer.loading import applicable_steps, bind_arguments, check_load
from tl_devicefix.hooked_transformer.moving import place
from tl_devicefix.monkeypatch.applying import original
from tl_devicefix.placement.fitting import working_room
from tl_devicefix.placement.placement import ComponentSize, Placement
from tl_devicefix.twin import OnMismatch

HookedConfigOrName = HookedTransformerConfig | str | os.PathLike[str]


class HookedBlueprint:
    """A HookedTransformer as `from_pretrained` would load it."""

    def __init__(
        self,
        config_or_model_name: HookedConfigOrName,
        dtype: torch.dtype | str | None,
        options: Options,
        model_class: type[HookedTransformer] | None = None,
    ) -> None:
        cfg = self._cfg = _config_at_full_size(config_or_model_name, dtype, options)
        self.name = str(getattr(config_or_model_name, "model_name", config_or_model_name))
        self._is_named = isinstance(config_or_model_name, str | os.PathLike)
        self._cls, self._options = model_class or HookedTransformer, options
        self.dtype, self.n_ctx, self.n_layers = cfg.dtype, cfg.n_ctx, cfg.n_layers

    def sizes(self) -> tuple[ComponentSize, ...]:
        """Return the sizes of its components, in the order they run."""
        return component_sizes(self._cfg)

    def make(
        self, placement: Placement, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> HookedTransformer:
        """Make the model across simulated devices, in the memory layout of a load."""
        cfg = copy.deepcopy(self._cfg)
        if tokenizer is None and not Path(cfg.tokenizer_name or "").is_dir():
            cfg.tokenizer_name = None  # otherwise the hub is asked
        model = empty_model(self._cls, cfg, tokenizer)
        for name, parameter in list(model.named_parameters()):
            device = placement.device_for(name, is_weight=True)
            values = _empty_as_loaded(name, parameter.data, cfg.original_architecture, device)
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = torch.nn.Parameter(values)
        place(model, placement)  # moves the buffers, and registers the forward hooks
        return model

    def check_numbers(self, on_mismatch: OnMismatch | None) -> None:
        """Warn if a load with these options would not give transformers' numbers."""
        if not self._is_named:
            return  # a HookedTransformerConfig has no counterpart in transformers
        installed = original(HookedTransformer, "from_pretrained").__func__
        arguments = bind_arguments(installed, HookedTransformer, self.name) | self._options
        steps, name = applicable_steps(self._cfg, arguments), official_name(self.name)
        check_load(name, self._cfg, arguments, steps, on_mismatch, self._options, prefer_known=True)

    def room_to_load(self, placement: Placement) -> int:
        """Return the most bytes that a load needs on a device beyond the weights: two slices."""
        return working_room(placement, self.dtype)

    def cpu_to_load(self, placement: Placement) -> int:
        """Return 0: a load needs no CPU memory beyond the offloaded blocks."""
        return 0

    @staticmethod
    def generate(model: HookedTransformer, batch_size: int, seq_len: int, n_cached: int) -> None:
        """Run a prompt, and then one token with a KV cache of `n_cached` tokens."""
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.long, device=model.cfg.device)
        mask = torch.ones_like(tokens)  # otherwise TransformerLens would make one by the tokenizer
        # TransformerLens 3 renamed the class.
        in_2 = getattr(transformer_lens, "HookedTransformerKeyValueCache", None)
        kv_cache_class = in_2 or transformer_lens.TransformerLensKeyValueCache
        kv_cache = kv_cache_class.init_cache(model.cfg, model.cfg.device, batch_size)
        model(tokens, past_kv_cache=kv_cache, attention_mask=mask)
        # No name may keep a tensor that the KV cache no longer has.
        kv_cache.previous_attention_mask = kv_cache.previous_attention_mask.new_ones(
            batch_size, n_cached
        )
        for entry in kv_cache.entries:
            batch, _, *heads = entry.past_keys.shape  # [batch, pos, kv_head, d_head]
            entry.past_keys = entry.past_keys.new_empty(batch, n_cached, *heads)
            entry.past_values = entry.past_values.new_empty(batch, n_cached, *heads)
            drop_room(entry)
        model(tokens[:, :1], past_kv_cache=kv_cache, attention_mask=mask[:, :1])


def option_names(config_or_model_name: HookedConfigOrName) -> Sequence[str]:
    """Return the arguments of `from_pretrained` that planning takes for a named model."""
    if not isinstance(config_or_model_name, str | os.PathLike):
        return ()
    takes = inspect.signature(get_pretrained_model_config).parameters
    config_options = [name for name in takes if name not in _SET_ELSEWHERE]
    return (*config_options, *HUB_ARGUMENTS, "trust_remote_code", *_NO_EFFECT_ON_SIZE)


_SET_ELSEWHERE = ("model_name", "device", "n_devices", "dtype", "kwargs")
_NO_EFFECT_ON_SIZE = (
    *("center_writing_weights", "center_unembed", "fold_value_biases"),
    *("refactor_factored_attn_matrices", "default_padding_side", "checkpoint_label"),
)
"""Arguments of `from_pretrained` that change no size."""


def _config_at_full_size(
    config_or_model_name: HookedConfigOrName, dtype: torch.dtype | str | None, options: Options
) -> HookedTransformerConfig:
    """Return the config that `from_pretrained` would make with these options."""
    if isinstance(config_or_model_name, str | os.PathLike):
        weight_dtype = torch.float32 if dtype is None else torch_dtype(dtype)
        sized = {name: value for name, value in options.items() if name not in _NO_EFFECT_ON_SIZE}
        options = {"fold_ln": True, **sized}
        name = os.fspath(config_or_model_name)
        return model_config(name, prefer_known=True, dtype=weight_dtype, device="cpu", **options)
    if not hasattr(config_or_model_name, "n_layers"):
        raise ValueError(
            f"a {type(config_or_model_name).__name__} is neither a model's name, nor a checkpoint "
            "directory, nor a HookedTransformerConfig"
        )
    cfg = copy.deepcopy(config_or_model_name)
    cfg.dtype = cfg.dtype if dtype is None else torch_dtype(dtype)
    cfg.device, cfg.n_devices = "cpu", 1  # the placement decides
    return cfg


_OF_LINEAR = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "_W_K", "_W_V"), (0, 2, 1)),
    "W_O": (2, 0, 1),
    **dict.fromkeys(("W_in", "W_gate", "W_out", "W_U"), (1, 0)),
}
"""Parameter -> its dimensions in memory order, outermost first, if it was an nn.Linear."""

_OF_CONV1D = {**dict.fromkeys(("W_Q", "W_K", "W_V"), (1, 0, 2)), "W_U": (1, 0)}
"""The same for parameters from transformers' Conv1D, whose weight is transposed."""


def _empty_as_loaded(
    name: str, like: torch.Tensor, architecture: str | None, device: torch.device
) -> torch.Tensor:
    """Make a parameter without values in the memory layout of a load.

    `architecture` is None for a model without a checkpoint.
    """
    # A load keeps the checkpoint's layout (`weight_processing/slices.py`): most parameters are
    # transposed views of it. The layout decides what TransformerLens's forward copies, and so
    # how much memory it takes.
    orders = _OF_CONV1D if architecture == "GPT2LMHeadModel" else _OF_LINEAR
    order = orders.get(name.rpartition(".")[2]) if architecture else None
    if order is None or len(order) != like.dim():
        return torch.empty_like(like, device=device)
    stored = torch.empty([like.shape[d] for d in order], dtype=like.dtype, device=device)
    return stored.permute([order.index(d) for d in range(like.dim())])
