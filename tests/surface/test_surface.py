"""Everything public in the installed TransformerLens gives on n devices what it gives on one CPU.

A function that is registered with `of` yields what is compared. Each public name of its owners
occurs in it, or is in `LEFT_OUT` with a reason. To compare a new one, add a line.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pkgutil
import random
import re
from collections.abc import Iterable
from copy import deepcopy
from tempfile import NamedTemporaryFile
from unittest import mock

import pytest
import torch
import transformer_lens.evals as evals
import transformer_lens.head_detector as head_detector
import transformer_lens.patching as patching
from comparison import assert_agrees, on_cpu
from model_classes import BRIDGE, CLASSES, HOOKED
from runs_of_users import GREEDY, double, metric
from torch.utils._pytree import tree_leaves
from transformer_lens import SVDInterpreter

import tl_devicefix

MODEL_CLASS = CLASSES[0]
"""TransformerLens 4 alone compares a TransformerBridge."""
LAST = 4
"""A block that is never at home on several devices."""
RESID = f"blocks.{LAST}.hook_resid_post"
TEXT, OTHER_TEXT = "w5 w7 w9 w5 w7 w11", "w6 w7 w8 w6 w7 w12"
FEW = {"max_new_tokens": 3, "do_sample": False}
PLACES = [("gpt2", 3), ("llama", 4), ("phi-3" if MODEL_CLASS == HOOKED else "llama as booted", 3)]
PLACES += [("llama", 1)]
"""Kinds of models, folded unless they say otherwise, and over how many devices."""

ON_SEVERAL, ON_GPT2, AS_BOOTED = PLACES[:3], PLACES[:1], PLACES[2:3]
FUNCTIONS = {}
"""Function -> the owners of the names in it, and the places that it has."""


def of(*owners, places=PLACES):
    """Register a function that `results` calls."""

    def register(function):
        FUNCTIONS[function] = owners, places
        return function

    return register


OF_MODELS = "HookedTransformer", "TransformerBridge"


def is_resid(name):
    return "resid" in name


def gradients(model, frozen, loss):
    """Return the gradients of a scalar by weights that are not frozen, on the CPU."""
    model.zero_grad()
    loss.backward()
    weights = {name: each for name, each in model.named_parameters() if name not in frozen}
    weights = {name: each for name, each in weights.items() if each.grad is not None}
    assert all(each.grad.device == each.device for each in weights.values())
    return {name: each.grad.cpu() for name, each in weights.items()}


@of(*OF_MODELS)
def weights(model):
    yield from (model.W_E, model.W_U, model.b_U, model.W_Q, model.W_K, model.W_V, model.W_O)
    yield from (model.W_in, model.W_out, model.QK, model.OV)
    yield model.n_params_total if hasattr(model, "n_params_total") else None
    for layer in range(6):
        yield model.accumulated_bias(layer)
    yield model.accumulated_bias(3, mlp_input=True)
    yield model.accumulated_bias(5, include_mlp_biases=False)
    labels = model.all_head_labels
    yield labels() if callable(labels) else labels
    yield from map(model.all_composition_scores, "QKV")


@of(*OF_MODELS, places=ON_GPT2)
def weights_of_some_architectures(model, frozen):
    yield from (model.W_pos, model.W_E_pos, model.b_Q, model.b_K, model.b_V, model.b_O)
    yield from (model.b_in, model.b_out)
    yield gradients(model, frozen, model.b_V.pow(2).sum())


@of(*OF_MODELS)
def gradients_of_weights_and_activations(new, tokens, frozen, direction):
    model = new()
    if model.cfg.gated_mlp:
        yield model.W_gate
    for tensor in (model.W_E, model.W_K, model.W_in, model.OV.AB):
        yield gradients(model, frozen, tensor.pow(2).sum())
    model.add_hook(RESID, lambda gradient, hook: (gradient * direction,), "bwd")
    yield gradients(model, frozen, model(tokens).mean())
    yield new().run_with_cache(tokens, return_type="loss", incl_bwd=True)


@of(*OF_MODELS)
def texts_and_tokens(model, tokens):
    yield from map(model.tokens_to_residual_directions, ("w5", 5, tokens))
    yield model.to_tokens([TEXT, OTHER_TEXT])
    yield model.to_single_token("w5")
    yield model.to_single_str_token(5)
    yield model.to_string(tokens)
    yield model.to_str_tokens(tokens[0])
    yield model.get_token_position("w7", TEXT)


@of(*OF_MODELS)
def moved(new, tokens):
    home = new().cfg.device
    yield new().to(home)(tokens)
    yield new().cpu()(tokens.cpu())


@of(*OF_MODELS)
def changed_in_dtype(new, tokens):
    yield new().to(torch.float64)(tokens)
    model = new()
    yield model.to(model.cfg.device).to(torch.float64)(tokens)


@of(*OF_MODELS)
def runs(model, tokens):
    yield from (model(tokens), model(TEXT), model(tokens, return_type="both"))
    yield model(tokens, stop_at_layer=3)
    yield model(model(tokens, stop_at_layer=3), start_at_layer=3)
    yield model(tokens, return_type="loss", loss_per_token=True)
    yield model.forward(tokens)
    yield model.loss_fn(model(tokens), tokens)
    yield model.input_to_embed(tokens)
    yield model.run_with_cache(tokens)
    yield model.run_with_cache(tokens, names_filter=is_resid)
    yield model.run_with_cache(tokens, return_cache_object=False)
    yield model.run_with_cache(tokens, device="cpu")
    yield model.run_with_cache(tokens, stop_at_layer=3)
    yield model.run_with_cache(tokens, pos_slice=-1)
    _, cache = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    yield cache.stack_head_results(apply_ln=True)


@of(*OF_MODELS)
def generated(model, tokens, steer, kv_cache):
    for hooks in ([], [(RESID, steer)]):
        with model.hooks(fwd_hooks=hooks):
            yield model.generate(tokens, **GREEDY, **kv_cache)
            yield model.generate(tokens, use_past_kv_cache=False, **GREEDY)
            yield model.generate(TEXT, verbose=False, **FEW, **kv_cache)
    if hasattr(model, "generate_stream"):
        yield list(model.generate_stream(tokens, max_tokens_per_yield=1, **GREEDY, **kv_cache))


@of(*OF_MODELS)
def runs_with_hooks(model, tokens, steer):
    yield model.run_with_hooks(tokens, fwd_hooks=[(RESID, steer)])
    with model.hooks(fwd_hooks=[(RESID, steer)]):
        yield model(tokens)
    yield model(tokens)
    yield model.check_hooks_to_add(model.hook_dict[RESID], RESID, steer)
    yield [point.name for point in model.hook_points()]
    yield list(model.list_hooks()) if hasattr(model, "list_hooks") else None
    cache, hooks, _ = model.get_caching_hooks()
    yield model.run_with_hooks(tokens, fwd_hooks=hooks)
    yield cache
    yield model.clear_contexts()


@of(*OF_MODELS, "HookPoint")
def hooked_by_hand(copy, tokens, steer, direction):
    point = copy.hook_dict[RESID]
    yield point.layer()
    yield point.has_hooks() if hasattr(point, "has_hooks") else None
    yield copy.hook_dict["hook_embed"].forward(direction)
    for step in (
        lambda: point.add_hook(steer),
        lambda: point.add_hook(double, prepend=True),
        point.clear_context,
        point.remove_hooks,
        lambda: point.add_perma_hook(steer),
        copy.remove_all_hook_fns,
        lambda: copy.add_hook(RESID, double),
        lambda: copy.add_perma_hook(RESID, steer),
        copy.reset_hooks,
    ):
        step()
        yield from (copy(tokens), copy(tokens))
    every, some, made = {}, {}, copy.add_caching_hooks()
    copy.cache_all(every)
    copy.cache_some(some, is_resid)
    yield copy(tokens)
    yield from map(on_cpu, (made, every, some))


@of(*OF_MODELS)
def settings_that_add_hook_points(copy, tokens):
    points = {
        copy.set_use_attn_result: "attn.hook_result",
        copy.set_use_split_qkv_input: "hook_q_input",
        copy.set_use_hook_mlp_in: "hook_mlp_in",
    }
    if copy.cfg.n_key_value_heads is None:
        points[copy.set_use_attn_in] = "hook_attn_in"
    for setting, point in points.items():
        setting(True)
        yield copy.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{LAST}.{point}", double)])
        yield copy.run_with_cache(tokens)
        setting(False)


@of("HookedTransformer")
def a_hooked_transformer(new, tokens, steer):
    model = new()
    yield model.get_residual(model.embed(tokens), 0)
    yield model.get_pos_offset(None, 2)
    model.set_tokenizer(model.tokenizer)
    for step in (model.move_model_modules_to_device, model.setup):
        step()
        yield model(tokens)
    model.set_ungroup_grouped_query_attention(True)
    yield model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{LAST}.attn.hook_v", double)])
    yield model.run_with_cache(tokens)
    model.check_and_add_hook(model.hook_dict[RESID], RESID, steer)
    yield model(tokens)


@of("TransformerBridge")
def a_bridge(model, frozen):
    yield from (model.QK_for_attn_layers(), model.OV_for_attn_layers(), model.layer_types())
    yield from (model.get_params(), model.composition_layer_indices(), model.hook_aliases)
    yield from (model.tl_parameters(), model.tl_named_parameters(), model.attn_head_labels)
    yield model.stack_params_for("attn", "attn.W_Q")
    yield from (model.block_hooks(LAST), model.block_submodules(LAST))
    yield [index for index, _ in model.blocks_with("attn")]
    yield gradients(model, frozen, model.QK_for_attn_layers()[1].AB.pow(2).sum())
    yield from (list(model.hook_dict), list(model.mod_dict), model.tokenizer.vocab_size)
    yield model.get_hook_point(RESID).name
    yield [each.cpu() for each in model.parameters()]
    yield from (on_cpu(dict(model.named_parameters())), on_cpu(model.state_dict()))


@of("TransformerBridge")
def runs_of_a_bridge(model, tokens, steer, kv_cache):
    yield model(model(tokens, stop_at_layer=3), start_at_layer=3, stop_at_layer=4)
    yield model([TEXT, "w5 w6"])
    yield model(TEXT, return_type="predictions")
    yield model(model.input_to_embed(tokens)[0], start_at_layer=0)
    yield model.generate([TEXT, "w5 w6"], **FEW, verbose=False, **kv_cache)
    yield model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.hook_in", steer)])
    yield model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.attn.hook_pattern", double)])
    hook = "blocks.2.hook_resid_post", steer
    yield model.run_with_hooks(tokens, fwd_hooks=[hook], stop_at_layer=4)


@of("TransformerBridge")
def loaded_again_and_closed(copy, tokens):
    yield len(copy.load_state_dict(copy.state_dict()))
    copy.clear_hook_registry()
    yield copy(tokens)
    yield copy.close()


@of("TransformerBridge")
def runs_of_transformers(model, tokens, kv_cache):
    options = {**FEW, "use_cache": not kv_cache, **kv_cache}
    yield model.hf_generate(tokens, **options, stop_at_eos=False)
    yield model.hf_generate(TEXT, **options)
    yield model.original_model(tokens).logits


NEURONS = {"layer": -1, "pos_slice": -1, "neuron_slice": (0, 3)}
NEURONS |= {"apply_ln": True, "incl_remainder": True}


def only(model, tokens, *names):
    return model.run_with_cache(tokens, names_filter=lambda name: name.endswith(names))[1]


@of("ActivationCache")
def a_cache(model, tokens, cache):
    yield from (cache.keys(), cache.values(), cache.items(), iter(cache), len(cache))
    yield from (cache["resid_post", -1], cache["z", 3])
    yield cache.accumulated_resid(incl_mid=True, apply_ln=True)
    yield cache.accumulated_resid(3, mlp_input=True, pos_slice=-1)
    residuals = only(model, tokens, "resid_pre", "resid_post", "hook_scale")
    yield residuals.accumulated_resid(apply_ln=True)
    yield cache.decompose_resid(apply_ln=True)
    yield cache.decompose_resid(4, mode="attn", return_labels=True)
    yield cache.get_neuron_results(LAST, neuron_slice=(0, 3), pos_slice=-1)
    yield cache.stack_neuron_results(**NEURONS)
    yield cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1, return_labels=True)
    yield cache.get_full_resid_decomposition(3, expand_neurons=False)
    yield cache.stack_activation("pattern")
    yield cache.apply_ln_to_stack(cache.decompose_resid())
    last = cache.decompose_resid(3, pos_slice=-1)
    yield cache.apply_ln_to_stack(last, layer=3, pos_slice=-1)
    yield cache.logit_attrs(cache.accumulated_resid(pos_slice=-1), "w5", "w7", pos_slice=-1)
    yield cache.logit_attrs(cache.decompose_resid(pos_slice=-1), tokens[:, -1], pos_slice=-1)
    yield cache.logit_lens() if hasattr(cache, "logit_lens") else None
    yield cache.apply_slice_to_batch_dim(1).accumulated_resid()
    yield only(model, tokens[:1], "z", "post").remove_batch_dim().stack_head_results()
    yield cache.stack_head_results(3, pos_slice=-1, return_labels=True)
    yield cache.stack_head_results(apply_ln=True, incl_remainder=True)
    _, cache = model.run_with_cache(tokens)
    cache.compute_head_results()
    yield cache["result", LAST]
    cache.toggle_autodiff(False)
    yield model.W_Q.requires_grad
    cache.toggle_autodiff(True)


@of("ActivationCache", places=ON_SEVERAL)
def a_cache_on_the_cpu(cache):
    """On one device, TransformerLens leaves the weights there."""
    cache.to("cpu")
    yield from (cache["resid_post", -1], cache["z", 3])
    yield cache.accumulated_resid(incl_mid=True, apply_ln=True)
    yield cache.stack_head_results(apply_ln=True)
    yield cache.stack_neuron_results(**NEURONS)


@of("FactoredMatrix")
def factored_matrices(model, direction):
    product, queries = model.OV, model.QK
    yield from (product.AB, product.BA, product.S, product.T, product.ndim, product.pair)
    yield from (product.U.abs(), product.Vh.abs(), product.norm(), product.unsqueeze(0))
    yield product.V.abs() if hasattr(product, "V") else None
    yield from (product.collapse_l().abs(), product.collapse_r().abs(), queries.AB)
    yield from (product.svd()[1], queries.svd()[1], product.eigenvalues.abs().sort().values)
    yield from (product[2, 1], queries[2, 1], product[0, 0].get_corner())
    yield product.make_even().A.abs()
    yield (product[LAST] @ model.W_U).AB
    yield (model.W_E @ queries[LAST] @ model.W_E.T).AB
    yield from ((product * direction.sum()).AB, (direction.sum() * product).AB)


@of("SVDInterpreter", places=ON_GPT2)
def singular_vectors(model):
    svd = SVDInterpreter(model)
    yield svd.get_singular_vectors("OV", LAST, 2, 1).abs()
    yield svd.get_singular_vectors("w_in", LAST, 2).abs()
    yield svd.get_singular_vectors("w_out", LAST, 2).abs()


@of("head_detector")
def detected_heads(model):
    detect = head_detector.detect_head
    yield detect(model, TEXT, "induction_head")
    yield detect(model, TEXT, "previous_token_head", error_measure="abs")
    yield detect(model, TEXT, "duplicate_token_head", exclude_bos=True)
    yield detect(model, TEXT, torch.ones(7, 7, device=model.cfg.device).tril())


@of("evals", places=ON_SEVERAL)
def evaluations(model, tokens):
    """On one device, TransformerLens's `ioi_eval` gives it tokens on the CPU."""
    # Tokens of the tiny vocabulary, because it draws from a larger one.
    small = torch.arange(12).view(2, 6) + 5
    with mock.patch.object(torch, "randint", return_value=small):
        yield evals.induction_loss(model, batch_size=2, subseq_len=6, device=model.cfg.device)
    templates, names = ["w8 [A] w9 [B] w10 [A] w11 [B]"], ["w5", "w6", "w7"]
    nouns = {"[OBJECT]": ["w12"]}
    dataset = evals.IOIDataset(model.tokenizer, templates, names, nouns, num_samples=4)
    yield evals.ioi_eval(model, dataset=dataset, batch_size=2)
    yield evals.evaluate_on_dataset(model, [{"tokens": tokens}], device=model.cfg.device)


