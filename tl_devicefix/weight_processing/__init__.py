"""Weight processing: pure functions on one component's weights.

Every step (`steps`) is local to one component: ln1, ln2 and the value biases fold within their
block, ln_final folds into the unembedding, and centring touches one matrix at a time.
`process_component` applies the steps in TransformerLens's order, on a component or a slice of it
(`slices`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from tl_devicefix.types import Config
from tl_devicefix.weight_processing.steps import (
    Weights,
    center,
    center_unembed_weights,
    center_writing_weights_of_block,
    fold_layer_norm_into_block,
    fold_layer_norm_into_unembed,
    fold_value_biases_of_block,
    refactor_attention_of_block,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conventions:
    """The conventions of a TransformerLens version, as data: the steps check no versions."""

    folds_moe: bool
    """True if norms fold into mixture-of-experts blocks (not in 2.x, nor in some 3.x)."""
    recenters_b_O: bool
    """True if b_O is centred again after the value biases are folded into it (3.x)."""
    keeps_folded_norms: bool
    """True if a processed state dict keeps the folded norms as identities (3.x)."""


@dataclass(frozen=True)
class Steps:
    """The processing steps to apply; all fields but the last are `from_pretrained`'s arguments."""

    fold_ln: bool = False
    center_writing_weights: bool = False
    center_unembed: bool = False
    fold_value_biases: bool = False
    refactor_factored_attn_matrices: bool = False
    recenter_b_O: bool = False
    """True if b_O is centred again after the value biases; `applicable` decides it."""

    def applicable(self, cfg: Config, conventions: Conventions) -> Steps:
        """Return these steps without those that do not apply to this config.

        Call it once, on the steps as requested: `recenter_b_O` depends on them.
        """
        steps = self
        if steps.fold_value_biases and has_sinks(cfg):
            steps = steps.without_value_biases("sinks")
        if steps.fold_ln and cfg.normalization_type is None:
            _log.warning("fold_ln=True, but the model has no norms to fold: skipped")
            steps = replace(steps, fold_ln=False)
        if steps.fold_ln and (cfg.num_experts or 0) > 1 and not conventions.folds_moe:
            _log.warning(
                "fold_ln=True, but this TransformerLens does not fold norms of MoE models: skipped"
            )
            steps = replace(steps, fold_ln=False)
        if steps.center_writing_weights and (not uses_layer_norm(cfg) or cfg.final_rms):
            _log.info("center_writing_weights=True, but not all norms are LayerNorm: skipped")
            steps = replace(steps, center_writing_weights=False)
        elif steps.center_writing_weights and steps.fold_value_biases:
            steps = replace(steps, recenter_b_O=conventions.recenters_b_O)
        if steps.refactor_factored_attn_matrices:
            is_grouped = cfg.n_key_value_heads is not None
            check_refactorable(cfg, is_grouped, "sinks" if has_sinks(cfg) else None)
        return steps

    def without_value_biases(self, beside: str) -> Steps:
        """Return these steps without the folding of value biases; warn that `beside` forbids it."""
        _log.warning(
            "fold_value_biases=True does not apply to attention with %s, where value biases add "
            "no constant: set to False",
            beside,
        )
        return replace(self, fold_value_biases=False)


def has_sinks(cfg: Config) -> bool:
    """Return True if attention has sinks; a config before TransformerLens 3.9 has no such field."""
    return bool(getattr(cfg, "use_attention_sinks", False))


def uses_layer_norm(cfg: Config) -> bool:
    """Return True if the blocks begin with LayerNorm (which subtracts the mean), folded or not."""
    return cfg.normalization_type in ("LN", "LNPre")


def check_refactorable(cfg: Config, is_grouped: bool, beside: str | None) -> None:
    """Raise a ValueError if `refactor_factored_attn_matrices` cannot be applied.

    `beside` is the part of attention that rules out folding value biases, if there is one.
    """
    if cfg.positional_embedding_type == "rotary":
        raise ValueError(
            "refactor_factored_attn_matrices=True cannot be used with rotary embeddings: there "
            "the QK matrix depends on the positions of query and key; leave it False"
        )
    if is_grouped:
        raise ValueError(
            "refactor_factored_attn_matrices=True cannot be used with grouped-query attention: "
            "several heads share one key and value matrix; leave it False"
        )
    if beside is not None:
        raise ValueError(
            f"refactor_factored_attn_matrices=True folds value biases, and cannot be used on "
            f"attention with {beside}, where they add no constant; leave it False"
        )


def process_component(
    name: str,
    weights: Weights,
    cfg: Config,
    steps: Steps,
    conventions: Conventions,
    vocabulary_means: Weights | None = None,
) -> None:
    """Apply the processing steps to one component's weights, or to a slice of them, in place.

    Args:
        name: "embed", "pos_embed", "blocks.3" or "unembed", which includes ln_final.
        weights: working copies on one device, in the dtype to fold in. In a block, names are
            relative to the block ("attn.W_Q"); elsewhere they are full ("unembed.W_U").
        cfg: the HookedTransformerConfig.
        steps: the applicable steps (`Steps.applicable`).
        conventions: those of the installed TransformerLens.
        vocabulary_means: means over the whole vocabulary, if `weights` has only a part of it.
    """
    subtracts = uses_layer_norm(cfg) and not (name == "unembed" and cfg.final_rms)
    fold = {"fold_biases": subtracts, "center_weights": subtracts}
    fold["keep_norms"] = conventions.keeps_folded_norms
    if name in ("embed", "pos_embed"):
        # An ALiBi model has a W_pos that is never read.
        unread = name == "pos_embed" and cfg.positional_embedding_type == "alibi"
        if steps.center_writing_weights and not unread:
            center(weights, "embed.W_E", "pos_embed.W_pos")  # over d_model
    elif name == "unembed":
        # TransformerLens centres after folding. The two change different dimensions, so their order
        # does not matter; centring first lets the vocabulary means be computed beforehand.
        if steps.center_unembed:
            center_unembed_weights(weights, vocabulary_means)
        if steps.fold_ln:
            fold_layer_norm_into_unembed(weights, **fold)
    else:
        if steps.fold_ln:
            fold_layer_norm_into_block(weights, **fold)
        if steps.center_writing_weights:
            center_writing_weights_of_block(weights)
        if "attn.W_Q" not in weights:
            return  # this is a slice of the MLP
        if steps.fold_value_biases:
            fold_value_biases_of_block(weights)
        if steps.recenter_b_O:
            center(weights, "attn.b_O")  # [d_model]
        if steps.refactor_factored_attn_matrices:
            refactor_attention_of_block(weights)
