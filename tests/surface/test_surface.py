"""Everything public in the installed TransformerLens gives on n devices what it gives on one CPU.

A row of a table is a name, two spaces, and an expression of this file's functions and `Names`:

    ActivationCache:
    keys,values       cache.NAME()
    decompose_resid   cache.decompose_resid(apply_ln=True)
                      cache.decompose_resid(4, mode="attn", return_labels=True)
    decompose_resid as_numbers  ...  # a word after the name tells calls of one name apart
    block_every again           ...  # after "again", it runs with `--full` only
    ssm_layers        # a reason in place of an expression leaves the name out

To compare a new public name, add a row.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pkgutil
import random
from collections.abc import Iterable
from copy import deepcopy
from tempfile import NamedTemporaryFile
from unittest import mock

# ruff: noqa: F401 -- rows use some of these, too
import pytest
import torch
import transformer_lens.evals as evals
import transformer_lens.head_detector as head_detector
import transformer_lens.patching as patching
from comparison import assert_agrees
from model_classes import BRIDGE, CLASSES, HOOKED
from packaging.version import Version
from torch.utils._pytree import tree_leaves
from transformer_lens import SVDInterpreter

import tl_devicefix
from tl_devicefix.monkeypatch.versions import installed

LAST = 4
"""A block that is never at home on several devices."""
RESID = f"blocks.{LAST}.hook_resid_post"
TEXT, OTHER_TEXT = "w5 w7 w9 w5 w7 w11", "w6 w7 w8 w6 w7 w12"
FEW = {"max_new_tokens": 3, "do_sample": False}
GREEDY = {**FEW, "stop_at_eos": False, "verbose": False}
ROWS = {}
"""Call -> its expressions; none for a name that is left out."""


def table(text):
    """Add the rows of a table."""
    for line in filter(None, text.splitlines()):
        given, _, expression = map(str.strip, line.partition("  "))
        if line.endswith(":"):
            owners = [each if each[-1] == "_" else f"{each}." for each in line[:-1].split(", ")]
            continue
        if given:
            names, _, case = given.partition(" ")
            named = [(owner, name) for owner in owners for name in names.split(",")]
        for owner, name in named:
            row = ROWS.setdefault(f"{owner}{name} {case}".strip(), [])
            if expression and not expression.startswith("#"):
                row.append(expression.replace("NAME", name))


def of_installed(path):
    """Return a class or module of the installed TransformerLens; None if it has none."""
    with contextlib.suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(f"transformer_lens{path}")


def twice(model, tokens, *changes):
    """Return the logits of two forwards. `changes` were made as the arguments were evaluated."""
    return [model(tokens), model(tokens)]


def on_cpu(tensors, *steps):
    """Return tensors by name, on the CPU, after `steps`, which were arguments evaluated before."""
    return {name: tensor.detach().cpu() for name, tensor in dict(tensors).items()}


def gradients(model, frozen, loss):
    """Return the gradients of a scalar by all parameters that are not frozen, on the CPU."""
    loss(model).backward()
    weights = {name: each for name, each in model.named_parameters() if name not in frozen}
    weights = {name: each for name, each in weights.items() if each.grad is not None}
    assert all(each.grad.device == each.device for each in weights.values())
    return {name: each.grad.cpu() for name, each in weights.items()}


def hooked(model, tokens, hooks):
    return model.run_with_hooks(tokens, fwd_hooks=hooks)


def in_hooks(model, steer, call):
    with model.hooks(fwd_hooks=[(RESID, steer)]):
        return call()


def double(activation, hook):
    return activation * 2


def with_more_hooks(model, tokens, setting, point):
    """Return results under a setting that adds hook points, with a hook on one of them."""
    getattr(model, setting)(True)
    hook = f"blocks.{LAST}.{point}", double
    return [model.run_with_hooks(tokens, fwd_hooks=[hook]), model.run_with_cache(tokens)]


table("""
HookedTransformer, TransformerBridge:
W_E,W_pos,W_E_pos,W_U,b_U,QK,OV,W_Q,W_K,W_V,W_O,W_in,W_gate,W_out  model.NAME
b_Q,b_K,b_V,b_O,b_in,b_out,n_params_total  model.NAME
W_E,W_K,W_in,b_V gradient  gradients(copy, frozen, lambda model: model.NAME.pow(2).sum())
OV gradient             gradients(copy, frozen, lambda model: model.OV.AB.pow(2).sum())
accumulated_bias        list(map(model.accumulated_bias, range(6)))
                        model.accumulated_bias(3, mlp_input=True)
                        model.accumulated_bias(5, include_mlp_biases=False)