@of("train", "training", "TransformerBridge")
def trained(copy, tokens):
    """After two epochs, and in training mode."""
    training = of_installed(".tools.training") or of_installed(".train")
    config = getattr(training, "TrainConfig", None) or training.HookedTransformerTrainConfig
    options = {"num_epochs": 2, "batch_size": 2, "optimizer_name": "SGD", "lr": 1e-2}
    data = [{"tokens": row} for row in tokens]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        config = config(**options, device=copy.cfg.device)
        copy = training.train(copy, config, data)
    yield from (copy(tokens), copy.train()(tokens))


@of("patching", places=ON_SEVERAL)
def patched(model, tokens):
    """One token is enough where each head, or each pair of tokens, costs a forward."""
    tokens, one = tokens[:1, :2], tokens[:1, :1]
    clean, of_one = (model.run_with_cache(each - 1)[1] for each in (tokens, one))
    layers = {"activation_name": "resid_post", "index_axis_names": ["layer", "pos"]}
    layers |= {"patch_setter": patching.layer_pos_patch_setter}
    with torch.no_grad():
        yield patching.generic_activation_patch(model, tokens, clean, metric, **layers)
        yield patching.get_act_patch_resid_pre(model, tokens, clean, metric)
        yield patching.get_act_patch_attn_head_out_by_pos(model, one, of_one, metric)
        yield patching.get_act_patch_attn_head_pattern_dest_src_pos(model, one, of_one, metric)


