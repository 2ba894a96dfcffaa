"""TransformerBridge across several devices.

A Bridge wraps a Hugging Face model and runs its modules; a HookedTransformer defines its own.
Code that does not depend on this difference is in other packages. This module is the Bridge's
`tl_devicefix.adapters.Adapter`; importing it registers the patches.
"""

from __future__ import annotations

from transformer_lens.model_bridge import TransformerBridge

from tl_devicefix.placement.placement import Placement
from tl_devicefix.transformer_bridge import (  # noqa: F401  # they register patches
    alignment,
    forward,
    fused,
    loading,
    processing,
)
from tl_devicefix.transformer_bridge.blueprint import OPTIONS, BridgeBlueprint

name = "TransformerBridge"
view_of = alignment.view_of
model_class = TransformerBridge
run_methods = ("forward", "run_with_hooks")
read_blueprint = BridgeBlueprint
has_dropout = True

# Blocks of these architectures pass on only the residual stream. Others also pass on keys and
# values, states or per-layer embeddings, which a run that starts at a later block would miss.
_RESIDUAL_STREAM_ALONE = {
    *("ApertusForCausalLM", "BloomForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM"),
    *("GPTNeoForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("GemmaForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    *("MixtralForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM"),
    *("OlmoeForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM",
}


def passes_stream_alone(model: TransformerBridge) -> bool:
    """See `Adapter.passes_stream_alone`."""
    is_generating = getattr(model, "_capture_hf_cache", False)
    return model.cfg.architecture in _RESIDUAL_STREAM_ALONE and not is_generating


def realign(bridge: TransformerBridge, placement: Placement | None) -> None:
    """See `Adapter.realign`."""
    if placement is not None:
        alignment.settle_bridge(bridge, placement)
    alignment.register_hooks(bridge)


def option_names(config_or_model_name: object) -> tuple[str, ...]:
    """Return the names of `boot_transformers`' options on which the config depends."""
    return OPTIONS