all_head_labels         getattr(model.all_head_labels, "__call__", lambda: model.all_head_labels)()
all_composition_scores  list(map(model.all_composition_scores, "QKV"))
tokens_to_residual_directions  list(map(model.tokens_to_residual_directions, ("w5", 5, tokens)))
clear_contexts          model.clear_contexts()
to_tokens               model.to_tokens([TEXT, OTHER_TEXT])
to_single_token         model.to_single_token("w5")
to_single_str_token     model.to_single_str_token(5)
to_string               model.to_string(tokens)
to_str_tokens           model.to_str_tokens(tokens[0])
get_token_position      model.get_token_position("w7", TEXT)
to device               copy.to(model.cfg.device)(tokens)
to dtype                copy.to(torch.float64)(tokens)
cpu                     copy.cpu()(tokens.cpu())
cuda,mps                # types that no simulated device has
init_weights            # draws anew, so there is nothing to compare with
forward                 model(tokens), model(TEXT), model(tokens, return_type="both")
                        model(tokens, stop_at_layer=3)
                        model(model(tokens, stop_at_layer=3), start_at_layer=3)
                        model(tokens, return_type="loss", loss_per_token=True)
loss_fn                 model.loss_fn(model(tokens), tokens)
generate                model.generate(tokens, **GREEDY, **kv_cache)
                        model.generate(tokens, use_past_kv_cache=False, **GREEDY)
                        model.generate(TEXT, verbose=False, **FEW, **kv_cache)
generate under_a_hook
    in_hooks(model, steer, lambda: model.generate(tokens, **GREEDY, **kv_cache))
    in_hooks(model, steer, lambda: model.generate(tokens, use_past_kv_cache=False, **GREEDY))
generate_stream
    list(model.generate_stream(tokens, max_tokens_per_yield=1, **GREEDY, **kv_cache))
input_to_embed          model.input_to_embed(tokens)
run_with_cache          model.run_with_cache(tokens)
                        model.run_with_cache(tokens, names_filter=lambda name: "resid" in name)
                        model.run_with_cache(tokens, return_cache_object=False)
                        model.run_with_cache(tokens, device="cpu")
                        model.run_with_cache(tokens, stop_at_layer=3)
                        model.run_with_cache(tokens, pos_slice=-1)
    model.run_with_cache(tokens[:1], remove_batch_dim=True)[1].stack_head_results(apply_ln=True)
run_with_cache incl_bwd  copy.run_with_cache(tokens, return_type="loss", incl_bwd=True)
run_with_hooks          model.run_with_hooks(tokens, fwd_hooks=[(RESID, steer)])
run_with_hooks backward_hook
    gradients(copy, frozen, lambda it: [it.add_hook(RESID, scale, "bwd"), it(tokens).mean()][1])
hooks                   in_hooks(model, steer, lambda: model(tokens)), model(tokens)
add_hook,add_perma_hook  twice(copy, tokens, copy.NAME(RESID, steer))
reset_hooks,remove_all_hook_fns  twice(copy, tokens, copy.add_hook(RESID, steer), copy.NAME())
check_hooks_to_add      model.check_hooks_to_add(point(model), RESID, steer)
hook_points             [point.name for point in model.hook_points()]
list_hooks              list(model.list_hooks())
get_caching_hooks       hooked(model, tokens, (made := model.get_caching_hooks())[1]), made[0]
add_caching_hooks       on_cpu(copy.add_caching_hooks(), copy(tokens))
cache_all               on_cpu(into := {}, copy.cache_all(into), copy(tokens))
cache_some
    on_cpu(into := {}, copy.cache_some(into, lambda name: "resid" in name), copy(tokens))