# transformer_lens.tools, for a TransformerBridge

AT_LAST = {"positions": torch.tensor([8, 8])}
"""The last token of each sequence."""


@of("analysis", places=ON_SEVERAL)
def logit_lenses(model, tokens, cache):
    """On one device, TransformerLens leaves the weights there."""
    yield analysis.logit_lens(model, tokens, incl_mid=True)
    yield analysis.logit_lens(model, TEXT, top_k=3)
    yield analysis.logit_lens(model, cache=cache)
    yield analysis.logit_readout(model, cache["resid_post", LAST])
    yield analysis.logit_lens(model, cache=cache.to("cpu"))


@of("analysis", places=[*ON_GPT2, PLACES[-1]])
def attributed_logits(model, tokens, cache):
    """A model that is not folded is refused."""
    attribute = analysis.direct_logit_attribution
    yield attribute(model, tokens, "w5", "w7")
    yield attribute(model, tokens, "w5", unit="head")
    yield attribute(model, answer_tokens="w5", unit="layer", cache=cache)


@of("analysis", places=ON_GPT2)
def attributed_to_edges(new, tokens):
    def attribution(granularity):
        config = analysis.EdgeAttributionConfig(granularity)
        return analysis.attribution_patch(new(), tokens, tokens.flip(1), metric, config)

    tokens = tokens[:1, :2]
    yield attribution("node")
    yield (of_edges := attribution("edge"))
    circuit = sorted(of_edges.edge_scores, key=str)[20:]
    yield analysis.faithfulness(new(), tokens, tokens.flip(1), metric, circuit)


