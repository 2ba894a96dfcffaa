import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tl_devicefix
from tl_devicefix import *


def scale(x, hook): return x*1.5
def runs_map(model,tokens):
    def run(view, item):
        return view.run_with_hooks(item, fwd_hooks=[("blocks.2.attn.hook_z", scale)], return_type="logits").detach()
    items=[tokens.roll(i,1) for i in range(6)]
    return list(tl_devicefix.pipeline_map(model, run, items))
def runs_map_cache(model,tokens):
    def run(view, item):
        with torch.no_grad(): return dict(view.run_with_cache(item)[1])
    items=[tokens.roll(i,1) for i in range(6)]
    return list(tl_devicefix.pipeline_map(model, run, items))
def map_backward(model,tokens):
    out=[]
    def run(view,item):
        kept={}
        def keep(x,hook): x.retain_grad(); kept[0]=x
        view.run_with_hooks(item, return_type="loss", fwd_hooks=[("blocks.2.hook_resid_mid",keep)]).backward()
        return kept[0].grad
    return list(tl_devicefix.pipeline_map(model, run, [tokens.roll(i,1) for i in range(4)]))
def saved(model,tokens):
    import tempfile
    d=tempfile.mkdtemp()
    a=save_activations(model,[tokens.roll(i,1) for i in range(3)],["blocks.1.hook_resid_post","blocks.3.attn.hook_z"],directory=d+"/x",progress=False)
    return [a[n] for n in a] if 0 else [t for t in (a["blocks.3.attn.hook_z"][:],)]
def attribution(model,tokens):
    _,clean=model.run_with_cache(tokens)
    corr=tokens.roll(1,1)
    met=lambda logits: logits[:,-1,3].sum()
    import transformer_lens.patching as p
    out=[p.get_act_patch_resid_pre(model,corr,clean,met), p.get_act_patch_attn_head_out_all_pos(model,corr,clean,met)]
    return out
def sdpa(model,tokens):
    with tl_devicefix.set_attn_implementation(model,"sdpa"), torch.no_grad():
        return model(tokens), model.generate(tokens,max_new_tokens=4,do_sample=False,stop_at_eos=False,verbose=False), dict(model.run_with_cache(tokens)[1])
def cfg(model,tokens):
    model.set_use_attn_result(True)
    try:
        with torch.no_grad(): return dict(model.run_with_cache(tokens)[1])
    finally: model.set_use_attn_result(False)
def split(model,tokens):
    model.set_use_split_qkv_input(True)
    try:
        with torch.no_grad(): return dict(model.run_with_cache(tokens)[1])
    finally: model.set_use_split_qkv_input(False)
def sae(model,tokens):
    torch.manual_seed(0); m=torch.nn.Linear(16,16); torch.nn.init.normal_(m.weight)
    N="hook_out" if "hook_out" in model.blocks[3]._modules else "hook_resid_post"
    old=getattr(model.blocks[3],N)
    setattr(model.blocks[3],N,m)
    try:
        return model(tokens).detach()
    finally: setattr(model.blocks[3],N,old)
def kv(model,tokens):
    if hasattr(model,"original_model"): return 1
    try: from transformer_lens import HookedTransformerKeyValueCache as C
    except ImportError: from transformer_lens import TransformerLensKeyValueCache as C
    c=C.init_cache(model.cfg, model.cfg.device, 2)
    with torch.no_grad():
        a=model(tokens[:,:4],past_kv_cache=c)
        c.freeze()
        b=model(tokens[:,4:5],past_kv_cache=c)
        b2=model(tokens[:,4:6],past_kv_cache=c)
        c.unfreeze()
        old=copy.copy(c.entries[3])
        d=model(tokens[:,4:5],past_kv_cache=c)
        c.entries[3]=old
        if 0: pass
        keys=c.entries[2].past_keys
        k=keys*1
        c.entries[3].past_keys[:, 0]=0.5
        c.entries[2]=copy.copy(c.entries[2])
        e=model.blocks[3](torch.ones(2,1,16),past_kv_cache_entry=old)
        return a,b,b2,d,k,e, old.past_keys*1
def deep(model,tokens):
    m=copy.deepcopy(model)
    return m(tokens).detach()
def submodules(model,tokens):
    x=torch.ones(2,3,16)
    b=model.blocks[3]
    with torch.no_grad(): return (b.mlp(x), b.ln1(x)) if hasattr(model,'original_model') else (b(x), b.mlp(x), b.attn(x,x,x), b.ln1(x), type(b(x)) is torch.Tensor)
def grads_cache(model,tokens):
    return dict(model.run_with_cache(tokens,incl_bwd=False)[1])
def none(model,tokens):
    seen=[]
    with torch.no_grad():
      with model.hooks(fwd_hooks=[("blocks.3.hook_in" if hasattr(model,"original_model") else "blocks.3.hook_resid_post", lambda x,hook: seen.append(x.clone()))]): model(tokens,return_type=None)
    return seen
def ig(model,tokens):
    logits=model(tokens); l=logits[:,-1].logsumexp(-1).sum()
    return torch.autograd.grad(l,[model.W_E])
def sweep_(model,tokens):
    pts=[[("blocks.%d.hook_resid_pre"%l, scale)] for l in range(5)]
    return [r for r in tl_devicefix.sweep(model,tokens,pts)]
def bwdcache(model,tokens):
    c,fw,bw=model.get_caching_hooks(lambda n: "hook_z" in n or "resid" in n, incl_bwd=True) if 0 else (None,None,None)
    cache=model.add_caching_hooks(lambda n: "hook_z" in n or "resid" in n, incl_bwd=True)
    try:
        model(tokens,return_type="loss").backward()
        return dict(cache)
    finally: model.reset_hooks()
def gather(model,tokens):
    with tl_devicefix.gather_on("cpu"): return model.W_Q, dict(model.run_with_cache(tokens)[1])
def check_(model,tokens):
    print(tl_devicefix.check(model))
    return 1
def folded(model,tokens):
    ab=model.accumulated_bias(3,mlp_input=True); return ab, model.W_K, model.OV.norm() if hasattr(model.OV,'norm') else 0
def compat(model,tokens):
    if not hasattr(model,"enable_compatibility_mode"): return 1
    if not model.__dict__.get("_c"):
        model.__dict__["_c"]=1; model.enable_compatibility_mode(disable_warnings=True)
    with torch.no_grad(): r=model.run_with_hooks(tokens,fwd_hooks=[("blocks.3.hook_mlp_out",scale)]), dict(model.run_with_cache(tokens)[1]), model.generate(tokens,max_new_tokens=3,do_sample=False,stop_at_eos=False,verbose=False), model.W_V
    return r
ALL=[runs_map,runs_map_cache,map_backward,saved,attribution,sdpa,cfg,split,sae,kv,deep,submodules,grads_cache,none,ig,sweep_,bwdcache,gather,check_,folded,compat]
@pytest.mark.parametrize("name",["llama","gpt2"])
@pytest.mark.parametrize("run",ALL)
def test_it(run,name,alone,spread,tokens):
    e,g=(tree_leaves(run(l(name),tokens)) for l in (alone,spread))
    assert len(e)==len(g)>0
    for a,b in zip(e,g):
        if isinstance(a,torch.Tensor):
            assert a.shape==b.shape
            assert torch.allclose(a,b,atol=1e-6,rtol=1e-5),(a-b).abs().max()
            if not torch.equal(a,b): print("not bit equal",run.__name__,(a-b).abs().max().item())
        else: assert a==b
