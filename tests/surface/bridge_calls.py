"""What is called of TransformerLens with a TransformerBridge, and what is left out.

Names that only TransformerLens 4 has are imported where they are called.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_calls
import module_calls
import result_calls
import torch
from model_calls import moved
from module_calls import metric
from registry import LAST, RESID, TEXT, Call, Calls, Run, gradients_of, steer

CALLS = Calls()
for _module in (model_calls, result_calls, module_calls):
    CALLS.add(_module.CALLS, "TransformerBridge")
call, calls = CALLS.call, CALLS.calls
del CALLS["TransformerBridge.b_U"]["gradient"]  # there are models without one

# --------------------------------------------------------------------------------------------
# TransformerBridge: what HookedTransformer does not have

calls(
    "TransformerBridge",
    {
        "QK_for_attn_layers": lambda run: run.model.QK_for_attn_layers(),
        "OV_for_attn_layers": lambda run: run.model.OV_for_attn_layers(),
        "QK_for_attn_layers gradient": lambda run: gradients_of(
            run, lambda model: model.QK_for_attn_layers()[1].AB.pow(2).sum()
        ),
        "stack_params_for": lambda run: run.model.stack_params_for("attn", "attn.W_Q"),
        "blocks_with": lambda run: [index for index, _ in run.model.blocks_with("attn")],
        "block_hooks": lambda run: run.model.block_hooks(LAST),
        "block_submodules": lambda run: run.model.block_submodules(LAST),
        "layer_types": lambda run: run.model.layer_types(),
        "attn_head_labels": lambda run: run.model.attn_head_labels,
        "composition_layer_indices": lambda run: run.model.composition_layer_indices(),
        "original_model": lambda run: run.model.original_model(run.tokens_at_home).logits,
        "hook_aliases": lambda run: dict(run.model.hook_aliases),
        "hook_dict": lambda run: list(run.model.hook_dict),
        "mod_dict": lambda run: list(run.model.mod_dict),
        "tokenizer": lambda run: run.model.tokenizer.vocab_size,
        "get_hook_point": lambda run: run.model.get_hook_point(RESID).name,
        "check_hooks_to_add": lambda run: check_hook(run.model, steer(run)),
        "clear_hook_registry": lambda run: without_registry(run.changeable(), run),
        "get_params": lambda run: dict(run.model.get_params()),
        "tl_parameters": lambda run: dict(run.model.tl_parameters()),
        "tl_named_parameters": lambda run: dict(run.model.tl_named_parameters()),
        "parameters": lambda run: [each.cpu() for each in run.model.parameters()],
        "named_parameters": lambda run: on_cpu(dict(run.model.named_parameters())),
        "state_dict": lambda run: on_cpu(run.model.state_dict()),
        "hf_generate": lambda run: run.model.hf_generate(
            run.tokens_at_home, max_new_tokens=3, do_sample=False, stop_at_eos=False
        ),
        "hf_generate text": lambda run: run.model.hf_generate(
            TEXT, max_new_tokens=3, do_sample=False
        ),
        "generate several_texts": lambda run: run.model.generate(
            [TEXT, "w5 w6"], max_new_tokens=3, do_sample=False, verbose=False
        ),
        "forward start_to_stop": lambda run: run.model(
            run.model(run.tokens, stop_at_layer=1), start_at_layer=1, stop_at_layer=4
        ),
        "forward several_texts": lambda run: run.model([TEXT, "w5 w6"]),
        "forward predictions": lambda run: run.model(TEXT, return_type="predictions"),
        "train": lambda run: run.changeable().train()(run.tokens),
        "input_to_embed and_on": lambda run: run.model(
            run.model.input_to_embed(run.tokens)[0], start_at_layer=0
        ),
        "run_with_cache stop_at_layer": lambda run: dict(
            run.model.run_with_cache(run.tokens, stop_at_layer=3)[1].items()
        ),
        "run_with_cache pos_slice": lambda run: dict(
            run.model.run_with_cache(run.tokens, pos_slice=-1)[1].items()
        ),
        "run_with_hooks block_input": lambda run: run.model.run_with_hooks(
            run.tokens, fwd_hooks=[(f"blocks.{LAST}.hook_in", steer(run))]
        ),
        "run_with_hooks attention": lambda run: run.model.run_with_hooks(
            run.tokens,
            fwd_hooks=[(f"blocks.{LAST}.attn.hook_pattern", lambda a, hook: a * 0.5)],
        ),
        "run_with_hooks stop_at_layer": lambda run: run.model.run_with_hooks(
            run.tokens, fwd_hooks=[("blocks.2.hook_resid_post", steer(run))], stop_at_layer=4
        ),
        "to twice": moved(lambda model: model.to(model.cfg.device).to(torch.float64)),
    },
)


def on_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu() for name, weight in weights.items()}


def check_hook(model: Any, hook: Any) -> Any:
    """Each TransformerLens asks for something else."""
    given = {"hook_point": model.hook_dict[RESID], "hook_point_name": RESID, "hook": hook}
    asked = inspect.signature(model.check_hooks_to_add).parameters
    return model.check_hooks_to_add(**{name: given[name] for name in given.keys() & asked})


def without_registry(model: Any, run: Run) -> Any:
    model.clear_hook_registry()
    return model(run.tokens)


@call("TransformerBridge.close")
def close(run: Run) -> Any:
    run.changeable().close()


# --------------------------------------------------------------------------------------------
# transformer_lens.tools: what takes a model


@call("ActivationCache.logit_lens")
def cached_logit_lens(run: Run) -> Any:
    return run.cache.logit_lens()


def with_tools(use: Callable[[Any, Run], Any]) -> Call:
    """A call of the analysis tools, which are imported only then."""

    def run_tool(run: Run) -> Any:
        import transformer_lens.tools.analysis as analysis

        return use(analysis, run)

    return run_tool


def tools(functions: dict[str, Callable[[Any, Run], Any]]) -> None:
    calls("analysis", {name: with_tools(use) for name, use in functions.items()})


def logits_of_two_words(run: Run) -> Any:
    return lambda tokens: run.model(tokens)[:, -1, [5, 7]]


LAST_TOKEN = torch.tensor([8, 8])
"""Its position in each sequence."""


def learned(analysis: Any, run: Run) -> Any:
    """A subspace of a block's residual stream, learned in one step."""
    with contextlib.redirect_stderr(io.StringIO()):
        found = analysis.fit_das(
            run.model,
            RESID,
            run.tokens_at_home,
            run.other_tokens.to(run.model.cfg.device),
            torch.tensor([0, 1]),
            logits_of_two_words(run),
            rank=2,
            epochs=2,
            base_positions=LAST_TOKEN,
            source_positions=LAST_TOKEN,
        )
    return found.losses  # the subspace itself hangs on the rounding of gradients near zero


