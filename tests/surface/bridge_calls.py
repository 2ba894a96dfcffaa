"""Calls of what only a TransformerBridge has, and transformer_lens.tools."""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from calls import FEW, OF_MODEL, RESID, TEXT, attributes, gradients_of, metric, moved, steer
from surface import LAST, Call, Run
from transformer_lens.tools import analysis as tools

analysis: Any = tools  # each version has others of its functions


def on_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu() for name, weight in weights.items()}


def check_hook(model: Any, hook: Any) -> Any:
    """Each TransformerLens asks for something else."""
    arguments = {"hook_point": model.hook_dict[RESID], "hook_point_name": RESID, "hook": hook}
    asked = inspect.signature(model.check_hooks_to_add).parameters
    return model.check_hooks_to_add(**{name: arguments[name] for name in arguments.keys() & asked})


def without_registry(run: Run) -> Any:
    model = run.changeable()
    model.clear_hook_registry()
    return model(run.tokens)


OF_BRIDGE: dict[str, Call] = {
    **OF_MODEL,
    **attributes("model", "attn_head_labels", "hook_aliases"),
    **{
        name: lambda model, name=name: getattr(model, name)()
        for name in (
            *("QK_for_attn_layers", "OV_for_attn_layers", "layer_types", "get_params"),
            *("composition_layer_indices", "tl_parameters", "tl_named_parameters"),
        )
    },
    "stack_params_for": lambda model: model.stack_params_for("attn", "attn.W_Q"),
    "block_hooks": lambda model: model.block_hooks(LAST),
    "block_submodules": lambda model: model.block_submodules(LAST),
    "blocks_with": lambda model: [index for index, _ in model.blocks_with("attn")],
    "QK_for_attn_layers gradient": lambda run: gradients_of(
        run, lambda model: model.QK_for_attn_layers()[1].AB.pow(2).sum()
    ),
    "original_model": lambda model, at_home: model.original_model(at_home).logits,
    "hook_dict": lambda model: list(model.hook_dict),
    "mod_dict": lambda model: list(model.mod_dict),
    "tokenizer": lambda model: model.tokenizer.vocab_size,
    "get_hook_point": lambda model: model.get_hook_point(RESID).name,
    "check_hooks_to_add": lambda run, model: check_hook(model, steer(run)),
    "clear_hook_registry": without_registry,
    "close": lambda run: run.changeable().close(),
    "parameters": lambda model: [each.cpu() for each in model.parameters()],
    "named_parameters": lambda model: on_cpu(dict(model.named_parameters())),
    "state_dict": lambda model: on_cpu(model.state_dict()),
    "load_state_dict": moved(lambda model: model.load_state_dict(model.state_dict())),
    "to twice": moved(lambda model: model.to(model.cfg.device).to(torch.float64)),
    "hf_generate": lambda model, at_home: [
        model.hf_generate(at_home, **FEW, stop_at_eos=False),
        model.hf_generate(TEXT, **FEW),
    ],
    "generate several_texts": lambda model: model.generate([TEXT, "w5 w6"], **FEW, verbose=False),
    "forward as_a_bridge": lambda model, tokens: [
        model(model(tokens, stop_at_layer=1), start_at_layer=1, stop_at_layer=4),
        model([TEXT, "w5 w6"]),
        model(TEXT, return_type="predictions"),
    ],
    "train": lambda run, tokens: run.changeable().train()(tokens),
    "input_to_embed and_on": lambda model, tokens: model(
        model.input_to_embed(tokens)[0], start_at_layer=0
    ),
    "run_with_hooks of_a_bridge": lambda run, model, tokens: [
        model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{LAST}.hook_in", steer(run))]),
        model.run_with_hooks(
            tokens, fwd_hooks=[(f"blocks.{LAST}.attn.hook_pattern", lambda a, hook: a * 0.5)]
        ),
        model.run_with_hooks(
            tokens, fwd_hooks=[("blocks.2.hook_resid_post", steer(run))], stop_at_layer=4
        ),
    ],
}

LAST_TOKEN = torch.tensor([8, 8])
"""Its position in each sequence."""


def logits_of_two_words(run: Run) -> Any:
    return lambda tokens: run.model(tokens)[:, -1, [5, 7]]


def learned(run: Run) -> Any:
    """A subspace of a block's residual stream, learned in one step."""
    options: dict[str, Any] = {"rank": 2, "epochs": 2}
    positions = {"base_positions": LAST_TOKEN, "source_positions": LAST_TOKEN}
    source, counterfactual = run.other_tokens.to(run.model.cfg.device), torch.tensor([0, 1])
    given = (run.model, RESID, run.at_home, source, counterfactual, logits_of_two_words(run))
    with contextlib.redirect_stderr(io.StringIO()):
        result = analysis.fit_das(*given, **options, **positions)
    return result.losses  # the subspace itself hangs on the rounding of gradients near zero


def interchange(run: Run) -> tuple[Any, ...]:
    """The arguments of an intervention on a block's residual stream."""
    source = analysis.collect_activations(
        run.model, RESID, run.other_tokens, logits_of_two_words(run), positions=LAST_TOKEN
    )
    subspace = analysis.SubspaceInterchange(analysis.random_basis(run.model.cfg.d_model, 3, 0))
    return run.model, RESID, subspace, run.at_home, source, logits_of_two_words(run)