@of("analysis")
def affinities_and_direct_paths(model, tokens):
    yield analysis.attention_head_subspace_affinity(model, target_role="Q")
    yield analysis.attention_head_subspace_affinity(model, target_role="V")
    tokens = tokens[:1, :2]
    clean, corrupted = (model.run_with_cache(each)[1] for each in (tokens.flip(1), tokens))
    yield analysis.get_act_patch_direct_path(
        model=model,
        corrupted_tokens=tokens,
        clean_cache=clean,
        corrupted_cache=corrupted,
        patching_metric=metric,
        src_layer=2,
        src_head=1,
        verbose=False,
    )


@of("analysis")
def interchanged_subspaces(model, tokens, readout):
    """The subspace that is learned is not compared: it hangs on the rounding of gradients near 0.

    Its losses are.
    """
    yield analysis.collect_activations(model, RESID, tokens, readout, **AT_LAST)
    source = analysis.collect_activations(model, RESID, tokens.flip(1), readout, **AT_LAST)
    subspace = analysis.SubspaceInterchange(analysis.random_basis(model.cfg.d_model, 3, 0))
    given = model, RESID, subspace, tokens, source, readout
    yield analysis.run_with_intervention(*given, **AT_LAST)
    yield analysis.intervened_logits(*given, **AT_LAST)
    given = model, RESID, tokens, tokens.flip(1), torch.tensor([0, 1]), readout
    last = AT_LAST["positions"]
    with contextlib.redirect_stderr(io.StringIO()):
        options = {"base_positions": last, "source_positions": last, "rank": 2, "epochs": 2}
        yield analysis.fit_das(*given, **options).losses


