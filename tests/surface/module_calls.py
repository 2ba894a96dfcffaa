"""Calls of TransformerLens's modules of functions that take a model: patching and the like."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any
from unittest import mock

import torch
import transformer_lens.evals as evals
import transformer_lens.head_detector as head_detector
import transformer_lens.patching as patching
from registry import LAST, TEXT, Calls, Run, left_out
from torch.utils.data import DataLoader

CALLS = Calls()
call = CALLS.call


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]


PATCHES = (
    *("resid_pre", "resid_mid", "attn_out", "mlp_out", "block_every"),
    *("attn_head_out_by_pos", "attn_head_q_by_pos", "attn_head_k_by_pos", "attn_head_v_by_pos"),
    *("attn_head_pattern_by_pos", "attn_head_pattern_dest_src_pos", "attn_head_out_all_pos"),
    *("attn_head_q_all_pos", "attn_head_k_all_pos", "attn_head_v_all_pos"),
    *("attn_head_pattern_all_pos", "attn_head_all_pos_every", "attn_head_by_pos_every"),
)


def patch_each(run: Run, name: str) -> Any:
    # A forward for each head and pair of positions.
    length = 1 if "attn_head" in name or name.endswith("every") else 2
    with torch.no_grad():
        return getattr(patching, name)(
            run.model,
            run.at_home[:1, :length],
            run.model.run_with_cache(run.other_tokens[:1, :length])[1],
            metric,
        )


for _name in PATCHES:
    call(f"patching.get_act_patch_{_name}")(
        functools.partial(patch_each, name=f"get_act_patch_{_name}")
    )


@call("patching.generic_activation_patch")
def patch_generically(run: Run) -> Any:
    clean = run.model.run_with_cache(run.other_tokens[:, :3])[1]
    return patching.generic_activation_patch(
        run.model,
        run.at_home[:, :3],
        clean,
        metric,
        patching.layer_pos_patch_setter,
        "resid_post",
        index_axis_names=["layer", "pos"],
    )


def detect(run: Run, pattern: Any, **options: Any) -> Any:
    return head_detector.detect_head(run.model, TEXT, pattern, **options)


def lower(n: int, model: Any) -> torch.Tensor:
    """A pattern in which each token attends to those before it and itself."""
    return torch.tril(torch.ones(n, n, device=model.cfg.device))


@call("head_detector.compute_head_attention_similarity_score")
def similarity_to_a_pattern(run: Run) -> Any:
    return head_detector.compute_head_attention_similarity_score(
        run.cache["pattern", LAST][0, 1],
        lower(9, run.model),
        exclude_bos=False,
        exclude_current_token=False,
        error_measure="abs",
    )


for _kind in ("previous_token", "duplicate_token", "induction"):
    _pattern = f"get_{_kind}_head_detection_pattern"
    CALLS.calls(
        "head_detector",
        {
            _pattern: lambda tokens, name=_pattern: getattr(head_detector, name)(
                tokens[:1].cpu()
            ).cpu()
        },
    )
CALLS.calls(
    "head_detector",
    {
        "detect_head induction": lambda run: detect(run, "induction_head"),
        "detect_head previous": lambda run: detect(run, "previous_token_head", error_measure="abs"),
        "detect_head duplicate": lambda run: detect(run, "duplicate_token_head", exclude_bos=True),
        "detect_head pattern": lambda run: detect(run, lower(7, run.model)),
    },
)


def trained(run: Run, train: Any, config: Any) -> Any:
    """The logits after two epochs."""
    model, batches = run.changeable(), [{"tokens": row} for row in run.tokens]
    options = {"num_epochs": 2, "batch_size": 2, "optimizer_name": "SGD", "lr": 1e-2}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        return train(model, config(**options, device=model.cfg.device), batches)(run.tokens)


@call("evals.induction_loss")
def induction_loss(run: Run) -> Any:
    def small(low: int, high: int, size: Any) -> torch.Tensor:
        """The draw is from a vocabulary larger than a toy's."""
        return torch.arange(size[0] * size[1]).reshape(size) % 30 + 5

    with mock.patch.object(torch, "randint", small):
        return evals.induction_loss(
            run.model, batch_size=2, subseq_len=6, device=run.model.cfg.device
        )


@call("evals.evaluate_on_dataset")
def evaluate_on_dataset(run: Run) -> Any:
    loader: Any = DataLoader([{"tokens": row} for row in run.tokens], batch_size=1)  # type: ignore[arg-type]
    return evals.evaluate_on_dataset(run.model, loader, device=run.model.cfg.device)


@call("evals.ioi_eval")
def ioi_eval(run: Run) -> Any:
    dataset = evals.IOIDataset(
        run.model.tokenizer,
        templates=["w8 [A] w9 [B] w10 [A] w11 [B]"],
        names=["w5", "w6", "w7"],
        nouns={"[OBJECT]": ["w12"]},
        num_samples=4,
    )
    return evals.ioi_eval(run.model, dataset=dataset, batch_size=2)


LEFT_OUT = left_out(
    """
patching.layer_pos_patch_setter layer_pos_head_vector_patch_setter layer_head_vector_patch_setter
    layer_head_pattern_patch_setter layer_head_pos_pattern_patch_setter
    layer_head_dest_src_pos_pattern_patch_setter: called by the get_act_patch functions
patching.make_df_from_ranges: no tensors
head_detector.get_supported_heads: no tensors
evals.make_wiki_data_loader make_owt_data_loader make_pile_data_loader make_code_data_loader
    make_mmlu_data_loader mmlu_eval evaluate sanity_check: fetches a data set
evals.IOIDataset: no model; used by ioi_eval
"""
)
"""What is not called of these modules, and why."""