set_use_attn_result     with_more_hooks(copy, tokens, "set_use_attn_result", "attn.hook_result")
set_use_split_qkv_input  with_more_hooks(copy, tokens, "set_use_split_qkv_input", "hook_q_input")
set_use_hook_mlp_in     with_more_hooks(copy, tokens, "set_use_hook_mlp_in", "hook_mlp_in")
set_use_attn_in         with_more_hooks(copy, tokens, "set_use_attn_in", "hook_attn_in")

HookedTransformer:
get_residual            model.get_residual(model.embed(tokens), 0)
check_and_add_hook      twice(copy, tokens, copy.check_and_add_hook(point(copy), RESID, steer))
get_pos_offset          model.get_pos_offset(None, 2)
move_model_modules_to_device,setup  copy.NAME(), copy(tokens)
set_tokenizer           copy.set_tokenizer(model.tokenizer), copy(tokens)
set_ungroup_grouped_query_attention
    with_more_hooks(copy, tokens, "set_ungroup_grouped_query_attention", "attn.hook_v")
from_pretrained,from_pretrained_no_processing,load_and_process_state_dict  # see tests/parity
process_weights_,fill_missing_keys,fold_layer_norm,fold_value_biases  # see tests/parity
center_unembed,center_writing_weights,refactor_factored_attn_matrices  # see tests/parity
load_sample_training_dataset,sample_datapoint  # fetch data

TransformerBridge:
QK_for_attn_layers,OV_for_attn_layers,layer_types,get_params  model.NAME()
composition_layer_indices,tl_parameters,tl_named_parameters   model.NAME()
attn_head_labels,hook_aliases  model.NAME
stack_params_for        model.stack_params_for("attn", "attn.W_Q")
block_hooks,block_submodules  model.NAME(LAST)
blocks_with             [index for index, _ in model.blocks_with("attn")]
QK_for_attn_layers gradient
    gradients(copy, frozen, lambda model: model.QK_for_attn_layers()[1].AB.pow(2).sum())
original_model          model.original_model(tokens).logits
hook_dict,mod_dict      list(model.NAME)
tokenizer               model.tokenizer.vocab_size
get_hook_point          model.get_hook_point(RESID).name
clear_hook_registry     copy.clear_hook_registry(), copy(tokens)
close                   copy.close()
parameters              [each.cpu() for each in model.parameters()]
named_parameters,state_dict  on_cpu(model.NAME())
load_state_dict         len(copy.load_state_dict(copy.state_dict())), copy(tokens)
to twice                copy.to(model.cfg.device).to(torch.float64)(tokens)
hf_generate
    model.hf_generate(tokens, **FEW, stop_at_eos=False, use_cache=not kv_cache, **kv_cache)
    model.hf_generate(TEXT, **FEW, use_cache=not kv_cache, **kv_cache)
generate several_texts  model.generate([TEXT, "w5 w6"], **FEW, verbose=False, **kv_cache)
forward as_a_bridge     model(model(tokens, stop_at_layer=3), start_at_layer=3, stop_at_layer=4)
                        model([TEXT, "w5 w6"])
                        model(TEXT, return_type="predictions")
train                   copy.train()(tokens)
input_to_embed and_on   model(model.input_to_embed(tokens)[0], start_at_layer=0)
run_with_hooks of_a_bridge
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.hook_in", steer)])
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.attn.hook_pattern", lambda a, hook: a / 2)])
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_post", steer)], stop_at_layer=4)
boot_transformers,process_weights,enable_compatibility_mode  # see tests/transformer_bridge
boot_native,boot_tl_legacy  # place nothing, because they boot on one device
check_model_support,list_supported_models  # have no model
diffusion_generate,encoder_output,prepare_multimodal_inputs  # of models of other kinds
predict_next_sentence,to_sentence_pair_tokens  # of models of other kinds
""")


def only(model, tokens, *names):
    return model.run_with_cache(tokens, names_filter=lambda name: name.endswith(names))[1]


def point(model):
    return model.hook_dict[RESID]


NEURONS = {"layer": -1, "pos_slice": -1, "neuron_slice": (0, 3)}
NEURONS |= {"apply_ln": True, "incl_remainder": True}
table("""
ActivationCache:
keys,values,items       cache.NAME()
__iter__                iter(cache)
__len__                 len(cache)
__getitem__             cache["resid_post", -1], cache["z", 3]
accumulated_resid       cache.accumulated_resid(incl_mid=True, apply_ln=True)
                        cache.accumulated_resid(3, mlp_input=True, pos_slice=-1)