def jacobian_lens(d_model):
    """Return a Jacobian lens of random maps, because only its readings are compared."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(d_model, d_model, generator=generator) for _ in range(LAST)]
    maps = {layer: torch.eye(d_model) + 0.1 * each for layer, each in enumerate(noise)}
    return analysis.JacobianLens(maps, n_prompts=1, d_model=d_model)


@of("JacobianLens", places=AS_BOOTED)
def a_jacobian_lens(model, tokens, cache, lens):
    """It refuses folded weights."""
    yield lens.readout(model, tokens[:1], top_k=3)
    yield lens.readout(model, TEXT, return_full_logits=True)
    yield lens.lens_vectors(model, ["w5", "w7"], 3)
    yield lens.lens_vector_dictionary(model, 3)
    yield lens.transport(cache["resid_post", 3], 3)
    yield lens.decompose(model, TEXT, 3, position=-1, k=3)
    yield lens.coordinate_patch(model, TEXT, 3, "w5", "w7", position=-1, k=3)
    yield lens.occupancy(model, TEXT, 3, position=-1, max_atoms=3, num_control_dictionaries=2)
    yield lens.fraction_of_variance(model, TEXT, [2, 3], k=3, skip_first=1)
    for hooks in (
        lens.swap_clamp_hooks(model, "w5", "w7", [2, 3], cache),
        lens.steering_hooks(model, "w5", [2, 3]),
        lens.ablation_hooks(model, ["w5", "w7"], [2, 3]),
        lens.swap_hooks(model, "w5", "w7", [2, 3]),
    ):
        yield model.run_with_hooks(tokens, fwd_hooks=hooks)
    hooks = lens.coordinate_patch_hooks(model, "w5", "w7", [3], positions=[6], k=3)
    yield model.run_with_hooks(TEXT, fwd_hooks=hooks)
    yield type(lens).fit(model, [TEXT], corpus="words", skip_first_positions=1)
    with NamedTemporaryFile(suffix=".pt") as file:
        lens.save(file.name)
        yield type(lens).load(file.name).jacobians
    yield lens.validate_model(model).n_prompts
    yield from (lens.source_layers, lens.clear_device_cache())
    yield type(lens).merge([lens, lens]).jacobians


METHODS = "__getitem__", "__iter__", "__len__", "__matmul__", "__rmatmul__", "__mul__", "__rmul__"
"""Methods with a protocol's name that users call by its syntax."""
LEFT_OUT = {
    "of types that no simulated device has": "cuda mps",
    "draw anew, so there is nothing to compare with": "init_weights reinitialized",
    "compared in tests/parity": "from_pretrained from_pretrained_no_processing process_weights_ "
    "load_and_process_state_dict fill_missing_keys fold_layer_norm fold_value_biases "
    "center_unembed center_writing_weights refactor_factored_attn_matrices",
    "compared in tests/transformer_bridge": "boot_transformers process_weights "
    "enable_compatibility_mode",
    "place nothing: they boot on one device": "boot_native boot_tl_legacy",
    "have no model": "check_model_support list_supported_models",
    "of models of other kinds": "diffusion_generate encoder_output prepare_multimodal_inputs "
    "predict_next_sentence to_sentence_pair_tokens ssm_layers compute_ssm_state "
    "compute_ssm_effective_attention",
    "fetch data": "load_sample_training_dataset sample_datapoint evaluate mmlu_eval sanity_check",
    "changes what one hook sees": "enable_reshape",
    "call `generic_activation_patch`, or are those of analysis": " ".join(
        name for name in dir(patching) if name.startswith("get_act_patch_")
    ),
    "called by their syntax": " ".join(METHODS),
}
"""Reason -> names that are not called, or not by name."""