def patch_direct_path(run: Run) -> Any:
    return analysis.get_act_patch_direct_path(
        model=run.model,
        corrupted_tokens=run.tokens[:1, :2],
        clean_cache=run.model.run_with_cache(run.other_tokens[:1, :2])[1],
        corrupted_cache=run.model.run_with_cache(run.tokens[:1, :2])[1],
        patching_metric=metric,
        src_layer=2,
        src_head=1,
        verbose=False,
    )


def attribution(run: Run, granularity: str) -> Any:
    return analysis.attribution_patch(
        run.changeable(),
        run.tokens[:1, :2],
        run.other_tokens[:1, :2],
        metric,
        analysis.EdgeAttributionConfig(granularity),
    )


def faithful(run: Run) -> Any:
    circuit = sorted(attribution(run, "edge").edge_scores, key=str)[20:]
    return analysis.faithfulness(
        run.changeable(), run.tokens[:1, :2], run.other_tokens[:1, :2], metric, circuit
    )


OF_ANALYSIS: dict[str, Call] = {
    "logit_lens": lambda model, tokens, cache, cache_on_cpu: [
        analysis.logit_lens(model, tokens, incl_mid=True),
        analysis.logit_lens(model, TEXT, top_k=3),
        *(analysis.logit_lens(model, cache=each) for each in (cache, cache_on_cpu)),
    ],
    "logit_readout": lambda model, cache: analysis.logit_readout(model, cache["resid_post", LAST]),
    "direct_logit_attribution": lambda model, tokens, cache: [
        analysis.direct_logit_attribution(model, tokens, "w5", "w7"),
        analysis.direct_logit_attribution(model, tokens, "w5", unit="head"),
        analysis.direct_logit_attribution(model, answer_tokens="w5", unit="layer", cache=cache),
    ],
    "attribution_patch": lambda run: [attribution(run, each) for each in ("node", "edge")],
    "attention_head_subspace_affinity": lambda model: [
        analysis.attention_head_subspace_affinity(model, target_role=role) for role in "QV"
    ],
    "get_act_patch_direct_path": patch_direct_path,
    "collect_activations": lambda run, model, tokens: analysis.collect_activations(
        model, RESID, tokens, logits_of_two_words(run), positions=LAST_TOKEN
    ),
    "run_with_intervention": lambda run: analysis.run_with_intervention(
        *interchange(run), positions=LAST_TOKEN
    ),
    "intervened_logits": lambda run: analysis.intervened_logits(
        *interchange(run), positions=LAST_TOKEN
    ),
    "faithfulness": faithful,
    "fit_das": learned,
}


def saved_and_loaded(lens: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "lens.pt")
        lens.save(path)
        return type(lens).load(path).jacobians


def with_hooks(make: Callable[[Any, Any], Any]) -> Call:
    """A forward with the hooks that a lens makes."""
    return lambda run: run.model.run_with_hooks(run.tokens, fwd_hooks=make(run.lens, run.model))


FIT = {"corpus": "words", "dim_batch": 4, "max_seq_len": 7, "skip_first_positions": 1}
FIT |= {"show_progress": False}
OF_LENS: dict[str, Call] = {
    "readout": lambda lens, model, tokens: [
        lens.readout(model, tokens[:1], top_k=3),
        lens.readout(model, TEXT, return_full_logits=True),
    ],
    "lens_vectors": lambda lens, model: lens.lens_vectors(model, ["w5", "w7"], 3),
    "lens_vector_dictionary": lambda lens, model: lens.lens_vector_dictionary(model, 3),
    "transport": lambda lens, cache: lens.transport(cache["resid_post", 3], 3),
    "decompose": lambda lens, model: lens.decompose(model, TEXT, 3, position=-1, k=3),
    "coordinate_patch": lambda lens, model: lens.coordinate_patch(
        model, TEXT, 3, "w5", "w7", position=-1, k=3
    ),
    "occupancy": lambda lens, model: lens.occupancy(
        model, TEXT, 3, position=-1, max_atoms=3, num_control_dictionaries=2
    ),
    "fraction_of_variance": lambda lens, model: lens.fraction_of_variance(
        model, TEXT, [2, 3], k=3, skip_first=1
    ),
    "swap_clamp_hooks": lambda lens, model, tokens, cache: model.run_with_hooks(
        tokens, fwd_hooks=lens.swap_clamp_hooks(model, "w5", "w7", [2, 3], cache)
    ),
    "steering_hooks": with_hooks(lambda lens, model: lens.steering_hooks(model, "w5", [2, 3])),
    "ablation_hooks": with_hooks(
        lambda lens, model: lens.ablation_hooks(model, ["w5", "w7"], [2, 3])
    ),
    "swap_hooks": with_hooks(lambda lens, model: lens.swap_hooks(model, "w5", "w7", [2, 3])),
    "coordinate_patch_hooks": with_hooks(
        lambda lens, model: lens.coordinate_patch_hooks(model, "w5", "w7", [3], positions=[2], k=3)
    ),
    "fit": lambda lens, model: type(lens).fit(model, [TEXT], **FIT),
    "save": saved_and_loaded,
    "validate_model": lambda lens, model: lens.validate_model(model).n_prompts,
    "source_layers": lambda lens: lens.source_layers,
    "clear_device_cache": lambda lens: lens.clear_device_cache(),
    "merge": lambda lens: type(lens).merge([lens, lens]).jacobians,
}