accumulated_resid with_no_other_names_cached
    only(model, tokens, "resid_pre", "resid_post", "hook_scale").accumulated_resid(apply_ln=True)
decompose_resid         cache.decompose_resid(apply_ln=True)
                        cache.decompose_resid(4, mode="attn", return_labels=True)
stack_head_results      cache.stack_head_results(apply_ln=True, incl_remainder=True)
stack_head_results of_a_layer
    cache.stack_head_results(3, pos_slice=-1, return_labels=True)
get_neuron_results      cache.get_neuron_results(LAST, neuron_slice=(0, 3), pos_slice=-1)
stack_neuron_results    cache.stack_neuron_results(**NEURONS)
get_full_resid_decomposition
    cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1, return_labels=True)
get_full_resid_decomposition of_a_layer
    cache.get_full_resid_decomposition(3, expand_neurons=False)
stack_activation        cache.stack_activation("pattern")
compute_head_results    cache.compute_head_results(), cache["result", LAST]
apply_ln_to_stack       cache.apply_ln_to_stack(cache.decompose_resid())
    cache.apply_ln_to_stack(cache.decompose_resid(3, pos_slice=-1), layer=3, pos_slice=-1)
logit_attrs
    cache.logit_attrs(cache.accumulated_resid(pos_slice=-1), "w5", "w7", pos_slice=-1)
    cache.logit_attrs(cache.decompose_resid(pos_slice=-1), tokens[:, -1], pos_slice=-1)
apply_slice_to_batch_dim  cache.apply_slice_to_batch_dim(1).accumulated_resid()
to                      cache.to("cpu"), cache["resid_post", -1], cache["z", 3]
                        cache.accumulated_resid(incl_mid=True, apply_ln=True)
                        cache.stack_head_results(apply_ln=True)
                        cache.stack_neuron_results(**NEURONS)
remove_batch_dim        only(model, tokens[:1], "z", "post").remove_batch_dim().stack_head_results()
toggle_autodiff         cache.toggle_autodiff(False), model.W_Q.requires_grad
                        cache.toggle_autodiff(True)
ssm_layers,compute_ssm_state,compute_ssm_effective_attention  # of state space models

FactoredMatrix:
AB,BA,S,T,ndim,pair     model.OV.NAME
U,V,Vh                  model.OV.NAME.abs()
collapse_l,collapse_r   model.OV.NAME().abs()
norm                    model.OV.norm()
unsqueeze               model.OV.unsqueeze(0)
svd                     model.OV.svd()[1], model.QK.svd()[1], model.QK.AB
eigenvalues             model.OV.eigenvalues.abs().sort().values
__getitem__             model.OV[2, 1], model.QK[2, 1]
get_corner              model.OV[0, 0].get_corner()
make_even               model.OV.make_even().A.abs()
__matmul__              (model.OV[LAST] @ model.W_U).AB
__rmatmul__             (model.W_E @ model.QK[LAST] @ model.W_E.T).AB
__mul__                 (model.OV * direction.sum()).AB
__rmul__                (direction.sum() * model.OV).AB

HookPoint:
has_hooks,layer         point(model).NAME()
forward                 model.hook_dict["hook_embed"](direction)
add_hook,add_perma_hook  twice(copy, tokens, point(copy).NAME(steer))
add_hook prepend
    twice(copy, tokens, point(copy).add_hook(steer), point(copy).add_hook(double, prepend=True))
remove_hooks,clear_context
    twice(copy, tokens, point(copy).add_hook(steer), point(copy).NAME())
enable_reshape          # changes what one hook sees

SVDInterpreter:
get_singular_vectors    SVDInterpreter(model).get_singular_vectors("OV", LAST, 2, 1).abs()
                        SVDInterpreter(model).get_singular_vectors("w_in", LAST, 2).abs()
                        SVDInterpreter(model).get_singular_vectors("w_out", LAST, 2).abs()
