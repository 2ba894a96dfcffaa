"""Calls of what only a TransformerBridge has, and transformer_lens.tools; see surface.py."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import tempfile
from pathlib import Path
from typing import Any

import calls
import torch
from calls import metric
from surface import RESID, Run
from surface import table as table_of
from transformer_lens.tools import analysis as tools

analysis: Any = tools  # each version has others of its functions
table = functools.partial(table_of, [vars(calls), globals()])


def on_cpu(weights: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu() for name, weight in dict(weights).items()}


def check_hook(model: Any, hook: Any) -> Any:
    """Check a hook with the arguments that the installed TransformerLens asks for."""
    arguments = {"hook_point": model.hook_dict[RESID], "hook_point_name": RESID, "hook": hook}
    asked = inspect.signature(model.check_hooks_to_add).parameters
    return model.check_hooks_to_add(**{name: arguments[name] for name in arguments.keys() & asked})


OF_BRIDGE = table("""
QK_for_attn_layers,OV_for_attn_layers,layer_types,get_params  model.NAME()
composition_layer_indices,tl_parameters,tl_named_parameters   model.NAME()
attn_head_labels        model.attn_head_labels
hook_aliases            model.hook_aliases
stack_params_for        model.stack_params_for("attn", "attn.W_Q")
block_hooks             model.block_hooks(LAST)
block_submodules        model.block_submodules(LAST)
blocks_with             [index for index, _ in model.blocks_with("attn")]
QK_for_attn_layers gradient
    gradients(run, lambda model: model.QK_for_attn_layers()[1].AB.pow(2).sum())
original_model          model.original_model(at_home).logits
hook_dict               list(model.hook_dict)
mod_dict                list(model.mod_dict)
tokenizer               model.tokenizer.vocab_size
get_hook_point          model.get_hook_point(RESID).name
check_hooks_to_add      check_hook(model, steer)
clear_hook_registry     copy.clear_hook_registry(), copy(tokens)
close                   copy.close()
parameters              [each.cpu() for each in model.parameters()]
named_parameters        on_cpu(model.named_parameters())
state_dict              on_cpu(model.state_dict())
load_state_dict         len(copy.load_state_dict(copy.state_dict())), copy(tokens)
to twice                copy.to(model.cfg.device).to(torch.float64)(tokens)
hf_generate             model.hf_generate(at_home, **FEW, stop_at_eos=False)
                        model.hf_generate(TEXT, **FEW)
generate several_texts  model.generate([TEXT, "w5 w6"], **FEW, verbose=False)
forward as_a_bridge     model(model(tokens, stop_at_layer=1), start_at_layer=1, stop_at_layer=4)
                        model([TEXT, "w5 w6"])
                        model(TEXT, return_type="predictions")
train                   copy.train()(tokens)
input_to_embed and_on   model(model.input_to_embed(tokens)[0], start_at_layer=0)
run_with_hooks of_a_bridge
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.hook_in", steer)])
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.attn.hook_pattern", lambda a, hook: a / 2)])
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_post", steer)], stop_at_layer=4)
""")

LAST_TOKEN = torch.tensor([8, 8])
"""The position of the last token in each sequence."""


POSITIONS = {"base_positions": LAST_TOKEN, "source_positions": LAST_TOKEN}


def logits_of_two_words(run: Run) -> Any:
    return lambda tokens: run.model(tokens)[:, -1, [5, 7]]


def collected(run: Run, tokens: torch.Tensor) -> Any:
    """Return a block's residual stream at the last token, and logits."""
    readout = logits_of_two_words(run)
    return analysis.collect_activations(run.model, RESID, tokens, readout, positions=LAST_TOKEN)


def learned(run: Run) -> Any:
    """Learn a subspace of a block's residual stream in one step, and return the losses.

    The subspace itself is not compared, because it hangs on the rounding of gradients near zero.
    """
    examples = run.at_home, run.other_tokens.to(run.model.cfg.device), torch.tensor([0, 1])
    given = run.model, RESID, *examples, logits_of_two_words(run)
    with contextlib.redirect_stderr(io.StringIO()):
        return analysis.fit_das(*given, rank=2, epochs=2, **POSITIONS).losses


def interchange(run: Run) -> tuple[Any, ...]:
    """Return the arguments of an intervention on a block's residual stream."""
    subspace = analysis.SubspaceInterchange(analysis.random_basis(run.model.cfg.d_model, 3, 0))
    source = collected(run, run.other_tokens)
    return run.model, RESID, subspace, run.at_home, source, logits_of_two_words(run)


