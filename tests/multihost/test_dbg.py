import torch
import functools
from test_remote_blocks import _keep
def act(model,tokens,names):
    kept={}
    keep = functools.partial(_keep, kept=kept)
    if not isinstance(names,list): 
        f=names; hooks=[(f,keep)]
    else: hooks=[(n,keep) for n in names]
    model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).backward()
    return {name: x.grad for name, x in kept.items()}
def test_a(alone,spread,tokens):
    A,B=alone("llama"),spread("llama")
    pts=[n for n in A.hook_dict if n.startswith("blocks.2.") ]
    print(pts)
    for n in pts[1:]:
        try: a,b=act(A,tokens,[pts[0],n]),act(B,tokens,[pts[0],n])
        except Exception as e: print(n,'refused',type(e).__name__,str(e)[:100]); continue
        for k in a:
            if a[k] is None or b[k] is None: print(n,k,a[k] is None,b[k] is None); continue
            d=(a[k]-b[k]).abs().max().item()
            if d>1e-6: print(n,k,d)