""")


def induction_loss(model):
    # Tokens of the tiny vocabulary, because it draws from a larger one.
    small = torch.arange(12).view(2, 6) + 5
    with mock.patch.object(torch, "randint", return_value=small):
        return evals.induction_loss(model, batch_size=2, subseq_len=6, device=model.cfg.device)


def ioi_eval(model):
    templates, names = ["w8 [A] w9 [B] w10 [A] w11 [B]"], ["w5", "w6", "w7"]
    nouns = {"[OBJECT]": ["w12"]}
    dataset = evals.IOIDataset(model.tokenizer, templates, names, nouns, num_samples=4)
    return evals.ioi_eval(model, dataset=dataset, batch_size=2)


def trained(model, tokens):
    """Return the logits after two epochs."""
    training = of_installed(".tools.training") or of_installed(".train")
    config = getattr(training, "TrainConfig", None) or training.HookedTransformerTrainConfig
    options = {"num_epochs": 2, "batch_size": 2, "optimizer_name": "SGD", "lr": 1e-2}
    data = [{"tokens": row} for row in tokens]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        config = config(**options, device=model.cfg.device)
        return training.train(model, config, data)(tokens)


def metric(logits):
    return logits[0, -1, 5] - logits[0, -1, 7]


def patch(model, tokens, function, **options):
    """Return the result of a function of `patching`; its clean run is of other tokens."""
    _, clean = model.run_with_cache(tokens - 1)
    with torch.no_grad():
        return function(model, tokens, clean, metric, **options)


GENERIC = {"activation_name": "resid_post", "index_axis_names": ["layer", "pos"]}
GENERIC |= {"patch_setter": patching.layer_pos_patch_setter}
# "again": these do the same with another activation, or call others, so `--full` runs them.
# With one token where each head and pair of positions costs a forward.
table("""
head_detector:
detect_head             head_detector.detect_head(model, TEXT, "induction_head")
    head_detector.detect_head(model, TEXT, "previous_token_head", error_measure="abs")
    head_detector.detect_head(model, TEXT, "duplicate_token_head", exclude_bos=True)
    head_detector.detect_head(model, TEXT, torch.ones(7, 7, device=model.cfg.device).tril())

evals:
induction_loss          induction_loss(model)
ioi_eval                ioi_eval(model)
evaluate_on_dataset
    evals.evaluate_on_dataset(model, [{"tokens": tokens}], device=model.cfg.device)
evaluate,mmlu_eval,sanity_check  # fetch data

train, training:
train                   trained(copy, tokens)

patching:
generic_activation_patch
    patch(model, tokens[:, :3], patching.generic_activation_patch, **GENERIC)

patching.get_act_patch_:
resid_pre,attn_out  patch(model, tokens[:1, :2], patching.get_act_patch_NAME)
resid_mid,mlp_out again  patch(model, tokens[:1, :2], patching.get_act_patch_NAME)
attn_head_out_by_pos,attn_head_k_by_pos,attn_head_q_all_pos,attn_head_pattern_by_pos
    patch(model, tokens[:1, :1], patching.get_act_patch_NAME)
attn_head_pattern_dest_src_pos,attn_head_pattern_all_pos
    patch(model, tokens[:1, :1], patching.get_act_patch_NAME)
attn_head_q_by_pos,attn_head_v_by_pos,attn_head_out_all_pos,attn_head_k_all_pos again
    patch(model, tokens[:1, :1], patching.get_act_patch_NAME)
attn_head_v_all_pos,attn_head_all_pos_every,block_every,attn_head_by_pos_every again
    patch(model, tokens[:1, :1], patching.get_act_patch_NAME)
""")

# transformer_lens.tools, for a TransformerBridge

analysis = of_installed(".tools.analysis")
AT_LAST = {"positions": torch.tensor([8, 8])}
"""The last token of each sequence."""


def learned(model, tokens, readout):
    """Learn a subspace of a block's residual stream in one step, and return the losses.

    The subspace itself is not compared, because it hangs on the rounding of gradients near zero.
    """
    given = model, RESID, tokens, tokens.flip(1), torch.tensor([0, 1]), readout
    last = AT_LAST["positions"]
    with contextlib.redirect_stderr(io.StringIO()):
        options = {"base_positions": last, "source_positions": last, "rank": 2, "epochs": 2}
        return analysis.fit_das(*given, **options).losses


def interchange(model, tokens, readout):
    """Return the arguments of an intervention on a block's residual stream."""
    subspace = analysis.SubspaceInterchange(analysis.random_basis(model.cfg.d_model, 3, 0))
    source = analysis.collect_activations(model, RESID, tokens.flip(1), readout, **AT_LAST)
    return model, RESID, subspace, tokens, source, readout


