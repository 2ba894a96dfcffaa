"""The blueprint of a TransformerBridge: its config, and how to make it without values."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from typing import Any

import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import AutoTokenizer, DynamicCache, PretrainedConfig, PreTrainedModel

from tl_devicefix.checkpoints.hub import (
    has_tokenizer,
    is_checkpoint_directory,
    known_config,
    known_fields,
    read_config,
    refuse_directory,
    snapshot,
    torch_dtype,
)
from tl_devicefix.placement.placement import ComponentSize, Placement
from tl_devicefix.transformer_bridge.alignment import settle_bridge
from tl_devicefix.transformer_bridge.components import (
    Layout,
    adapter_for,
    empty_hf_model,
    hf_model_class,
    layout_of,
)
from tl_devicefix.transformer_bridge.twin import check_bridge_numbers
from tl_devicefix.twin import OnMismatch

OPTIONS = ("n_ctx", "hf_config_overrides")
"""Options of `boot_transformers` on which the config depends."""


class BridgeBlueprint:
    """A Bridge as `boot_transformers` would boot it, not in compatibility mode."""

    def __init__(
        self,
        config_or_model_name: object,
        dtype: torch.dtype | str | None,
        options: dict[str, Any],
        model_class: object = None,
    ) -> None:
        config = copy.deepcopy(_hf_config(config_or_model_name))
        overrides = dict(options.get("hf_config_overrides") or {})
        if options.get("n_ctx") is not None:
            # `boot_transformers` looks for the field before it applies overrides.
            field = next((name for name in _N_CTX if hasattr(config, name)), None)
            if field is None:
                raise ValueError(
                    f"n_ctx={options['n_ctx']} cannot be applied, since a {type(config).__name__} "
                    f"has none of {', '.join(_N_CTX)}: leave n_ctx out"
                )
            overrides[field] = options["n_ctx"]
        vars(config).update(overrides)
        if "pad_token_id" not in vars(config):  # as in `boot_transformers`
            end = getattr(config, "eos_token_id", None)
            config.pad_token_id = end[0] if isinstance(end, list) else end
        if isinstance(config_or_model_name, type(config)):
            self.name = getattr(config, "_name_or_path", None) or config.model_type
        else:
            self.name = str(config_or_model_name)
        self.dtype = torch.float32 if dtype is None else torch_dtype(dtype)
        self._config = config
        adapter = adapter_for(config, self.name, self.dtype)
        self.n_ctx, self.n_layers = adapter.cfg.n_ctx, adapter.cfg.n_layers
        self._architecture = str(adapter.cfg.architecture)

    def sizes(self) -> tuple[ComponentSize, ...]:
        """Return the components' sizes in the order they run, a tied unembedding's too."""
        hf_model, layout = self._empty()
        return layout.sizes(hf_model)

    def _empty(self) -> tuple[PreTrainedModel, Layout]:
        """Return the Hugging Face model on meta, and the layout of its components."""
        adapter = adapter_for(self._config, self.name, self.dtype)
        implementation = getattr(adapter.cfg, "attn_implementation", None) or "eager"
        arguments: dict[str, Any] = {
            "config": copy.deepcopy(self._config),
            "torch_dtype": self.dtype,
            "attn_implementation": implementation,
        }
        adapter.prepare_loading(self.name, arguments)
        # Without values, torch's grouped_mm takes bfloat16 only.
        experts = {} if self.dtype == torch.bfloat16 else {"experts_implementation": "eager"}
        hf_model: Any = empty_hf_model(
            hf_model_class(adapter),
            arguments["config"],
            self.dtype,
            attn_implementation=arguments["attn_implementation"],
            **experts,
        )
        hf_model.config.output_attentions = True  # as in `boot_transformers`
        return hf_model, layout_of(hf_model, adapter)

    def make(self, placement: Placement, tokenizer: object = None) -> TransformerBridge:
        """Make the Bridge across simulated devices."""
        hf_model, layout = self._empty()
        _give_memory(hf_model, layout, placement)
        # The hub is not asked.
        if tokenizer is None and is_checkpoint_directory(self.name) and has_tokenizer(self.name):
            tokenizer = AutoTokenizer.from_pretrained(self.name, add_bos_token=True)
        bridge = build_bridge_from_module(
            hf_model.eval(),
            self._architecture,
            hf_config=hf_model.config,
            tokenizer=tokenizer,
            dtype=self.dtype,
            device=placement.home,
            model_name=self.name,
        )
        if len(placement.memories) > 1:
            settle_bridge(bridge, placement)
        return bridge

    def check_numbers(self, on_mismatch: OnMismatch | None) -> None:
        """Warn if a Bridge with this config would not give transformers' numbers."""
        check_bridge_numbers(self._config, self.name, on_mismatch)

    def room_to_load(self, placement: Placement) -> int:
        """Return the most bytes that a load needs on a device beyond the weights.

        transformers reads each weight straight onto its device, but merges a layer's experts there.
        """
        return self._merged_bytes

    def cpu_to_load(self, placement: Placement) -> int:
        """Return the most bytes of CPU memory that a load with offloaded blocks needs."""
        if (self._config.dtype or torch.float32) == self.dtype and not self._merged_bytes:
            return 0  # the weights are memory-mapped from the checkpoint
        return sum(c.weights + c.buffers for c in placement.components) + self._merged_bytes

    @functools.cached_property
    def _merged_bytes(self) -> int:
        """The bytes of the largest merged experts: [expert, d_out, d_in]."""
        weights = self._empty()[0].named_parameters()
        experts = (w.nbytes for name, w in weights if "expert" in name and w.dim() == 3)
        return max(experts, default=0)

    @staticmethod
    def generate(bridge: TransformerBridge, batch_size: int, seq_len: int, n_cached: int) -> None:
        """Run a prompt, and then one token with a KV cache of `n_cached` tokens.

        Both run as in `TransformerBridge.generate`, with transformers' KV cache.
        """
        hf_model: Any = bridge.original_model
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.long, device=bridge.cfg.device)
        kv_cache = DynamicCache(config=hf_model.config)
        takes = inspect.signature(hf_model.forward).parameters
        # The argument that takes the KV cache; transformers 5.24 names it `cache` in every model.
        names = (name for name in ("cache", "cache_params") if name in takes)
        cached = {next(names, "past_key_values"): kv_cache, "use_cache": True}
        bridge(tokens, **cached)
        # A state space model's state does not grow.
        layers: list[Any] = [x for x in kv_cache.layers if getattr(x, "keys", None) is not None]
        for layer in layers:
            n_kept = n_cached
            if getattr(layer, "is_sliding", False):  # a window keeps the last tokens only
                n_kept = min(n_cached, layer.sliding_window - 1)
                layer.cumulative_length = n_cached
            for name in ("keys", "values"):  # no name may keep a tensor that the layer has no more
                batch, heads, _, width = getattr(layer, name).shape  # [batch, kv_head, pos, d_head]
                shape = batch, heads, n_kept, width
                setattr(layer, name, getattr(layer, name).new_empty(shape))
        token = tokens[:, :1]
        where = {
            "attention_mask": token.new_ones(batch_size, n_cached + 1),
            "position_ids": torch.full_like(token, n_cached),
        }
        # A model without attention takes no mask and no positions.
        bridge(token, **cached, **(where if layers else {}))