def of_installed(path):
    """Return a class or module of the installed TransformerLens; None if it has none."""
    with contextlib.suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(f"transformer_lens{path}")


analysis = of_installed(".tools.analysis")
OWNERS = [":ActivationCache", ":FactoredMatrix", ":SVDInterpreter", ".hook_points:HookPoint"]
OWNERS += [".patching", ".evals", ".head_detector", ".train", ".tools.training"]
if MODEL_CLASS == BRIDGE:
    OWNERS += [".model_bridge:TransformerBridge", ".tools.analysis:JacobianLens", ".tools.analysis"]
else:
    OWNERS += [":HookedTransformer"]
OWNERS = {owner.__name__.split(".")[-1]: owner for owner in map(of_installed, OWNERS) if owner}


def is_public(owner, name):
    """Return True for a class's own names, and for a module's functions of a model."""
    if isinstance(owner, type):
        base = next(base for base in owner.__mro__ if name in vars(base))
        return base.__module__.startswith("transformer_lens")
    value = getattr(owner, name)
    is_function = callable(value) and not isinstance(value, type)
    return is_function and "model" in inspect.signature(value).parameters


@pytest.mark.parametrize("owner", OWNERS)
def test_every_public_name_is_called_or_left_out(owner):
    public = {name for name in dir(OWNERS[owner]) if name[0] != "_" or name in METHODS}
    known = {name for names in LEFT_OUT.values() for name in names.split()}
    for function, (owners, *_) in FUNCTIONS.items():
        if owner in owners:
            known |= {*re.findall(r"\.(\w+)", inspect.getsource(function))}
    assert {name for name in public - known if is_public(OWNERS[owner], name)} == set()


