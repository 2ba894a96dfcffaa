"""One model across the devices of several hosts, from one script: cache, hook, gradient, text.

    python examples/several_hosts.py
    sbatch examples/several_hosts.sbatch

The script runs on one node of a Ray cluster, and half of the blocks are on another. Without a
cluster, it uses devices of this host, or simulated ones. By default it loads the small model that
ships with the package. Each host needs `--model` at the same path, or in its cache of the hub.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.demo import CHECKPOINT, devices_for

TEXT = "Emma likes red . Bob likes blue . Emma likes"


def main() -> None:
    """Load, and look into the last block, which another host has."""
    options = arguments()
    tl_devicefix.init_hosts()  # adds other nodes' devices; without a cluster, it does nothing
    with devices_for(options.n_devices) as which:
        print(which)
        model = load(options)
        print(model.placement)
        look(model, options.text)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(CHECKPOINT), help="name, or checkpoint directory")
    parser.add_argument("--n-devices", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--text", default=TEXT)
    return parser.parse_args()


def load(options: argparse.Namespace) -> Any:
    """Load by the class that the installed TransformerLens has for it."""
    dtype = getattr(torch, options.dtype)
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # TransformerLens 4
        from transformer_lens.model_bridge import TransformerBridge

        boot = TransformerBridge.boot_transformers
        bridge = boot(options.model, n_devices=options.n_devices, dtype=dtype)
        bridge.enable_compatibility_mode()
        return bridge
    load = HookedTransformer.from_pretrained
    return load(options.model, n_devices=options.n_devices, dtype=dtype)


def look(model: Any, text: str) -> None:
    """A cache, a hook, a gradient and text."""
    tokens = model.to_tokens(text)
    last = model.cfg.n_layers - 1
    name = f"blocks.{last}.hook_resid_pre"

    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
        # The activation stays on its host until you read it.
        print(f"cache: {name} {list(cache[name].shape)}, at home on {cache[name].device}")

        without = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda resid, hook: resid * 0)])
    right = logits[0, -1].argmax()
    print(f"answer: {model.to_string(right.view(1))!r}")
    fell = logits[0, -1, right] - without[0, -1, right]
    print(f"hook: without what comes to block {last}, its logit is {fell.item():.2f} lower")

    # The gradient comes back through the block of the other host.
    steering = torch.zeros(model.cfg.d_model, device=model.cfg.device, requires_grad=True)
    steered = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda resid, hook: resid + steering)])
    steered[0, -1, right].backward()
    assert steering.grad is not None
    print(f"gradient: of a steering vector there, its norm is {steering.grad.norm().item():.3f}")

    options = {"max_new_tokens": 4, "do_sample": False, "verbose": False}
    print(f"text: {model.to_string(model.generate(tokens, **options)[0])!r}")


if __name__ == "__main__":
    main()