def _hf_config(config_or_model_name: object) -> PretrainedConfig:
    """Return a transformers config: the given one, a known model's, or a checkpoint's."""
    if isinstance(config_or_model_name, PretrainedConfig):
        return config_or_model_name
    if not isinstance(config_or_model_name, str | os.PathLike):
        raise ValueError(
            f"a {type(config_or_model_name).__name__} is neither a model's name, nor a checkpoint "
            "directory, nor a transformers config"
        )
    name = os.fspath(config_or_model_name)
    if (known := known_config(name)) is not None:
        return known
    refuse_directory(name)
    if not is_checkpoint_directory(name):
        snapshot(name, known_fields())  # raises if it cannot be fetched, and suggests a name
    return read_config(name)


_N_CTX = (
    *("n_positions", "max_position_embeddings", "max_context_length", "max_length"),
    *("seq_length", "max_sequence_length"),
)
"""Fields of a config that may hold its context length, in the order of `boot_transformers`."""


def _give_memory(hf_model: PreTrainedModel, layout: Layout, placement: Placement) -> None:
    """Allocate meta parameters on their devices, move buffers, and tie weights."""
    for path, module in hf_model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                component = layout.component_of(f"{path}.{name}")
                values = torch.empty_like(parameter, device=placement.device_for(component, True))
                module._parameters[name] = nn.Parameter(values, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                component = layout.component_of(f"{path}.{name}")
                module._buffers[name] = buffer.to(placement.device_for(component))
    hf_model.tie_weights()  # each name of a tied weight got its own memory
