"""The shipped checkpoint, its task, and the demo, which runs it across several devices.

The task is in-context recall: a prompt states facts, and then asks for one of them again::

    Alice likes green . Bob likes red . Carol likes blue . Bob likes

The next word is ``red``. Names and objects are paired at random, so only the context has the
answer. ``training/train_recall.py`` makes the training sentences of the same words.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from transformers import AutoModelForCausalLM

from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.multihost.hosts import joined_hosts
from tl_devicefix.placement.devices import DEVICE_TYPE, default_device, device_count
from tl_devicefix.simulation import simulate

CHECKPOINT = Path(__file__).parent / "recall_checkpoint"
"""The small trained checkpoint that ships with the package; see its README."""
TOLERANCE = 1e-4  # the largest difference of float32 log probabilities that counts as rounding
N_PROMPTS, N_FACTS, SEED = 64, 8, 0

NAMES: tuple[str, ...] = (
    *("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack"),
    *("Kate", "Leo", "Mary", "Nick", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tina"),
    *("Umar", "Vera", "Will", "Xena", "Yuri", "Zoe", "Anna", "Ben", "Clara", "Dan"),
    *("Eva", "Felix"),
)

OBJECTS: dict[str, tuple[str, ...]] = {
    "likes": (
        *("red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white"),
        *("grey", "gold", "silver", "violet", "crimson", "turquoise", "beige", "cyan", "magenta"),
        *("ivory", "maroon", "indigo", "olive", "amber"),
    ),
    "visits": (
        *("Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Prague", "Lisbon", "Oslo"),
        *("Athens", "Dublin", "Warsaw", "Tokyo", "Delhi", "Cairo", "Lima", "Boston", "Chicago"),
        *("Sydney", "Toronto", "Havana", "Nairobi", "Seoul", "Jakarta"),
    ),
    "owns": (
        *("cats", "dogs", "horses", "sheep", "goats", "ducks", "geese", "rabbits", "parrots"),
        *("turtles", "snakes", "frogs", "mice", "hamsters", "ponies", "pigs", "cows", "bees"),
        *("owls", "hawks", "swans", "llamas", "camels", "lizards"),
    ),
    "eats": (
        *("apples", "pears", "plums", "grapes", "cherries", "lemons", "melons", "bananas"),
        *("bread", "cheese", "rice", "pasta", "soup", "honey", "nuts", "beans", "corn", "carrots"),
        *("onions", "peppers", "potatoes", "mushrooms", "olives", "eggs"),
    ),
}
"""The words that can follow each verb."""


def run_demo(n_devices: int) -> bool:
    """Load the shipped checkpoint across `n_devices`, and ask it for facts.

    Returns True if it agrees with the unfolded Hugging Face model.
    """
    with devices_for(n_devices) as where:
        print(where)
        model = load_checkpoint(n_devices)
        print(f"\n{model.placement}\n")
        prompts = recall_prompts(N_PROMPTS, seed=SEED, n_facts=N_FACTS)
        tokens = model.to_tokens([prompt.text for prompt in prompts])  # [batch, pos]
        logits = model(tokens)
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
        print(f"recalled {right} of {len(prompts)} answers that only the context gives")
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


class RecallPrompt(NamedTuple):
    """A prompt whose next word can be known only from its context."""

    text: str  # with one space between any two tokens; it ends with the verb of the question
    answer: str  # the word that should come next: the object of the fact asked for


def recall_prompts(n: int, seed: int, n_facts: int) -> list[RecallPrompt]:
    """Draw `n` prompts of `n_facts` facts each; equal arguments give equal prompts."""
    rng = random.Random(seed)
    return [sample_prompt(rng, n_facts) for _ in range(n)]


def sample_prompt(rng: random.Random, n_facts: int) -> RecallPrompt:
    """State facts about different names with one verb, and ask for one of them."""
    names = rng.sample(NAMES, n_facts)
    verb = rng.choice([*OBJECTS])
    objects = rng.sample(OBJECTS[verb], n_facts)
    asked = rng.randrange(n_facts)
    facts = [f"{name} {verb} {what} ." for name, what in zip(names, objects)]
    return RecallPrompt(" ".join([*facts, names[asked], verb]), answer=objects[asked])