ON_ONE = {hooked_by_hand, a_cache} if MODEL_CLASS == HOOKED else set()
"""Run on one device too: tests/versions has the others, tests/transformer_bridge a Bridge's."""


def cases():
    """Each function over several devices in one of its places, in turn; with `--full`, in all."""
    registered = [it for it in FUNCTIONS.items() if {*it[1][0]} & {*OWNERS}]
    for i, (function, (_, places)) in enumerate(registered):
        spread = [place for place in places if place[1] > 1]
        for place in places:
            is_quick = place == spread[i % len(spread)] or (place[1] == 1 and function in ON_ONE)
            name = f"{function.__name__}-{place[0]}-{place[1]}"
            marks = () if is_quick else pytest.mark.full
            yield pytest.param(function, *place, marks=marks, id=name)


REFUSED_OVER_HOSTS = {
    changed_in_dtype: "keep their device and dtype",
    loaded_again_and_closed: "are frozen",
    trained: "are frozen|training mode",
    runs_of_transformers: "asked for hidden states or attentions",
}


@pytest.fixture
def model_class():
    return MODEL_CLASS


def results(function, model, unused, tokens, frozen, **kv_cache):
    """Return a function's results and their lines, with the same random numbers each time.

    A function gets what its parameters name. Those that generate pass on `kv_cache`, which may say
    `use_past_kv_cache`; `copy` and `new()` are copies of a model that has not run.
    """
    torch.manual_seed(0)
    random.seed(0)
    model.reset_hooks(including_permanent=True)
    tokens = tokens.to(model.cfg.device)
    # In hooks of a vector at home, as users write them.
    direction = torch.linspace(-1, 1, model.cfg.d_model, device=model.cfg.device)
    given = {
        "model": lambda: model,
        "copy": lambda: deepcopy(unused),
        "new": lambda: lambda: deepcopy(unused),
        "tokens": lambda: tokens,
        "frozen": lambda: frozen,
        "kv_cache": lambda: kv_cache,
        "cache": lambda: model.run_with_cache(tokens)[1],
        "lens": lambda: jacobian_lens(model.cfg.d_model),
        "direction": lambda: direction,
        "steer": lambda: lambda activation, hook: activation + direction,
        "readout": lambda: lambda tokens: model(tokens)[:, -1, [5, 7]],
    }
    running = function(**{name: given[name]() for name in inspect.signature(function).parameters})
    return [(running.gi_frame.f_lineno, plain(result)) for result in running]


