"""TransformerLens's own weight processing, on one component of a Bridge at a time.

A block is processed by the static methods of the installed `ProcessWeights`, which know every
architecture, given that block alone. The embeddings and the unembedding, whose size is that of the
vocabulary, are processed in slices by `tl_devicefix.weight_processing`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformer_lens.weight_processing import ProcessWeights

from tl_devicefix.weight_processing import (
    Steps,
    Weights,
    WorkingCopies,
    check_refactorable,
    uses_layer_norm,
    working_dtype,
)
from tl_devicefix.weight_processing import slices as slicing
from tl_devicefix.weight_processing.steps import (
    center_embedding,
    center_unembed_weights,
    fold_layer_norm_into_unembed,
    vocabulary_means,
)

BLOCK = "blocks.0."
"""What a block's weights are called while it is processed, whichever block it is."""


class Processing:
    """How the weights of one Bridge are to be processed.

    Args:
        asked: the steps that are asked for.
        cfg: the Bridge's config.
        adapter: its architecture adapter.
    """

    def __init__(self, asked: Steps, cfg: Any, adapter: Any) -> None:
        self.asked = asked
        self.steps = _applicable(asked, cfg, adapter)
        """Those that TransformerLens takes for such a model."""
        self.cfg = cfg
        self.adapter = adapter

    def of_block(self, weights: Weights) -> None:
        """Process one block's weights in place, as `ProcessWeights.process_weights` does.

        Args:
            weights: as `WorkingCopies`, named as those of block 0 ("blocks.0.attn.q.weight").
        """
        steps, adapter, cfg = self.steps, self.adapter, _OneBlock(self.cfg)
        self._preprocess(weights)
        if steps.fold_ln:
            centers, kv_prefix = uses_layer_norm(cfg), "" if cfg.n_key_value_heads is None else "_"
            ProcessWeights._fold_layer(weights, cfg, 0, centers, centers, adapter, kv_prefix)
        if steps.center_writing_weights:
            _center_writing_weights(weights, cfg, adapter)
        if steps.fold_value_biases and f"{BLOCK}attn.v.bias" in weights:
            _on_attention(ProcessWeights.fold_value_biases, weights, cfg, adapter)
        if steps.recenter_b_O and f"{BLOCK}attn.o.bias" in weights:
            weights[f"{BLOCK}attn.o.bias"] -= weights[f"{BLOCK}attn.o.bias"].mean()
        if steps.refactor_factored_attn_matrices:
            _on_attention(ProcessWeights.refactor_factored_attn_matrices, weights, cfg, adapter)

    def of_embedding(self, weights: Weights) -> None:
        """Process "embed.weight" or "pos_embed.weight" [tokens or positions, d_model] in place."""
        named = {"embed.W_E": "embed.weight"}
        if self.cfg.positional_embedding_type not in ("rotary", "alibi", "none"):
            named["pos_embed.W_pos"] = "pos_embed.weight"
        present = {name: weights[key] for name, key in named.items() if key in weights}
        if self.steps.center_writing_weights and not _is_post_norm(self.cfg):
            for part in slicing.slices(present, slicing.ELEMENTS_ON_DEVICE):
                center_embedding(part.of(present, {}))

    def of_unembed(self, weights: Weights) -> None:
        """Process "unembed.weight" [d_vocab, d_model] and its bias with ln_final, in place."""
        self._preprocess(weights)
        if "unembed.weight" not in weights:
            return
        head = {"unembed.W_U": weights["unembed.weight"].T}
        if "unembed.bias" in weights:
            head["unembed.b_U"] = weights["unembed.bias"]
        folds = self.steps.fold_ln and "ln_final.weight" in weights
        if folds:
            head["ln_final.w"] = weights["ln_final.weight"] + float(_has_offset(self.cfg))
            if "ln_final.bias" in weights:
                head["ln_final.b"] = weights["ln_final.bias"]
        self._process_head(head)
        if folds:
            identity = 0.0 if _has_offset(self.cfg) else 1.0
            weights["ln_final.weight"].fill_(identity)
            if "ln_final.b" in head and "unembed.b_U" in head and self._folds_final_bias:
                weights["ln_final.bias"].zero_()

    @property
    def _folds_final_bias(self) -> bool:
        return uses_layer_norm(self.cfg) and not getattr(self.cfg, "final_rms", False)

    def _process_head(self, head: Weights) -> None:
        device, dtype = head["unembed.W_U"].device, head["unembed.W_U"].dtype
        elements = slicing.ELEMENTS_ON_DEVICE
        means = None
        if self.steps.center_unembed:
            means = vocabulary_means(head, dtype, device, elements // self.cfg.d_model + 1)
        for part in slicing.slices(head, elements):
            views = part.of(head, {})
            given = dict(views)
            if means is not None:
                center_unembed_weights(views, means)
            if "ln_final.w" in views:
                fold_layer_norm_into_unembed(
                    views,
                    fold_biases=self._folds_final_bias,
                    center_weights=self._folds_final_bias,
                    keep_norms=True,
                )
            for name in part.cut:
                if views[name] is not given[name]:  # a step has replaced it
                    given[name].copy_(views[name])

    def _preprocess(self, weights: Weights) -> None:
        self.adapter._fold_ln_requested = self.asked.fold_ln  # as some fold all by themselves
        preprocessed = self.adapter.preprocess_weights(weights)
        if preprocessed is not weights:
            for name in weights.keys() - preprocessed.keys():
                del weights[name]
            for name, tensor in preprocessed.items():
                weights[name] = tensor


def private_copies(weights: Mapping[str, torch.Tensor], device: torch.device) -> WorkingCopies:
    """Weights of which each is copied to a device, in the dtype to work in, when it is read."""
    return WorkingCopies(weights, device, working_dtype(weights, torch.float32))


def _applicable(steps: Steps, cfg: Any, adapter: Any) -> Steps:
    """The steps that TransformerLens would take for such a model, with its warnings."""
    for name, supported in (
        ("fold_ln", "supports_fold_ln"),
        ("center_writing_weights", "supports_center_writing_weights"),
    ):
        if getattr(steps, name) and not getattr(adapter, supported, True):
            warnings.warn(
                f"{type(adapter).__name__} does not support {name}: it is left out.", stacklevel=6
            )
            steps = replace(steps, **{name: False})
    if cfg.normalization_type not in ("LN", "LNPre", "RMS", "RMSPre"):
        steps = replace(steps, fold_ln=False)
    if not uses_layer_norm(cfg) or getattr(cfg, "final_rms", False):
        steps = replace(steps, center_writing_weights=False)
    if steps.refactor_factored_attn_matrices:
        check_refactorable(cfg, is_grouped=cfg.n_key_value_heads not in (None, cfg.n_heads))
    return replace(steps, recenter_b_O=steps.fold_value_biases and steps.center_writing_weights)


def _is_post_norm(cfg: Any) -> bool:
    return getattr(cfg, "original_architecture", None) in POST_NORM_ARCHITECTURES


def _has_offset(cfg: Any) -> bool:
    """Whether norms multiply by 1 + weight, as Gemma's do."""
    return bool(getattr(cfg, "rmsnorm_uses_offset", False))


def _center_writing_weights(weights: Weights, cfg: Any, adapter: Any) -> None:
    """`ProcessWeights.center_writing_weights` of a block, without the embeddings it insists on."""
    stand_ins = ("embed.weight", "pos_embed.weight")
    for name in stand_ins:
        weights[name] = torch.zeros(1, cfg.d_model)
    ProcessWeights.center_writing_weights(weights, cfg, adapter=adapter)
    for name in stand_ins:
        del weights[name]


def _on_attention(step: Any, weights: Weights, cfg: Any, adapter: Any) -> None:
    """Apply a step that returns new weights, to a block's attention."""
    attention = {name: weights[name] for name in weights if name.startswith(f"{BLOCK}attn.")}
    for name, tensor in step(attention, cfg, adapter=adapter).items():
        weights[name] = tensor


class _OneBlock:
    """A config as if the model had one block.

    Args:
        cfg: the config; it is not changed, and not copied, as a Bridge follows changes to its own.
    """

    n_layers = 1

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cfg, name)
