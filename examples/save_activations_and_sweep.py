"""Many runs across four devices: save activations, with all devices busy, and sweep.

    python examples/save_activations_and_sweep.py

It runs on the small model that ships with the package, across four simulated devices. Each block
sleeps for a moment, as if the model were large. Where there are four GPUs, leave out `simulate` and
`take_time`, and load your own model: the rest is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.demo import CHECKPOINT

N_DEVICES = 4
LAYER = 5  # where the facts are looked up
FACTS = "{0} likes {2} . {1} likes {3} . {0} likes"
PEOPLE = [
    ("Emma", "Bob", "red", "blue"),
    ("Iris", "Jack", "green", "pink"),
    ("Leo", "Mary", "black", "white"),
    ("Zoe", "Dan", "cyan", "brown"),
    ("Paul", "Eva", "gold", "grey"),
    ("Tina", "Sam", "amber", "olive"),
]


def main() -> None:
    """Save activations, sweep, and show how long each takes."""
    torch.set_num_threads(1)  # so small a model is slower with more
    with tl_devicefix.simulate(N_DEVICES), torch.no_grad():
        model = load(N_DEVICES)
        take_time(model)
        prompts = [model.to_tokens(FACTS.format(*words)) for words in PEOPLE]

        start = time.perf_counter()
        loop = [residual_of(model, tokens) for tokens in prompts]
        middle = time.perf_counter()
        flight = list(tl_devicefix.pipeline_map(model, residual_of, prompts))
        end = time.perf_counter()
        assert all(map(torch.equal, loop, flight))
        print(f"saved {len(flight)} activations of layer {LAYER}: the same, bit for bit")
        print(f"in a loop {middle - start:.1f} s, in flight {end - middle:.1f} s")

        show(model, sweep_heads(model, prompts[0]))
        print(f"a sweep over all heads: {time.perf_counter() - end:.1f} s")


def load(n_devices: int) -> Any:
    """The shipped model, by the class that the installed TransformerLens has for it."""
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # TransformerLens 4
        from transformer_lens.model_bridge import TransformerBridge

        bridge = TransformerBridge.boot_transformers(str(CHECKPOINT), n_devices=n_devices)
        bridge.enable_compatibility_mode()
        return bridge
    return HookedTransformer.from_pretrained(str(CHECKPOINT), n_devices=n_devices)


def take_time(model: Any, seconds: float = 0.02) -> None:
    """Make each block sleep, which keeps its device busy."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def residual_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return an activation of a prompt. `pipeline_map` calls this with a view of the model."""
    _, cache = model.run_with_cache(tokens, names_filter=f"blocks.{LAYER}.hook_resid_post")
    return cache["resid_post", LAYER][0, -1].cpu()


def sweep_heads(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logit of the answer with each head left out: the runs of a block are one forward."""
    answer = model.to_tokens(f". {PEOPLE[0][2]}")[0, -1]
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads

    def runs() -> Iterator[list[tuple[str, Any]]]:
        for layer in range(n_layers):
            for head in range(n_heads):
                yield [(f"blocks.{layer}.attn.hook_z", leave_out(head))]

    swept = tl_devicefix.sweep(model, tokens, runs(), batch_size=n_heads)
    return torch.stack([logits[0, -1, answer].cpu() for logits in swept]).view(n_layers, n_heads)


def leave_out(head: int) -> Any:
    """A hook that sets what a head gives to zero."""

    def without(z: torch.Tensor, hook: Any) -> torch.Tensor:
        z[:, :, head] = 0
        return z

    return without


def show(model: Any, logits: torch.Tensor) -> None:
    """Print a line for each layer."""
    print("the answer's logit without each head:")
    for layer, row in enumerate(logits):
        device = model.placement.device_of(f"blocks.{layer}")
        print(f"  layer {layer}, on {device}: " + " ".join(f"{value:6.2f}" for value in row))


if __name__ == "__main__":
    main()