def plain(value):
    """Return a result as tensors in lists and dicts."""
    if hasattr(value, "items"):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, torch.Tensor)):
        return [plain(each) for each in value]
    return plain(vars(value)) if type(value).__module__.startswith("transformer_lens") else value


@pytest.mark.filterwarnings("ignore:.*does not support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is dispatched across:UserWarning")
@pytest.mark.parametrize(("function", "kind", "n_devices"), [*cases()])
def test_each_call_gives_what_one_device_gives(
    function, kind, n_devices, load, on_one, loaded_in_module, tokens, pytestconfig
):
    name, how = kind.split()[0], {} if "booted" in kind else {"folded": True}
    # Models, and those to copy: a Bridge that has run holds graphs, which have no copies.
    if (kind, n_devices) not in loaded_in_module:
        pair = load(name, n_devices, **how), on_one(name, **how)
        loaded_in_module[kind, n_devices] = [(each, deepcopy(each)) for each in pair]
    (model, unused), alone = loaded_in_module[kind, n_devices]
    # Weights of other hosts, whose gradients are not compared.
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    if pytestconfig.getoption("--hosts") and function in REFUSED_OVER_HOSTS:
        with pytest.raises(RuntimeError, match=REFUSED_OVER_HOSTS[function]):
            results(function, model, unused, tokens, frozen)
        return
    # Unpatched, a Bridge's KV cache stays empty: transformers 5.24 gives it by another name.
    uncached = {"use_past_kv_cache": False} if MODEL_CLASS == BRIDGE else {}
    with tl_devicefix.disabled():
        expected = results(function, *alone, tokens, frozen, **uncached)
    actual = results(function, model, unused, tokens, frozen)
    assert len(actual) == len(expected)
    for (line, ours), (_, theirs) in zip(actual, expected):
        print(f"line {line}")
        assert_agrees(ours, theirs, tolerance=1e-4)
        # At home, or on the CPU if the call moves it there; never on a block's device.
        devices = {leaf.device for leaf in tree_leaves(ours) if isinstance(leaf, torch.Tensor)}
        assert devices <= {torch.device(model.cfg.device), torch.device("cpu")}
