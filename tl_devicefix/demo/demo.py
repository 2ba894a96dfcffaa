"""The demo: run the shipped checkpoint across several devices, and find its recall heads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from transformers import AutoModelForCausalLM

from tl_devicefix.demo.recall_task import RecallPrompt, recall_prompts
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.multihost.hosts import joined_hosts
from tl_devicefix.placement.devices import DEVICE_TYPE, default_device, device_count
from tl_devicefix.simulation import simulate

CHECKPOINT = Path(__file__).parent / "recall_checkpoint"
"""The small trained checkpoint that ships with the package; see its README."""
TOLERANCE = 1e-4  # the largest difference of float32 log probabilities that counts as rounding
N_PROMPTS, N_FACTS, SEED = 64, 8, 0


def run_demo(n_devices: int) -> bool:
    """Load the shipped checkpoint across `n_devices`, compare it, and show its recall heads.

    Returns True if it agrees with the unfolded Hugging Face model.
    """
    with devices_for(n_devices) as where:
        print(where)
        model = load_checkpoint(n_devices)
        print(f"\n{model.placement}\n")
        prompts = recall_prompts(N_PROMPTS, seed=SEED, n_facts=N_FACTS)
        tokens = model.to_tokens([prompt.text for prompt in prompts])  # [batch, pos]
        logits, cache = model.run_with_cache(
            tokens, names_filter=lambda name: name.endswith("hook_pattern")
        )
        difference = largest_difference(logits, hf_logits(tokens))
        print(
            f"log probabilities, folded on {n_devices} device(s) against the unfolded Hugging "
            f"Face model on the CPU: largest difference {difference:.1e} "
            f"({'ok' if difference < TOLERANCE else 'TOO LARGE'}: {TOLERANCE:.0e} is rounding)"
        )
        # [batch, pos, d_vocab] -> [batch]: the last position, as all prompts are equally long
        words = [model.to_string([token]) for token in logits[:, -1].argmax(dim=-1).tolist()]
        right = sum(word == prompt.answer for word, prompt in zip(words, prompts))
        print(f"\n  {prompts[0].text} -> {words[0]}")
        print(f"recalled {right} of {len(prompts)} answers that only the context gives\n")
        patterns = [cache["pattern", layer] for layer in range(model.cfg.n_layers)]
        _show_heads(model, prompts, patterns)
    return difference < TOLERANCE


def load_checkpoint(n_devices: int, device: torch.device | None = None) -> Any:
    """Load the shipped checkpoint, folded: as a HookedTransformer, from 4.0 on as a Bridge."""
    where: dict[str, Any] = {"n_devices": n_devices, "device": device}
    if has_hooked_transformer():
        from transformer_lens import HookedTransformer

        return HookedTransformer.from_pretrained(str(CHECKPOINT), **where)
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(CHECKPOINT), **where)
    bridge.enable_compatibility_mode()
    return bridge


@contextlib.contextmanager
def devices_for(n_devices: int) -> Iterator[str]:
    """Make devices available within a `with` block: simulated ones if there are too few real ones.

    After `init_hosts`, devices of all hosts count.

    Args:
        n_devices: how many.

    Yields:
        A sentence that says whether they are real or simulated.
    """
    accelerator = default_device()
    if hosts := joined_hosts():
        yield f"Using {n_devices} device(s) of {len(hosts) + 1} hosts."
        return
    n_real = device_count(accelerator.type)
    is_simulated = accelerator.type == DEVICE_TYPE  # within `simulate`; a load raises if too few
    if n_devices == 1 or is_simulated or (accelerator.type != "cpu" and n_real >= n_devices):
        yield f"Using {n_devices} {accelerator.type} device(s)."
        return
    with simulate(n_devices):
        machine = f"{n_real} {accelerator.type}" if accelerator.type != "cpu" else "no accelerator"
        yield (
            f"The demo needs {n_devices} devices and this machine has {machine}: using {n_devices} "
            "simulated devices on the CPU (exact numbers, real placement)."
        )


def hf_logits(tokens: Int[torch.Tensor, "batch pos"]) -> Float[torch.Tensor, "batch pos d_vocab"]:
    """Compute the shipped checkpoint's logits with transformers alone, in float32 on the CPU."""
    hf_model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    with torch.no_grad():
        return hf_model(tokens.cpu()).logits  # [batch, pos, d_vocab]


def largest_difference(
    logits: Float[torch.Tensor, "batch pos d_vocab"],
    reference: Float[torch.Tensor, "batch pos d_vocab"],
) -> float:
    """Return the largest difference between two models' log probabilities, compared on the CPU."""
    # Logits themselves differ: centring the unembedding shifts all logits of a position.
    ours = logits.detach().cpu().log_softmax(dim=-1)
    return (ours - reference.detach().cpu().log_softmax(dim=-1)).abs().max().item()


def _show_heads(
    model: Any,
    prompts: list[RecallPrompt],
    patterns: list[Float[torch.Tensor, "batch head query_pos key_pos"]],
) -> None:
    """Show how much each head attends from the question to the answer in the context."""
    # Both [batch]: indices into the first and the last axis of a pattern.
    batch = torch.arange(len(prompts))
    answer = torch.tensor([prompt.answer_position for prompt in prompts])
    print("attention from the question to the answer in the context, mean over the prompts:")
    # Each pattern is [batch, head, query_pos, key_pos]; its mean over prompts is [head].
    by_head = torch.stack([p.cpu()[batch, :, -1, answer].mean(dim=0) for p in patterns])
    for layer, heads in enumerate(by_head.tolist()):
        shown = "  ".join(
            f"H{head} {value:4.2f} {'#' * round(value * 10):10}" for head, value in enumerate(heads)
        )
        device = model.placement.device_map[f"blocks.{layer}"]
        print(f"  L{layer} on {device}  {shown}".rstrip())
    layer, head = divmod(int(by_head.argmax()), by_head.shape[1])  # by_head: [layer, head]
    print(f"L{layer}H{head} attends to the answer most: {by_head[layer, head]:.2f}")