def patch_direct_path(run: Run) -> Any:
    tokens, others = run.tokens[:1, :2], run.other_tokens[:1, :2]
    clean, corrupted = (run.model.run_with_cache(each)[1] for each in (others, tokens))
    caches = {"clean_cache": clean, "corrupted_cache": corrupted}
    options = {"patching_metric": metric, "src_layer": 2, "src_head": 1, "verbose": False}
    return analysis.get_act_patch_direct_path(
        model=run.model, corrupted_tokens=tokens, **caches, **options
    )


def attribution(run: Run, granularity: str) -> Any:
    config = analysis.EdgeAttributionConfig(granularity)
    tokens, others = run.tokens[:1, :2], run.other_tokens[:1, :2]
    return analysis.attribution_patch(run.copy, tokens, others, metric, config)


def faithful(run: Run) -> Any:
    circuit = sorted(attribution(run, "edge").edge_scores, key=str)[20:]
    tokens, others = run.tokens[:1, :2], run.other_tokens[:1, :2]
    return analysis.faithfulness(run.copy, tokens, others, metric, circuit)


OF_ANALYSIS = table("""
logit_lens                 analysis.logit_lens(model, tokens, incl_mid=True)
                           analysis.logit_lens(model, TEXT, top_k=3)
                           analysis.logit_lens(model, cache=cache)
                           analysis.logit_lens(model, cache=cache_on_cpu)
logit_readout              analysis.logit_readout(model, cache["resid_post", LAST])
direct_logit_attribution   analysis.direct_logit_attribution(model, tokens, "w5", "w7")
    analysis.direct_logit_attribution(model, tokens, "w5", unit="head")
    analysis.direct_logit_attribution(model, answer_tokens="w5", unit="layer", cache=cache)
attribution_patch          attribution(run, "node"), attribution(run, "edge")
attention_head_subspace_affinity
    analysis.attention_head_subspace_affinity(model, target_role="Q")
    analysis.attention_head_subspace_affinity(model, target_role="V")
get_act_patch_direct_path  patch_direct_path(run)
collect_activations        collected(run, tokens)
run_with_intervention      analysis.run_with_intervention(*interchange(run), positions=LAST_TOKEN)
intervened_logits          analysis.intervened_logits(*interchange(run), positions=LAST_TOKEN)
faithfulness               faithful(run)
fit_das                    learned(run)
""")


def saved_and_loaded(lens: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "lens.pt")
        lens.save(path)
        return type(lens).load(path).jacobians


def with_hooks(run: Run, hooks: Any) -> Any:
    return run.model.run_with_hooks(run.tokens, fwd_hooks=hooks)


FIT = {"corpus": "words", "dim_batch": 4, "max_seq_len": 7, "skip_first_positions": 1}
FIT |= {"show_progress": False}
OF_LENS = table("""
readout                 lens.readout(model, tokens[:1], top_k=3)
                        lens.readout(model, TEXT, return_full_logits=True)
lens_vectors            lens.lens_vectors(model, ["w5", "w7"], 3)
lens_vector_dictionary  lens.lens_vector_dictionary(model, 3)
transport               lens.transport(cache["resid_post", 3], 3)
decompose               lens.decompose(model, TEXT, 3, position=-1, k=3)
coordinate_patch        lens.coordinate_patch(model, TEXT, 3, "w5", "w7", position=-1, k=3)
occupancy
    lens.occupancy(model, TEXT, 3, position=-1, max_atoms=3, num_control_dictionaries=2)
fraction_of_variance    lens.fraction_of_variance(model, TEXT, [2, 3], k=3, skip_first=1)
swap_clamp_hooks        with_hooks(run, lens.swap_clamp_hooks(model, "w5", "w7", [2, 3], cache))
steering_hooks          with_hooks(run, lens.steering_hooks(model, "w5", [2, 3]))
ablation_hooks          with_hooks(run, lens.ablation_hooks(model, ["w5", "w7"], [2, 3]))
swap_hooks              with_hooks(run, lens.swap_hooks(model, "w5", "w7", [2, 3]))
coordinate_patch_hooks
    with_hooks(run, lens.coordinate_patch_hooks(model, "w5", "w7", [3], positions=[2], k=3))
fit                     type(lens).fit(model, [TEXT], **FIT)
save                    saved_and_loaded(lens)
validate_model          lens.validate_model(model).n_prompts
source_layers           lens.source_layers
clear_device_cache      lens.clear_device_cache()
merge                   type(lens).merge([lens, lens]).jacobians
""")
