"""Many runs over four devices, all of them at work: save activations, sweep, see the timeline.

    python examples/save_activations_and_sweep.py [--trace trace.json]

It runs on the small model that ships with the package, over four simulated devices that take time
for what they compute, as if the model were large. Where there are four GPUs, leave out `simulate`,
and load your own model: the rest is the same. https://ui.perfetto.dev shows the trace: when each
device was busy, and with which run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tl_devicefix  # before TransformerLens loads anything
from tl_devicefix.demo import CHECKPOINT
from tl_devicefix.simulation import Timeline, labelled

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
    """Save activations, sweep, and show where the time went."""
    options = arguments()
    with (
        tl_devicefix.simulate(
            N_DEVICES, asynchronous=True, flops_per_second=options.flops_per_second
        ) as machine,
        torch.no_grad(),
    ):
        model = load(N_DEVICES)
        prompts = [model.to_tokens(FACTS.format(*words)) for words in PEOPLE]

        recorded(machine)  # what loading took
        loop = [residual_of(model, tokens) for tokens in enumerate(prompts)]
        of_loop = recorded(machine)
        flight = list(tl_devicefix.pipeline_map(model, residual_of, enumerate(prompts)))
        of_flight = recorded(machine)
        assert all(map(torch.equal, loop, flight))
        print(f"saved {len(flight)} activations of layer {LAYER}: the same, bit for bit")

        show(model, sweep_heads(model, prompts[0]))
        of_sweep = recorded(machine)
    timelines = {
        f"{len(prompts)} runs in a loop": of_loop,
        "the same in flight": of_flight,
        f"a sweep over {model.cfg.n_layers * model.cfg.n_heads} heads, in flight": of_sweep,
    }
    for title, timeline in timelines.items():
        shares = (timeline.busy_share(device) for device in range(N_DEVICES))
        busy = ", ".join(f"{share:.0%}" for share in shares)
        print(f"{title}: {timeline.end - timeline.start:.1f} s, devices busy {busy}")
    of_flight.save(options.trace)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=Path("trace.json"), help="for Perfetto")
    parser.add_argument("--flops-per-second", type=float, default=1e7, help="of each device")
    torch.set_num_threads(1)  # so small a model is slower with more
    return parser.parse_args()


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


def residual_of(model: Any, item: tuple[int, torch.Tensor]) -> torch.Tensor:
    """One run: an activation of a prompt. What is written for a model, a view of it runs too."""
    number, tokens = item
    with labelled(str(number)):  # its name in the trace
        _, cache = model.run_with_cache(tokens, names_filter=f"blocks.{LAYER}.hook_resid_post")
        return cache["resid_post", LAYER][0, -1].cpu()


def sweep_heads(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logit of the answer with each head left out. Each run starts at the head's block."""
    answer = model.to_tokens(f". {PEOPLE[0][2]}")[0, -1]
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads

    def runs() -> Iterator[list[tuple[str, Any]]]:
        for layer in range(n_layers):
            for head in range(n_heads):
                yield [(f"blocks.{layer}.attn.hook_z", leave_out(head))]

    swept = tl_devicefix.sweep(model, tokens, runs())
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


def recorded(machine: Any) -> Timeline:
    """What the devices have done since this was asked last."""
    for device in machine.devices:
        torch.get_device_module(device.type).synchronize(device)
    timeline: Timeline = machine.timeline[:]
    machine.timeline.clear()
    return timeline


if __name__ == "__main__":
    main()