def patch_direct_path(model, tokens):
    clean, corrupted = (model.run_with_cache(each)[1] for each in (tokens.flip(1), tokens))
    caches = {"clean_cache": clean, "corrupted_cache": corrupted}
    options = {"patching_metric": metric, "src_layer": 2, "src_head": 1, "verbose": False}
    return analysis.get_act_patch_direct_path(
        model=model, corrupted_tokens=tokens, **caches, **options
    )


def attribution(model, tokens, granularity):
    config = analysis.EdgeAttributionConfig(granularity)
    return analysis.attribution_patch(deepcopy(model), tokens, tokens.flip(1), metric, config)


def faithful(model, tokens):
    circuit = sorted(attribution(model, tokens, "edge").edge_scores, key=str)[20:]
    return analysis.faithfulness(deepcopy(model), tokens, tokens.flip(1), metric, circuit)


def jacobian_lens(d_model):
    """Return a Jacobian lens of random maps, because only its readings are compared."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(d_model, d_model, generator=generator) for _ in range(LAST)]
    maps = {layer: torch.eye(d_model) + 0.1 * each for layer, each in enumerate(noise)}
    return analysis.JacobianLens(maps, n_prompts=1, d_model=d_model)


def saved_and_loaded(lens):
    with NamedTemporaryFile(suffix=".pt") as file:
        lens.save(file.name)
        return type(lens).load(file.name).jacobians


table("""
analysis:
logit_lens              analysis.logit_lens(model, tokens, incl_mid=True)
                        analysis.logit_lens(model, TEXT, top_k=3)
                        analysis.logit_lens(model, cache=cache)
                        analysis.logit_lens(model, cache=cache.to("cpu"))
logit_readout           analysis.logit_readout(model, cache["resid_post", LAST])
direct_logit_attribution  analysis.direct_logit_attribution(model, tokens, "w5", "w7")
    analysis.direct_logit_attribution(model, tokens, "w5", unit="head")
    analysis.direct_logit_attribution(model, answer_tokens="w5", unit="layer", cache=cache)
attribution_patch       attribution(unused, tokens[:1, :2], "node")
                        attribution(unused, tokens[:1, :2], "edge")
attention_head_subspace_affinity
    analysis.attention_head_subspace_affinity(model, target_role="Q")
    analysis.attention_head_subspace_affinity(model, target_role="V")
get_act_patch_direct_path  patch_direct_path(model, tokens[:1, :2])
collect_activations     analysis.NAME(model, RESID, tokens, readout, **AT_LAST)
run_with_intervention,intervened_logits
    analysis.NAME(*interchange(model, tokens, readout), **AT_LAST)
faithfulness            faithful(unused, tokens[:1, :2])
fit_das                 learned(model, tokens, readout)
reinitialized           # draws anew, so there is nothing to compare with

analysis, patching:
get_act_patch_direct_path_all_sources  # calls analysis.get_act_patch_direct_path for each head

patching:
get_act_patch_direct_path  # is that of analysis

ActivationCache:
logit_lens              cache.logit_lens()

JacobianLens:
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
swap_clamp_hooks  hooked(model, tokens, lens.swap_clamp_hooks(model, "w5", "w7", [2, 3], cache))
steering_hooks          hooked(model, tokens, lens.steering_hooks(model, "w5", [2, 3]))
ablation_hooks          hooked(model, tokens, lens.ablation_hooks(model, ["w5", "w7"], [2, 3]))
swap_hooks              hooked(model, tokens, lens.swap_hooks(model, "w5", "w7", [2, 3]))
coordinate_patch_hooks
    hooked(model, TEXT, lens.coordinate_patch_hooks(model, "w5", "w7", [3], positions=[6], k=3))