def interchange(analysis: Any, run: Run) -> tuple[Any, ...]:
    """The arguments of an intervention on a block's residual stream."""
    source = analysis.collect_activations(
        run.model, RESID, run.other_tokens, logits_of_two_words(run), positions=LAST_TOKEN
    )
    subspace = analysis.SubspaceInterchange(analysis.random_basis(run.model.cfg.d_model, 3, 0))
    return run.model, RESID, subspace, run.tokens_at_home, source, logits_of_two_words(run)


def direct_path(analysis: Any, run: Run) -> dict[str, Any]:
    return {
        "model": run.model,
        "corrupted_tokens": run.tokens[:1, :2],
        "clean_cache": run.model.run_with_cache(run.other_tokens[:1, :2])[1],
        "corrupted_cache": run.model.run_with_cache(run.tokens[:1, :2])[1],
        "patching_metric": metric,
        "verbose": False,
    }


def attribution(analysis: Any, run: Run, granularity: str) -> Any:
    return analysis.attribution_patch(
        run.changeable(),
        run.tokens[:1, :2],
        run.other_tokens[:1, :2],
        metric,
        analysis.EdgeAttributionConfig(granularity),
    )


def faithful(analysis: Any, run: Run) -> Any:
    found = attribution(analysis, run, "edge")
    circuit = sorted(found.edge_scores, key=str)[20:]
    return analysis.faithfulness(
        run.changeable(), run.tokens[:1, :2], run.other_tokens[:1, :2], metric, circuit
    )


tools(
    {
        "logit_lens": lambda a, run: a.logit_lens(run.model, run.tokens, incl_mid=True),
        "logit_lens text": lambda a, run: a.logit_lens(run.model, TEXT, top_k=3),
        "logit_lens cache": lambda a, run: a.logit_lens(run.model, cache=run.cache),
        "logit_lens cache_on_the_CPU": lambda a, run: a.logit_lens(
            run.model, cache=run.cache.to("cpu")
        ),
        "logit_readout": lambda a, run: a.logit_readout(run.model, run.cache["resid_post", LAST]),
        "direct_logit_attribution": lambda a, run: a.direct_logit_attribution(
            run.model, run.tokens, "w5", "w7"
        ),
        "direct_logit_attribution head": lambda a, run: a.direct_logit_attribution(
            run.model, run.tokens, "w5", unit="head"
        ),
        "direct_logit_attribution layer": lambda a, run: a.direct_logit_attribution(
            run.model, answer_tokens="w5", unit="layer", cache=run.cache
        ),
        "attribution_patch node": lambda a, run: attribution(a, run, "node"),
        "attribution_patch edge": lambda a, run: attribution(a, run, "edge"),
        "faithfulness": faithful,
        "attention_head_subspace_affinity Q": lambda a, run: a.attention_head_subspace_affinity(
            run.model, target_role="Q"
        ),
        "attention_head_subspace_affinity V": lambda a, run: a.attention_head_subspace_affinity(
            run.model, target_role="V"
        ),
        "get_act_patch_direct_path": lambda a, run: a.get_act_patch_direct_path(
            **direct_path(a, run), src_layer=2, src_head=1
        ),
        "collect_activations": lambda a, run: a.collect_activations(
            run.model, RESID, run.tokens, logits_of_two_words(run), positions=LAST_TOKEN
        ),
        "run_with_intervention": lambda a, run: a.run_with_intervention(
            *interchange(a, run), positions=LAST_TOKEN
        ),
        "intervened_logits": lambda a, run: a.intervened_logits(
            *interchange(a, run), positions=LAST_TOKEN
        ),
        "fit_das": learned,
    }
)