fit                     type(lens).fit(model, [TEXT], corpus="words", skip_first_positions=1)
save                    saved_and_loaded(lens)
validate_model          lens.validate_model(model).n_prompts
source_layers           lens.source_layers
clear_device_cache      lens.clear_device_cache()
merge                   type(lens).merge([lens, lens]).jacobians
load,from_pretrained    # see save; fetches a lens
""")


class Names(dict):
    """The names in a row's expressions, some of which are made when they are first used."""

    def __missing__(self, name):
        model = self["model"]
        make = {
            "copy": lambda: deepcopy(self["unused"]),
            "cache": lambda: model.run_with_cache(self["tokens"])[1],
            "lens": lambda: jacobian_lens(model.cfg.d_model),
        }
        self[name] = make[name]()  # or a KeyError, after which Python looks among its builtins
        return self[name]


def results(call, model, unused, tokens, frozen, **kv_cache):
    """Return the results of a row's expressions, with the same random numbers each time.

    Rows that generate pass on `kv_cache`, which may say `use_past_kv_cache`.
    """
    torch.manual_seed(0)
    random.seed(0)
    tokens = tokens.to(model.cfg.device)
    names = Names(globals(), model=model, unused=unused, tokens=tokens, frozen=frozen)
    names |= {"kv_cache": kv_cache}
    # Hooks of a vector at home, as users write them.
    direction = torch.linspace(-1, 1, model.cfg.d_model, device=model.cfg.device)
    names |= {"direction": direction, "steer": lambda activation, hook: activation + direction}
    names |= {"scale": lambda gradient, hook: (gradient * direction,)}
    names |= {"readout": lambda tokens: model(tokens)[:, -1, [5, 7]]}
    return [plain(eval(expression, names)) for expression in ROWS[call]]


def plain(value):
    """Return a result as tensors in lists and dicts."""
    if hasattr(value, "items"):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, torch.Tensor)):
        return [plain(each) for each in value]
    return plain(vars(value)) if type(value).__module__.startswith("transformer_lens") else value


OWNERS = [":HookedTransformer", ".model_bridge:TransformerBridge", ":ActivationCache"]
OWNERS += [":FactoredMatrix", ":SVDInterpreter", ".hook_points:HookPoint", ".patching", ".evals"]
OWNERS += [".tools.analysis:JacobianLens", ".head_detector", ".train", ".tools.analysis"]
OWNERS += [".tools.training"]
METHODS = ["__getitem__", "__iter__", "__len__", "__matmul__", "__rmatmul__", "__mul__", "__rmul__"]
"""Methods with a protocol's name that users call by its syntax."""


def is_public(owner, name):
    """Return True for a class's own names, and for a module's functions of a model."""
    if isinstance(owner, type):
        base = next(base for base in owner.__mro__ if name in vars(base))
        is_own = base.__module__.startswith("transformer_lens")
        return is_own and (name in METHODS or not name.startswith("_"))
    value = getattr(owner, name)
    is_function = callable(value) and not isinstance(value, type) and not name.startswith("_")
    return is_function and "model" in inspect.signature(value).parameters


PUBLIC = {
    f"{owner.__name__.split('.')[-1]}.{name}"
    for owner in filter(None, map(of_installed, OWNERS))
    for name in dir(owner)
    if is_public(owner, name)
}
CLASS_OF = dict.fromkeys(["HookedTransformer", "train"], HOOKED)
CLASS_OF |= dict.fromkeys(["TransformerBridge", "analysis", "JacobianLens", "training"], BRIDGE)
"""Owners that have to do with one class of models."""


def test_every_public_name_is_called_or_left_out():
    known = {call.split()[0] for call in ROWS}
    assert PUBLIC - known == set()
    if installed() == Version("4.3.0"):
        assert {name.split(".")[0] for name in known - PUBLIC} == {"HookedTransformer", "train"}


AS_BOOTED = "llama as booted"
PLACES = {
    HOOKED: [("gpt2", 3), ("llama", 1), ("llama", 4), ("phi-3", 3)],
    BRIDGE: [("gpt2", 3), ("llama", 4), ("llama", 1), (AS_BOOTED, 3)],
}
"""Kinds of models, folded unless they say otherwise, and over how many devices."""
KIND_OF = dict.fromkeys(["W_pos", "W_E_pos", "b_Q", "b_K", "b_V", "b_O", "b_in", "b_out"], "gpt2")
KIND_OF |= dict.fromkeys(["get_singular_vectors", "attribution_patch", "faithfulness"], "gpt2")
KIND_OF |= {"set_use_attn_in": "gpt2", "W_gate": "llama"}
"""Names that only one kind of models has."""