def lens(run: Run) -> Any:
    """A Jacobian lens of random maps: what is swept is how it is read."""
    from transformer_lens.tools.analysis import JacobianLens

    d_model = run.model.cfg.d_model
    generator = torch.Generator().manual_seed(0)
    return JacobianLens(
        {
            layer: torch.eye(d_model) + 0.1 * torch.randn(d_model, d_model, generator=generator)
            for layer in range(LAST)
        },
        n_prompts=1,
        d_model=d_model,
    )


def saved_and_loaded(run: Run) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "lens.pt")
        lens(run).save(path)
        return type(lens(run)).load(path).jacobians


def hooked_by_lens(name: str, *args: Any, **options: Any) -> Call:
    return lambda run: run.model.run_with_hooks(
        run.tokens, fwd_hooks=getattr(lens(run), name)(run.model, *args, **options)
    )


def fitted(run: Run) -> Any:
    return type(lens(run)).fit(
        run.model,
        [TEXT],
        corpus="words",
        dim_batch=4,
        max_seq_len=7,
        skip_first_positions=1,
        show_progress=False,
    )


calls(
    "JacobianLens",
    {
        "readout": lambda run: lens(run).readout(run.model, run.tokens[:1], top_k=3),
        "readout text": lambda run: lens(run).readout(run.model, TEXT, return_full_logits=True),
        "lens_vectors": lambda run: lens(run).lens_vectors(run.model, ["w5", "w7"], 3),
        "lens_vector_dictionary": lambda run: lens(run).lens_vector_dictionary(run.model, 3),
        "transport": lambda run: lens(run).transport(run.cache["resid_post", 3], 3),
        "decompose": lambda run: lens(run).decompose(run.model, TEXT, 3, position=-1, k=3),
        "coordinate_patch": lambda run: lens(run).coordinate_patch(
            run.model, TEXT, 3, "w5", "w7", position=-1, k=3
        ),
        "occupancy": lambda run: lens(run).occupancy(
            run.model, TEXT, 3, position=-1, max_atoms=3, num_control_dictionaries=2
        ),
        "fraction_of_variance": lambda run: lens(run).fraction_of_variance(
            run.model, TEXT, [2, 3], k=3, skip_first=1
        ),
        "steering_hooks": hooked_by_lens("steering_hooks", "w5", [2, 3]),
        "ablation_hooks": hooked_by_lens("ablation_hooks", ["w5", "w7"], [2, 3]),
        "swap_hooks": hooked_by_lens("swap_hooks", "w5", "w7", [2, 3]),
        "swap_clamp_hooks": lambda run: run.model.run_with_hooks(
            run.tokens,
            fwd_hooks=lens(run).swap_clamp_hooks(run.model, "w5", "w7", [2, 3], run.cache),
        ),
        "coordinate_patch_hooks": hooked_by_lens(
            "coordinate_patch_hooks", "w5", "w7", [3], positions=[2], k=3
        ),
        "fit": fitted,
        "save": saved_and_loaded,
        "validate_model": lambda run: lens(run).validate_model(run.model).n_prompts,
        "source_layers": lambda run: lens(run).source_layers,
        "clear_device_cache": lambda run: lens(run).clear_device_cache(),
        "merge": lambda run: type(lens(run)).merge([lens(run), lens(run)]).jacobians,
    },
)


@call("training.train")
def train(run: Run) -> Any:
    from transformer_lens.tools.training import TrainConfig, train

    model = run.changeable()
    config = TrainConfig(
        num_epochs=2, batch_size=2, optimizer_name="SGD", lr=1e-2, device=model.cfg.device
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        return train(model, config, [{"tokens": each} for each in run.tokens])(run.tokens)


# --------------------------------------------------------------------------------------------


def left_out(reason: str, prefix: str, *names: str) -> dict[str, str]:
    return {f"{prefix}.{name}": reason for name in names}


BRIDGE = "TransformerBridge"
DIRECT_PATH, ALL_SOURCES = "get_act_patch_direct_path", "get_act_patch_direct_path_all_sources"
WITHOUT_MODEL = (
    *("EdgeAttributionConfig", "FaithfulnessConfig", "JSpaceDecomposition", "LearnedSubspace"),
    *("Node", "NormMatchedPlacebo", "SparseProbeConvergenceError", "SubspaceBasis"),
    *("SubspaceInterchange", "arbitrary_targets", "fit_sparse_probe", "sweep_sparse_probe"),
    *("get_sparse_decomposition", "mean_difference_basis", "neuron_basis", "probe_basis"),
    *("orthonormal_subspace", "projection_kernel", "random_projection_kernel_moments"),
    *("random_basis", "random_neuron_basis", "solve_coordinate_patch"),
)
WITHOUT_MODEL_IN_3 = (
    *("AttentionHeadRef", "AttributionResult", "BackwardLensLayerResult"),
    *("BackwardLensMatrixResult", "BackwardLensResult", "CoordinatePatch"),
    *("DirectLogitAttribution", "HeadAffinityPair", "HeadAffinityResult", "JSpaceOccupancy"),
    *("JSpaceVarianceProfile", "JacobianLensReadout", "LinearGradientFactors"),
    *("ProjectedFactor", "ProjectionKernelResult", "RandomSubspaceReference"),
    *("VocabularyRanking", "WeightLayout", "estimate_occupancy"),
    "solve_coordinate_patch_positions",
)
LEFT_OUT: dict[str, str] = {
    **left_out(
        "tests/transformer_bridge/test_parity.py", BRIDGE, "boot_transformers", "process_weights"
    ),
    **left_out("tests/transformer_bridge/test_parity.py", BRIDGE, "enable_compatibility_mode"),
    **left_out("one device: it places nothing", BRIDGE, "boot_native", "boot_tl_legacy"),
    **left_out("no model", BRIDGE, "check_model_support", "list_supported_models"),
    **left_out("draws anew, so there is nothing to compare with", BRIDGE, "init_weights"),
    **left_out("needs CUDA devices", BRIDGE, "cuda"),
    **left_out("needs Apple's devices", BRIDGE, "mps"),
    **left_out("of diffusion language models", BRIDGE, "diffusion_generate"),
    **left_out("of audio encoders", BRIDGE, "encoder_output"),
    **left_out("of models that also take images", BRIDGE, "prepare_multimodal_inputs"),
    **left_out("of BERT", BRIDGE, "predict_next_sentence", "to_sentence_pair_tokens"),
    **left_out(
        "of state-space layers",
        "ActivationCache",
        *("ssm_layers", "compute_ssm_state", "compute_ssm_effective_attention"),
    ),
    **left_out("converts what one hook point sees", "HookPoint", "enable_reshape"),
    **left_out("see JacobianLens.save", "JacobianLens", "load"),
    **left_out("fetches a lens", "JacobianLens", "from_pretrained"),
    **module_calls.LEFT_OUT,
    **left_out("as get_act_patch_direct_path, of every head", "patching", ALL_SOURCES),
    **left_out("as get_act_patch_direct_path, of every head", "analysis", ALL_SOURCES),
    **left_out("called as analysis.get_act_patch_direct_path", "patching", DIRECT_PATH),
    **left_out("a result; it holds what is compared", "patching", "PatchingResult"),
    **left_out("a config; used by train", "training", "TrainConfig"),
    **left_out("its methods are compared", "analysis", "JacobianLens"),
    **left_out(
        "boots a model without its weights, on one device", "analysis", "random_init_bridge"
    ),
    **left_out("draws anew, so there is nothing to compare with", "analysis", "reinitialized"),
    **left_out("no model", "analysis", *WITHOUT_MODEL),
    **left_out("TransformerLens 3.9's alone, and no model", "analysis", *WITHOUT_MODEL_IN_3),
    **left_out("TransformerLens 3.9's alone", "analysis", "BackwardLens"),
}
"""What the sweep does not call, and why."""

NEW_IN_4 = frozenset(
    {
        *(
            f"TransformerBridge.{name}"
            for name in (
                *("W_pos", "W_E_pos", "add_caching_hooks", "get_caching_hooks", "cache_all"),
                *("cache_some", "close", "input_to_embed", "mod_dict"),
            )
        ),
        *(
            f"analysis.{name}"
            for name in (
                *("logit_lens", "logit_readout", "faithfulness", "collect_activations"),
                *("run_with_intervention", "intervened_logits", "fit_das"),
            )
        ),
        *("ActivationCache.logit_lens", "training.train"),
    }
)
"""What is compared, and not in TransformerLens 3.9.0."""