NOT_IN_3 = {"TransformerBridge.forward", "TransformerBridge.check_hooks_to_add"}
NOT_IN_3 |= {"analysis.attribution_patch", "JacobianLens.occupancy"}
"""What a Bridge of TransformerLens 3 has only in part, or runs on no simulated device."""


NOT_ON_ONE = "evals.ioi_eval", "ActivationCache.to"


def places_of(model_class, call):
    """Return the kinds of models that a call has, and over how many devices."""
    if HOOKED in CLASSES and call.split()[0] in NOT_IN_3:
        return []
    owner, name = call.split()[0].split(".")
    return [
        (kind, n_devices)
        for kind, n_devices in PLACES[model_class]
        if kind.startswith(KIND_OF.get(name, ""))
        if kind == AS_BOOTED or owner != "JacobianLens"  # which refuses folded weights
        if kind != AS_BOOTED or name != "direct_logit_attribution"  # which refuses others
        # A patch is a forward for each layer, head and position. ioi_eval gives tokens on the CPU,
        # and `to` leaves the weights on the one device.
        if n_devices > 1 or (owner != "patching" and f"{owner}.{name}" not in NOT_ON_ONE)
    ]


def pytest_generate_tests(metafunc):
    """Run each call at one of its places, in turn; with `--full`, at all of them."""
    if "call" not in metafunc.fixturenames:
        return
    rows = []
    for model_class in CLASSES:
        calls = [call for call, row in ROWS.items() if row and call.split()[0] in PUBLIC]
        calls = [each for each in calls if CLASS_OF.get(each.split(".")[0]) in (model_class, None)]
        for i, call in enumerate(calls):
            places = places_of(model_class, call)
            if metafunc.config.getoption("--hosts"):  # a model on one device uses none
                places = [place for place in places if place[1] > 1]
            for place in places:
                is_quick = place == places[i % len(places)] and not call.endswith(" again")
                marks = () if is_quick else pytest.mark.full
                rows.append(pytest.param(model_class, call, *place, marks=marks))
    metafunc.parametrize(("model_class", "call", "kind", "n_devices"), rows)


STAYS, RECORDS = "weights keep their device and dtype", "asked for hidden states or attentions"
REFUSED_OVER_HOSTS = {"to dtype": STAYS, "to twice": STAYS, "load_state_dict": "are frozen"}
REFUSED_OVER_HOSTS |= {"train": "are frozen|training mode"}
REFUSED_OVER_HOSTS |= {"original_model": RECORDS, "hf_generate": RECORDS}


@pytest.mark.filterwarnings("ignore:.*does not support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is dispatched across:UserWarning")
def test_each_call_gives_what_one_device_gives(
    model_class, call, kind, n_devices, shared, on_one, tokens, pytestconfig
):
    name, how = kind.split()[0], {} if kind == AS_BOOTED else {"folded": True}
    model, alone = shared(name, n_devices, **how), on_one(name, **how)
    # The same, to be copied, because a Bridge that has run holds graphs, which have no copies.
    unused = shared(name, n_devices=n_devices, **how)
    unused_alone = on_one(name, dtype=torch.float32, **how)
    # Weights of other hosts, whose gradients are not compared.
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    refusal = REFUSED_OVER_HOSTS.get(call.split(".")[1])
    if pytestconfig.getoption("--hosts") and refusal:
        with pytest.raises(RuntimeError, match=refusal):
            results(call, model, unused, tokens, frozen)
        return
    # Unpatched, a Bridge's KV cache stays empty: transformers 5.24 gives it by another name.
    uncached = {"use_past_kv_cache": False} if model_class == BRIDGE else {}
    with tl_devicefix.disabled():
        expected = results(call, alone, unused_alone, tokens, frozen, **uncached)
    actual = results(call, model, unused, tokens, frozen)
    assert_agrees(actual, expected, tolerance=1e-4)
    # Results are at home, or on the CPU if the call moves them there; none is on a block's device.
    devices = {leaf.device for leaf in tree_leaves(actual) if isinstance(leaf, torch.Tensor)}
    assert devices <= {torch.device(model.cfg.device), torch.device("cpu")}
